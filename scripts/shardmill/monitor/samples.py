"""Samples: one compact JSON line per interval and writer, appended, rotated, bounded.

Counters are written as they are; rates are made when they are read (`history`), because only there
a restart of the engine, which begins them anew, can be told from a fault.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ..errors import UserError
from ..files import iter_zstd_lines, zstd_writer
from ..layout import Layout
from ..logs import get_logger
from .gpu import GpuReader

if TYPE_CHECKING:
    from ..config import Config
    from ..supervisor_state import ServerStatus

log = get_logger(__name__)

SEGMENT_SECONDS = 86400.0  # a day's samples make a segment
SEGMENT_BYTES = 8 << 20
DAY = 86400.0


@dataclass(slots=True)
class ServerSample:
    """One server at one moment. Counters are totals since the start of the engine (`instance`).

    Args:
        at: seconds since the epoch.
        idle: seconds since tokens or requests last moved, or since it was last seen with nothing to do.
        details: figures of `Load.details`.
        gpus: rows of `gpu.GPU_FIELDS`.
    """

    at: float
    instance: int = 0
    state: str = ""
    running: int = 0
    queued: int = 0
    capacity: int | None = None
    completion_tokens: float | None = None
    prompt_tokens: float | None = None
    restarts: int = 0
    idle: float = 0.0
    details: dict[str, float] = field(default_factory=dict)
    gpus: list[list[Any]] = field(default_factory=list)
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """The line's value: short keys, and none for what is empty."""
        value = {
            "t": round(self.at, 1),
            "i": self.instance,
            "s": self.state,
            "r": self.running,
            "q": self.queued,
            "cap": self.capacity,
            "c": self.completion_tokens,
            "p": self.prompt_tokens,
            "n": self.restarts,
            "z": round(self.idle),
            "d": {key: round(number, 4) for key, number in self.details.items()},
            "g": self.gpus,
            "m": self.message[:500],
        }
        return {key: part for key, part in value.items() if part or key in ("t", "c", "p")}

    @classmethod
    def from_json(cls, value: Any) -> ServerSample | None:
        """The sample in a line's value, or None if it holds none."""
        try:
            get = value.get
            return cls(
                float(value["t"]),
                get("i", 0),
                get("s", ""),
                get("r", 0),
                get("q", 0),
                get("cap"),
                get("c"),
                get("p"),
                get("n", 0),
                get("z", 0),
                get("d") or {},
                get("g") or [],
                get("m", ""),
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


class SampleLog:
    """An append-only file of JSON lines. When its segment is a day old it is compressed beside itself, as
    `<name>.<first second>.jsonl.zst`; segments older than `keep_days` are removed.

    One writer per file. A torn last line, left by a power loss, is ended before anything is appended.
    """

    def __init__(self, path: Path, *, keep_days: float = 7.0, segment_seconds: float = SEGMENT_SECONDS) -> None:
        self.path = path
        self._keep, self._segment = keep_days * DAY, segment_seconds
        self._fd: int | None = None
        self._began = 0.0
        self._size = 0

    def append(self, value: dict[str, Any]) -> None:
        """Write one sample; its key `t` is its time.

        Raises:
            OSError: if the disk is full or gone.
        """
        now = float(value["t"])
        if self._fd is None:
            self._open(now)
        elif now - self._began > self._segment or self._size > SEGMENT_BYTES:
            self.rotate(now)
        line = orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
        assert self._fd is not None
        self._size += os.write(self._fd, line)

    def rotate(self, now: float) -> None:
        """Begin a new segment."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            content = self.path.read_bytes()
            name = f"{self.path.stem}.{int(self._began)}.jsonl.zst"
            with zstd_writer(self.path.with_name(name)) as stream:
                stream.write(content)
            self.path.unlink()
        for segment in segments(self.path):
            if now - _segment_start(segment) > self._keep + self._segment:
                segment.unlink(missing_ok=True)
        self._open(now)

    def close(self) -> None:
        descriptor, self._fd = self._fd, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self, now: float) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._began = now
        if self._size:
            first = next(iter_values(os.pread(self._fd, 4096, 0).split(b"\n")), {})
            self._began = first.get("t", now)
            if os.pread(self._fd, 1, self._size - 1) != b"\n":
                self._size += os.write(self._fd, b"\n")


def segments(path: Path) -> list[Path]:
    """The ended segments of a sample file, oldest first."""
    found = path.parent.glob(f"{path.stem}.*.jsonl.zst") if path.parent.is_dir() else ()
    return sorted(found, key=_segment_start)


def _segment_start(path: Path) -> int:
    digits = path.name.split(".")[-3]
    return int(digits) if digits.isdigit() else 0


def read_segment(path: Path) -> Iterator[dict[str, Any]]:
    """The values of an ended segment; of a damaged one, those before the damage."""
    with contextlib.suppress(UserError, OSError):
        yield from iter_values(iter_zstd_lines(path))


def iter_values(lines: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects with a time among some lines; what is torn or strange is left out."""
    for line in lines:
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict) and isinstance(value.get("t"), int | float):
            yield value


class Sampler:
    """Appends a server's samples: one per interval, and one whenever its state or its engine's start number changes.

    Made for the supervisor's one line a second: `note` never raises, never waits for a GPU's driver, and gives up
    quietly on a full disk until there is room.
    """

    def __init__(self, config: Config, server: str, gpus: tuple[str, ...]) -> None:
        layout: Layout = config.layout
        self._interval = config.monitor.interval
        self._log = SampleLog(layout.server_samples(server), keep_days=config.monitor.retention_days)
        self._gpus = GpuReader(gpus, self._interval)
        self._due = 0.0
        self._last: tuple[str, int] | None = None
        self._told = False

    def note(self, status: ServerStatus) -> None:
        """Take in the status just written."""
        now = time.monotonic()
        state = (status.state, status.instance)
        if now < self._due and state == self._last:
            return
        self._due, self._last = now + self._interval, state
        try:
            self._log.append(self._sample(status).to_json())
            self._told = False
        except Exception as error:  # a fault of the samples must never end a server
            if not self._told:
                log.warning("server %s: its samples cannot be written: %s", status.server, error)
            self._told = True

    def _sample(self, status: ServerStatus) -> ServerSample:
        at = status.at or time.time()
        moved = status.last_progress_at
        return ServerSample(
            at=at,
            instance=status.instance,
            state=status.state,
            running=status.running,
            queued=status.queued,
            capacity=status.capacity,
            completion_tokens=status.completion_tokens,
            prompt_tokens=status.prompt_tokens,
            restarts=status.restarts,
            idle=max(0.0, at - moved) if moved is not None and status.state == "ready" else 0.0,
            details=status.details if status.state == "ready" else {},
            gpus=self._gpus.latest(),
            message=status.message,
        )
