"""Processes that normalise and write prompt shards side by side, since the work per record is Python's.

What one of them cannot know is whether an id was seen in another's shard. So a shard is written beside its place,
and takes its name when whoever sees all ids has accepted it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from ..config import Prompts
from ..errors import UserError
from ..ids import IdsDigest, id_digest
from ..reaper import die_with_parent
from .records import Unusable, read_record
from .shards import Written, holds, write_shard

MOST_WRITERS = 4  # reading and the ids, which stay in one process, keep about that many busy
# Of the raw lines that wait: a shard with more of them is streamed instead.
SHARD_BYTES = 8 << 20
WORTH_BYTES = 16 << 20  # of input; below that, starting the processes takes longer than they save

Record = tuple[bytes, int]  # a raw line and its number


@dataclass(frozen=True)
class Part:
    """A shard as it was written, if none of its ids was seen before.

    Args:
        written: the file beside its place; `kept` when the right bytes are in place already.
        ids: the sum of its ids.
        digests: each usable record's `id_digest`, 32 bytes after 32 bytes.
        lines: each usable record's line number.
        unusable: the other records: raw line and reason.
    """

    written: Written
    ids: IdsDigest
    digests: bytes
    lines: array[int]
    unusable: list[tuple[bytes, Unusable]]


@dataclass(frozen=True)
class Pending:
    """A shard that is being written; `records` are kept in case it must be written again."""

    path: Path
    records: list[Record]
    part: Future[Part]

    def result(self) -> Part:
        """Wait for it.

        Raises:
            UserError: if the disk refuses, or its process was killed.
        """
        try:
            return self.part.result()
        except BrokenProcessPool:
            raise UserError(
                "a process that writes prompt shards was killed", where=str(self.path), hint="is there memory left?"
            ) from None

    def accept(self, part: Part) -> None:
        """Put the file in its place."""
        if not part.written.kept:
            os.replace(_beside(self.path), self.path)

    def discard(self) -> None:
        _beside(self.path).unlink(missing_ok=True)


Submit = Callable[[Path, list[Record]], Pending]


@contextlib.contextmanager
def shard_writers(settings: Prompts, count: int) -> Iterator[Submit]:
    """What hands a shard's path and records to one of `count` processes."""
    # Forked, since spawning would run the caller's main script again; nothing here has threads at this point.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(count, context, initializer=_enter, initargs=(os.getpid(),))
    try:
        yield lambda path, records: Pending(path, records, _submit(pool, path, records, settings))
    finally:
        pool.shutdown(cancel_futures=True)


def writers_wanted() -> int:
    """How many processes this machine has cores for; 0 where the shards are better written by the reader itself."""
    if sys.platform != "linux":
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores, MOST_WRITERS) if cores > 1 else 0


def _enter(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    die_with_parent(parent, signal.SIGKILL)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.waiting.tmp")  # a name that `shards.sweep` removes


def _submit(pool: ProcessPoolExecutor, path: Path, records: list[Record], settings: Prompts) -> Future[Part]:
    # One text and one array cross the pipe ten times faster than the records one by one.
    text, numbers = b"\n".join(raw for raw, _ in records), array("Q", [line for _, line in records])
    return pool.submit(_write_part, path, text, numbers, settings)


def _write_part(path: Path, text: bytes, numbers: array[int], settings: Prompts) -> Part:
    ids, lines = IdsDigest(), array("Q")
    digests: list[bytes] = []
    unusable: list[tuple[bytes, Unusable]] = []

    def usable() -> Iterator[bytes]:
        for raw, line in zip(text.split(b"\n"), numbers, strict=True):
            record = read_record(raw, line, settings)
            if isinstance(record, Unusable):
                unusable.append((raw, record))
                continue
            digest = id_digest(record.id)
            ids.add_digest(digest)
            digests.append(digest)
            lines.append(line)
            yield record.encoded

    beside = _beside(path)
    written = write_shard(beside, usable())
    if holds(path, written):
        beside.unlink()
        written = Written(written.bytes, written.sha256, kept=True)
    return Part(written, ids, b"".join(digests), lines, unusable)
