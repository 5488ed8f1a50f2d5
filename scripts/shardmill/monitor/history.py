"""The samples of a run, made into rates per minute and events, and kept up to date as they grow.

All counters begin anew when an engine is restarted, so rates are taken between neighbouring samples of one
instance; the first sample of a new one counts from 0.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..layout import Layout
from .samples import ServerSample, iter_values, read_segment

MINUTE = 60.0
GAP_SECONDS = 180.0  # between two samples of a server: nobody was there in the meantime
SETTLING_SECONDS = 120.0  # after the start of an engine, in which its speed means nothing
RECENT = 64  # samples per server that are kept as they are
HISTORY_GPU = ("use", "sm_clock_mhz", "power_w", "temperature_c")
_GPU_COLUMNS = (1, 3, 4, 5)


@dataclass(frozen=True)
class Event:
    """Something that happened to a server or a shard."""

    at: float
    kind: str  # started, ready, down, failed, stopped
    server: str
    text: str


@dataclass(slots=True)
class Minute:
    """Sums over the samples of one server within one minute; `seconds` is how much of it they cover."""

    seconds: float = 0.0
    ready: float = 0.0
    settled: float = 0.0  # seconds in which the engine was not fresh
    tokens: float = 0.0
    prompt_tokens: float = 0.0
    running: float = 0.0
    queued: float = 0.0
    capacity: int | None = None
    counted: bool = False  # whether the engine counts tokens at all
    details: dict[str, list[float]] = field(default_factory=dict)  # name: [sum, count]
    gpus: dict[str, list[list[float]]] = field(default_factory=dict)  # gpu: [sum, count] for each of HISTORY_GPU
    reasons: int = 0

    @property
    def rate(self) -> float:
        """Completion tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def load(self) -> float:
        """Requests running, on average."""
        return self.running / self.seconds if self.seconds else 0.0

    @property
    def waiting(self) -> float:
        """Requests queued in the server, on average."""
        return self.queued / self.seconds if self.seconds else 0.0

    def detail(self, name: str) -> float | None:
        """Mean of one of the engine's further figures."""
        total, count = self.details.get(name, (0.0, 0))
        return total / count if count else None

    def gpu(self, column: str) -> float | None:
        """Mean over the server's GPUs of one of HISTORY_GPU."""
        index = HISTORY_GPU.index(column)
        means = [sums[index][0] / sums[index][1] for sums in self.gpus.values() if sums[index][1]]
        return sum(means) / len(means) if means else None


