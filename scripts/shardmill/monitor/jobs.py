"""What a shard job adds to the samples: requests, verdicts, retries, latencies and lengths, as sums per interval."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from ..logs import get_logger
from .samples import SampleLog

if TYPE_CHECKING:
    from ..config import Config

log = get_logger(__name__)

STEPS = 4  # buckets per doubling: each is 19 % wide


def bucket(value: float) -> int:
    """The logarithmic bucket of a value; what is below 0.01 counts as 0.01."""
    return round(STEPS * math.log2(max(value, 0.01)))


def bucket_value(index: int) -> float:
    """The middle of a bucket."""
    return 2.0 ** (index / STEPS)


class JobLog:
    """Collects what happens to a shard's requests and appends it once per interval (`layout.shard_samples`).

    Every line holds what came since the line before, so that lines can simply be added up, whatever died in between.
    """

    def __init__(self, config: Config, shard: str) -> None:
        self._interval = config.monitor.interval
        self._log = SampleLog(config.layout.shard_samples(shard), segment_seconds=math.inf)
        self._lock = threading.Lock()
        self._due = time.monotonic() + self._interval
        self._done: int | None = None
        self._rejected = 0
        self._told = False
        self._clear()

    def _clear(self) -> None:
        self._counts: dict[str, Counter[Any]] = defaultdict(Counter)
        self._servers: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self._requests = self._retries = 0

    def note_request(self, server: str, entry: dict[str, Any] | None) -> None:
        """A request has ended at a server: with a journal entry, or None if its prompt is to be sent again.

        Never raises: an answer that cannot be counted is still an answer.
        """
        with self._lock, contextlib.suppress(KeyError, TypeError, ValueError):
            row = self._servers[server]
            if entry is None:
                row[3] += 1
                return
            self._requests += 1
            self._retries += entry["attempt"] > 1
            self._counts["v"][entry["verdict"]] += 1
            answer = entry.get("answer")
            if answer is not None:
                self._note_answer(entry["seconds"], answer, row)

    def _note_answer(self, seconds: float, answer: dict[str, Any], row: list[int]) -> None:
        usage = answer.get("usage") or {}
        tokens = usage.get("completion_tokens") or 0
        row[0] += 1
        row[1] += tokens
        row[2] += usage.get("prompt_tokens") or 0
        self._counts["w"][bucket(seconds)] += 1
        self._counts["fr"][str(answer.get("finish_reason"))] += 1
        if tokens:
            self._counts["l"][bucket(tokens)] += 1
        if thought := thought_tokens(answer):
            self._counts["h"][bucket(thought)] += 1

    def tick(self, *, done: int, prompts: int, in_flight: int, rejected: int) -> None:
        """Once a second or so: append a line if it is time. Never raises."""
        if self._done is None:
            self._done = done  # what the journal brought is no progress of this job's
        if time.monotonic() >= self._due:
            self.write(done=done, prompts=prompts, in_flight=in_flight, rejected=rejected)

    def write(self, *, done: int, prompts: int, in_flight: int, rejected: int) -> None:
        """Append a line. Never raises: what is in the journal counts, these are only figures."""
        self._due = time.monotonic() + self._interval
        with self._lock:
            counts, servers, requests, retries = self._counts, self._servers, self._requests, self._retries
            self._clear()
        settled = done - (self._done if self._done is not None else done)
        value: dict[str, Any] = {
            "t": round(time.time(), 1),
            "d": done,
            "of": prompts,
            "f": in_flight,
            "k": settled,
            "j": rejected - self._rejected,
            "n": requests,
            "r": retries,
            "x": dict(servers),
            **{name: {str(key): number for key, number in counter.items()} for name, counter in counts.items()},
        }
        self._done, self._rejected = done, rejected
        try:
            self._log.append({key: part for key, part in value.items() if part or key == "t"})
            self._told = False
        except Exception as error:
            if not self._told:
                log.warning("%s: samples cannot be written: %s", self._log.path, error)
            self._told = True

    def close(self) -> None:
        self._log.close()


def thought_tokens(answer: dict[str, Any]) -> int:
    """Tokens of an answer's thought: as the engine counted them, else by the thought's share of the characters."""
    usage = answer.get("usage") or {}
    if (counted := usage.get("reasoning_tokens")) is not None:
        return counted
    thought, content = len(answer.get("reasoning_content") or ""), len(answer.get("content") or "")
    return round((usage.get("completion_tokens") or 0) * thought / (thought + content)) if thought else 0
