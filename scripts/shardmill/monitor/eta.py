"""When a run will be done, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .history import MINUTE, JobHistory
from .jobs import bucket_value

BLOCK_MINUTES = 5  # minutes that are taken together, because neighbouring ones are alike
BLOCKS = 36
Z = 1.645  # both ends together: 90 %
FEWEST = 20  # settled prompts before anything is said


@dataclass(frozen=True)
class Eta:
    """Seconds that are left, with the ends of the range that holds with a probability of about 90 %."""

    seconds: float
    low: float
    high: float
    pace: float  # prompts per second


def estimate(
    jobs: JobHistory, *, left: int, shards_left: int, since: float, now: float, shard_means: Sequence[float] = ()
) -> Eta | None:
    """Forecast from the pace of the last hours; None while there is too little to go by.

    The spread has three parts: the pace varies from block to block; the prompts to come may have longer or shorter
    answers than those so far, as much as finished shards differ from each other; and the last answers take as long
    as the longest do. A run that is younger than a few answers has seen the short ones first: its range is doubled.

    Args:
        left: prompts without an outcome.
        shards_left: shards that they lie in.
        since: when this session began; pauses before do not count.
        shard_means: mean tokens per answer of each finished shard.
    """
    if left <= 0:
        return Eta(0.0, 0.0, 0.0, 0.0)
    # The first minute holds the start, the last one is not over.
    first = max(math.ceil(since / MINUTE), int(now // MINUTE) - BLOCK_MINUTES * BLOCKS)
    end = int(now // MINUTE)
    counts = [jobs.minutes[n].settled if n in jobs.minutes else 0 for n in range(first, end)]
    while counts and counts[0] == 0:
        counts.pop(0)  # servers starting
    settled = sum(counts)
    if settled < FEWEST or len(counts) < 2:
        return None
    pace = settled / (len(counts) * MINUTE)
    seconds = left / pace
    drift = _relative_spread(shard_means) * math.sqrt(1 / max(len(shard_means), 1) + 1 / max(shards_left, 1))
    error = math.hypot(_pace_error(counts), drift, 1 / math.sqrt(settled))
    longest = quantile(jobs.latencies, 0.99)
    if len(counts) * MINUTE < 3 * longest:
        error *= 2
    spread = Z * error
    return Eta(seconds, seconds / (1 + spread), seconds * (1 + spread) + longest, pace)


def _pace_error(counts: list[int]) -> float:
    """Relative standard error of the mean pace, from blocks; with fewer than three of them, from single minutes."""
    size = BLOCK_MINUTES if len(counts) >= 3 * BLOCK_MINUTES else 1
    blocks = [sum(counts[i : i + size]) for i in range(len(counts) % size, len(counts), size)]
    if len(blocks) < 2 or not sum(blocks):
        return 0.5
    return statistics.stdev(blocks) / statistics.fmean(blocks) / math.sqrt(len(blocks))


def _relative_spread(means: Sequence[float]) -> float:
    return statistics.stdev(means) / statistics.fmean(means) if len(means) >= 3 and statistics.fmean(means) > 0 else 0.1


def quantile(histogram: dict[int, int], share: float) -> float:
    """A quantile of a histogram of `jobs.bucket`s; 0 if it is empty."""
    total, seen = sum(histogram.values()), 0
    for index in sorted(histogram):
        seen += histogram[index]
        if seen >= share * total:
            return bucket_value(index)
    return 0.0