class ServerHistory:
    """One server, sample by sample.

    Args:
        stall_seconds: without progress, while requests are in it, that count as a stall.
    """

    def __init__(self, name: str, stall_seconds: float) -> None:
        self.name = name
        self.minutes: dict[int, Minute] = {}
        self.recent: deque[ServerSample] = deque(maxlen=RECENT)
        self.events: list[Event] = []
        self.stalls: list[list[Any]] = []  # [since, until or None, requests in it]
        self.completion_tokens = self.prompt_tokens = 0.0
        self.covered = 0.0
        self.last: ServerSample | None = None
        self._stall_seconds = stall_seconds
        self._instance_since = 0.0

    def add(self, sample: ServerSample) -> None:
        """Take in the next sample; one that is not newer than the last is known already."""
        last = self.last
        if last is not None and sample.at <= last.at:
            return
        self.last = sample
        self.recent.append(sample)
        is_new = last is None or sample.instance != last.instance
        if is_new:
            self._instance_since = sample.at
        self._note_events(last, sample)
        self._note_stall(sample)
        if last is None:
            return
        tokens = _grown(last.completion_tokens, sample.completion_tokens, is_new)
        prompt = _grown(last.prompt_tokens, sample.prompt_tokens, is_new)
        self.completion_tokens += tokens
        self.prompt_tokens += prompt
        span = sample.at - last.at
        if span > GAP_SECONDS:
            return
        self.covered += span
        self._fill(last.at, sample, span, tokens, prompt)

    def _fill(self, since: float, sample: ServerSample, span: float, tokens: float, prompt: float) -> None:
        number = int((since + span / 2) // MINUTE)
        minute = self.minutes.get(number)
        if minute is None:
            minute = self.minutes[number] = Minute()
        minute.seconds += span
        minute.tokens += tokens
        minute.prompt_tokens += prompt
        minute.running += sample.running * span
        minute.queued += sample.queued * span
        minute.capacity = sample.capacity or minute.capacity
        minute.counted = minute.counted or sample.completion_tokens is not None
        if sample.state == "ready":
            minute.ready += span
            if sample.at - self._instance_since > SETTLING_SECONDS:
                minute.settled += span
        for name, value in sample.details.items():
            sums = minute.details.setdefault(name, [0.0, 0])
            sums[0] += value
            sums[1] += 1
        for row in sample.gpus:
            self._fill_gpu(minute, row)

    @staticmethod
    def _fill_gpu(minute: Minute, row: list[Any]) -> None:
        sums = minute.gpus.setdefault(str(row[0]), [[0.0, 0] for _ in HISTORY_GPU])
        for pair, column in zip(sums, _GPU_COLUMNS, strict=True):
            if row[column] is not None:
                pair[0] += row[column]
                pair[1] += 1
        minute.reasons |= int(row[6] or 0)

    def _note_events(self, last: ServerSample | None, sample: ServerSample) -> None:
        def add(kind: str, text: str) -> None:
            self.events.append(Event(sample.at, kind, self.name, text))

        before = last.state if last else ""
        if sample.state == before or (last is None and sample.state != "starting"):
            return  # what was before the first sample that is read is not known
        if sample.state == "restarting":
            add("down", sample.message or "restarting")
        elif sample.state == "failed":
            add("failed", f"given up: {sample.message}" if sample.message else "given up")
        elif sample.state == "ready":
            add("ready", f"ready (start {sample.instance})")
        elif sample.state == "starting":
            add("started", "starting")
        elif sample.state in ("draining", "stopped") and before not in ("draining", "stopped"):
            add("stopped", "stopping")

    def _note_stall(self, sample: ServerSample) -> None:
        inside = sample.running + sample.queued
        is_stalled = sample.state == "ready" and sample.idle > self._stall_seconds
        is_open = bool(self.stalls) and self.stalls[-1][1] is None
        if is_stalled and not is_open:
            self.stalls.append([sample.at - sample.idle, None, inside])
        elif is_open and not is_stalled:
            self.stalls[-1][1] = sample.at

    def forget_before(self, at: float) -> None:
        """Let go of minutes that nobody looks at any more."""
        for number in [number for number in self.minutes if (number + 1) * MINUTE < at]:
            del self.minutes[number]


def _grown(before: float | None, now: float | None, is_new: bool) -> float:
    if now is None:
        return 0.0
    return now if is_new or before is None or now < before else now - before


@dataclass(slots=True)
class JobMinute:
    """Sums over the lines of all shard jobs within one minute."""

    requests: int = 0
    retries: int = 0
    resent: int = 0
    settled: int = 0
    rejected: int = 0
    answers: int = 0
    tokens: int = 0
    latencies: Counter[int] = field(default_factory=Counter)


class JobHistory:
    """All shard jobs together."""

    def __init__(self) -> None:
        self.minutes: dict[int, JobMinute] = {}
        self.verdicts: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.latencies: Counter[int] = Counter()
        self.lengths: Counter[int] = Counter()
        self.thoughts: Counter[int] = Counter()
        self.servers: dict[str, list[int]] = {}  # [answers, completion tokens, prompt tokens, requests sent again]
        self.done: dict[str, tuple[int, int]] = {}  # shard: (settled prompts, prompts) by its job's last word

    def add(self, shard: str, value: dict[str, Any]) -> None:
        """Take in one line of a shard's job."""
        number = int((value["t"] - 1) // MINUTE)
        minute = self.minutes.get(number)
        if minute is None:
            minute = self.minutes[number] = JobMinute()
        get = value.get
        minute.requests += get("n", 0)
        minute.retries += get("r", 0)
        minute.settled += get("k", 0)
        minute.rejected += get("j", 0)
        for server, row in get("x", {}).items():
            sums = self.servers.setdefault(server, [0, 0, 0, 0])
            for index, part in enumerate(row):
                sums[index] += part
            minute.answers += row[0]
            minute.tokens += row[1]
            minute.resent += row[3]
        for name, counter in (("v", self.verdicts), ("fr", self.finish_reasons)):
            if name in value:
                counter.update(value[name])
        for name, histogram in (("w", self.latencies), ("l", self.lengths), ("h", self.thoughts)):
            for key, count in get(name, {}).items():
                histogram[int(key)] += count
        for key, count in get("w", {}).items():
            minute.latencies[int(key)] += count
        self.done[shard] = (get("d", 0), get("of", 0))

    def sums(self, since: float, until: float) -> JobMinute:
        """Everything of the minutes that begin within [since, until)."""
        total = JobMinute()
        for number, minute in self.minutes.items():
            if since <= number * MINUTE < until:
                for name in ("requests", "retries", "resent", "settled", "rejected", "answers", "tokens"):
                    setattr(total, name, getattr(total, name) + getattr(minute, name))
                total.latencies.update(minute.latencies)
        return total

    def forget_before(self, at: float) -> None:
        for number in [number for number in self.minutes if (number + 1) * MINUTE < at]:
            del self.minutes[number]


class _Follower:
    """The whole lines of a growing file, each once."""

    def __init__(self) -> None:
        self._inode = self._offset = 0

    def is_anew(self, files: _Files) -> bool:
        """Whether the file was begun anew since it was last read."""
        if not files.growing or not self._inode:
            return bool(self._inode)
        status = files.growing[1]
        return status.st_ino != self._inode or status.st_size < self._offset

    def read(self, path: Path, status: os.stat_result) -> list[bytes]:
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0
        if status.st_size <= self._offset:
            return []
        try:
            with path.open("rb") as handle:
                handle.seek(self._offset)
                data = handle.read()
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return data[:whole].split(b"\n")[:-1]


class History:
    """All samples of a run from `since` on; `refresh` reads what is new.

    Args:
        since: seconds since the epoch; what ended before is not read. Of the engines' counters only growth after
            that counts.
        keep: seconds of minutes to keep in memory; None: all.
    """

    def __init__(self, layout: Layout, *, since: float = 0.0, keep: float | None = None, stall: float = 120.0) -> None:
        self.layout = layout
        self.servers: dict[str, ServerHistory] = {}
        self.jobs = JobHistory()
        self.forecasts: list[dict[str, Any]] = []
        self._since, self._keep, self._stall = since, keep, stall
        self._followers: dict[Path, _Follower] = {}

    def refresh(self) -> None:
        """Read everything that was appended since the last time."""
        self._read_machine(self.layout, "")
        for pool in pools_of(self.layout):
            self._read_machine(self.layout.of_pool(pool), f"{pool}.")
        if self._keep is not None and self.newest:
            for history in (*self.servers.values(), self.jobs):
                history.forget_before(self.newest - self._keep)

    @property
    def newest(self) -> float:
        """Time of the newest sample of a server; 0 if there is none."""
        return max((server.last.at for server in self.servers.values() if server.last), default=0.0)

    @property
    def span(self) -> tuple[int, int]:
        """First and one past the last minute that any server has; (0, 0) if there is none."""
        numbers = [number for server in self.servers.values() for number in server.minutes]
        numbers += self.jobs.minutes
        return (min(numbers), max(numbers) + 1) if numbers else (0, 0)

    def events(self) -> list[Event]:
        """Events of all servers in order of time."""
        return sorted((event for server in self.servers.values() for event in server.events), key=lambda e: e.at)

    def _read_machine(self, layout: Layout, prefix: str) -> None:
        """Read one machine's samples; of a run over several machines, servers are named `<pool>.<server>`."""
        for files in _scan(layout.samples):
            if files.stem.startswith("server-"):
                self._read_server(files, prefix + files.stem.removeprefix("server-"))
            elif files.stem == layout.forecasts.stem and not prefix:
                self.forecasts += [value for value in self._values(files) if value["t"] >= self._since]
        for files in _scan(layout.samples / "shards"):
            for value in self._values(files):
                if value["t"] >= self._since:
                    self.jobs.add(files.stem, value)

    def _read_server(self, files: _Files, name: str) -> None:
        server = self.servers.setdefault(name, ServerHistory(name, self._stall))
        for value in self._values(files):
            if value["t"] >= self._since and (sample := ServerSample.from_json(value)):
                server.add(sample)

    def _values(self, files: _Files) -> Iterator[dict[str, Any]]:
        """What is new in a sample file; when its segment has ended, also what that had last."""
        follower = self._followers.get(files.folder / files.stem)
        if follower is None:
            if files.newest < self._since:
                return
            follower = self._followers[files.folder / files.stem] = _Follower()
            ended = files.ended
        else:
            ended = files.ended[-1:] if follower.is_anew(files) else []
        for path, status in ended:
            if status.st_mtime >= self._since:
                yield from read_segment(path)
        if files.growing:
            yield from iter_values(follower.read(*files.growing))


@dataclass
class _Files:
    """A sample file: the part that grows, and the segments that ended, oldest first."""

    folder: Path
    stem: str
    growing: tuple[Path, os.stat_result] | None = None
    ended: list[tuple[Path, os.stat_result]] = field(default_factory=list)

    @property
    def newest(self) -> float:
        """When it was last written to."""
        return max(status.st_mtime for _, status in [*self.ended, *([self.growing] if self.growing else [])])


def pools_of(layout: Layout) -> list[str]:
    """The pools of a run over several machines that left samples; none where this is one of them."""
    if layout.pool is not None or not layout.pools.is_dir():
        return []
    return sorted(path.parent.name for path in layout.pools.glob("*/samples"))


def _scan(folder: Path) -> list[_Files]:
    """The sample files of a folder, by name."""
    found: dict[str, _Files] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            stem, _, kind = entry.name.partition(".")
            if entry.name.startswith("."):
                continue
            with contextlib.suppress(OSError):
                if kind == "jsonl":
                    found.setdefault(stem, _Files(folder, stem)).growing = (Path(entry.path), entry.stat())
                elif kind.endswith(".jsonl.zst"):
                    found.setdefault(stem, _Files(folder, stem)).ended.append((Path(entry.path), entry.stat()))
    return list(found.values())
