"""Synthetic histories of runs, as their samples lie on disk: servers with realistic noise, and shard jobs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from shardmill.monitor.history import History
from shardmill.monitor.samples import ServerSample

START = 1_800_000_000.0  # any moment, on the minute
INTERVAL = 10.0
RATE = 2100.0  # tokens per second of a well server


@dataclass
class Noise:
    """How a server's speed varies: white noise per sample, and a slow wander that its batch's mix causes.

    The defaults make neighbouring 20 s windows differ up to 1.8 times within some minutes.
    """

    white: float = 0.17
    wander: float = 0.03
    memory: float = 90.0  # seconds in which the wander forgets

    def factors(self, rng: random.Random) -> Iterator[float]:
        keep = math.exp(-INTERVAL / self.memory)
        slow = rng.gauss(0, self.wander)
        while True:
            slow = keep * slow + math.sqrt(1 - keep * keep) * rng.gauss(0, self.wander)
            yield max(0.05, 1 + slow + rng.gauss(0, self.white))


def server_series(
    seconds: float,
    *,
    seed: int,
    speed: Callable[[float], float] = lambda t: 1.0,
    acceptance: Callable[[float], float] = lambda t: 3.4,
    noise: Noise | None = None,
    gpu: str | None = None,
    slots: int = 48,
) -> Iterator[ServerSample]:
    """A server's samples; `speed` and `acceptance` are functions of the seconds since the start."""
    rng = random.Random(seed)
    factors = (noise or Noise()).factors(rng)
    tokens = prompt = 0.0
    for step in range(int(seconds / INTERVAL) + 1):
        at = step * INTERVAL
        now = speed(at)
        tokens += RATE * now * next(factors) * INTERVAL
        prompt += RATE / 8 * now * INTERVAL
        gpus = []
        if gpu is not None:
            clock = 1900 * min(1.0, now + 0.02)
            gpus = [[gpu, 97, 151.2, round(clock), round(900 * now), 71 if now > 0.9 else 88, 0 if now > 0.9 else 0x20]]
        details = {"acceptance_length": acceptance(at) + rng.gauss(0, 0.15), "token_usage": rng.uniform(0.3, 0.5)}
        yield ServerSample(
            START + at, 1, "ready", slots, rng.randrange(6), slots, round(tokens), round(prompt), 0, 0.5, details, gpus
        )


def history_of(layout: Any, series: dict[str, Iterator[ServerSample]]) -> History:
    """A history as if it had been read from files."""
    from shardmill.monitor.history import ServerHistory

    history = History(layout)
    for name, samples in series.items():
        server = history.servers[name] = ServerHistory(name, 120)
        for sample in samples:
            server.add(sample)
    return history


def write_lines(path: Path, values: Iterator[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(value) + b"\n" for value in values))
