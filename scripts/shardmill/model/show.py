"""Sizes, durations and progress as a person reads them."""

from __future__ import annotations

import logging
import time

GIGABYTE = 1e9


def human_bytes(count: float) -> str:
    """A size in decimal units: 1500000 is "1.5 MB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def human_seconds(seconds: float) -> str:
    """A duration in its two largest units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Progress:
    """One log line every few seconds: percent, size, rate and time left. Not thread-safe: one owner.

    Args:
        logger: where the lines go.
        label: what is being done.
        total: bytes in all.
        start: bytes that were there before, which count as done but not for the rate.
        every: seconds between two lines.
    """

    def __init__(self, logger: logging.Logger, label: str, total: int, *, start: int = 0, every: float = 5.0) -> None:
        self._logger, self._label, self._total, self._every = logger, label, total, every
        self._first = start
        self._began = self._last = time.monotonic()

    def update(self, done: int) -> None:
        """Say where things stand, if it is time."""
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        self._logger.info("%s: %s", self._label, self._describe(done, now - self._began))

    def finish(self, done: int) -> None:
        """Say what it came to."""
        seconds = time.monotonic() - self._began
        moved = max(0, done - self._first)
        rate = f" ({moved / seconds / GIGABYTE:.2f} GB/s)" if moved and seconds > 0 else ""
        self._logger.info("%s: done, %s in %s%s", self._label, human_bytes(done), human_seconds(seconds), rate)

    def _describe(self, done: int, seconds: float) -> str:
        share = 100 * done / self._total if self._total else 100
        rate = max(0, done - self._first) / seconds if seconds > 0 else 0
        left = f"{human_seconds((self._total - done) / rate)} left" if rate else "waiting for bytes"
        size = f"{human_bytes(done)} of {human_bytes(self._total)}"
        return f"{share:.0f} % ({size}), {rate / GIGABYTE:.2f} GB/s, {left}"
