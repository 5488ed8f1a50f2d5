"""What the input holds, as far as planning needs to know: how many records, and which shards changed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json_or_none
from .source import WHERE, Batch, check_unchanged, iter_batches, open_source


@dataclass(frozen=True)
class Survey:
    """A prompts file, counted and hashed.

    A shard is a run of consecutive input records, unusable ones included: shard k holds the records
    [k * shard_size, (k + 1) * shard_size). So a line that is fixed or appended changes its own shard
    and no other. Blank lines are no records.

    Args:
        path: as the user wrote it.
        size_bytes, mtime_ns: of the file when it was read.
        records: number of records.
        shard_size: records per shard; the last shard may hold fewer.
        digests: for each shard the SHA-256 of its raw records, 64 hex digits (see `ShardDigests`).
    """

    path: str
    size_bytes: int
    mtime_ns: int
    records: int
    shard_size: int
    digests: list[str]

    @cached_property
    def shard_names(self) -> list[str]:
        """Names of the shards in order: "00000", "00001", ..."""
        return [shard_name(number) for number in range(len(self.digests))]

    @cached_property
    def digest(self) -> str:
        """One digest of all, 64 hex digits."""
        return digest_of_all(self.digests)


def shard_name(number: int) -> str:
    """Name of shard `number`: five digits, more from 100,000 on, so that no name ever changes as the input grows."""
    return f"{number:05d}"


def digest_of_all(digests: list[str]) -> str:
    r"""SHA-256 over the shards' digests in order, each followed by "\n"; 64 hex digits."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


class ShardDigests:
    r"""SHA-256 of each shard's raw records, taken as batches go by.

    A shard's digest is that of its raw lines, each followed by b"\n", without blank lines, CR at line
    ends and BOM. For Parquet the lines are the rows as JSON objects.
    """

    def __init__(self, shard_size: int) -> None:
        self._shard_size = shard_size
        self._finished: list[str] = []
        self._hash = hashlib.sha256()
        self._room = shard_size
        self.records = 0

    def update(self, batch: Batch) -> None:
        lines, text = batch.lines, memoryview(batch.text)
        first = start = 0
        while len(lines) - first >= self._room:
            last = first + self._room
            stop = start + sum(map(len, lines[first:last])) + self._room
            self._hash.update(text[start:stop])
            self._finished.append(self._hash.hexdigest())
            self._hash, self._room = hashlib.sha256(), self._shard_size
            first, start = last, stop
        if first < len(lines):
            self._hash.update(text[start:])
            self._room -= len(lines) - first
        self.records += len(lines)

    def finish(self) -> list[str]:
        """The digests of all shards, of which the last may be a partial one."""
        if self._room < self._shard_size:
            return [*self._finished, self._hash.hexdigest()]
        return list(self._finished)


def survey(path: str, shard_size: int) -> Survey:
    """Count and hash a prompts file in one streaming pass. Writes nothing.

    Memory stays constant (one chunk or one record, plus a digest per shard), and a plain file costs no
    Python code per line.

    Raises:
        UserError: about `prompts.path`, if the file cannot be read, is damaged or holds no record.
    """
    source = open_source(path)
    digests = ShardDigests(shard_size)
    for batch in iter_batches(source):
        digests.update(batch)
    check_unchanged(source)
    if not digests.records:
        raise no_records(path)
    return Survey(path, source.size_bytes, source.mtime_ns, digests.records, shard_size, digests.finish())


def no_records(path: str) -> UserError:
    return UserError(f"{path} holds no records", where=WHERE, hint="it needs at least one")


def cached_survey(path: str, shard_size: int, index_path: Path | str) -> Survey:
    """What the index recorded of the file, if it is about the same file and shard size; else a fresh survey.

    The file is taken for the same when path, size and mtime agree, as `make` would.

    Args:
        index_path: `Layout.prompt_index`; it may be missing or damaged.

    Raises:
        UserError: as `survey` does.
    """
    source = open_source(path)
    known = _from_index(read_json_or_none(index_path))
    if known and (known.path, known.size_bytes, known.mtime_ns, known.shard_size) == (
        path,
        source.size_bytes,
        source.mtime_ns,
        shard_size,
    ):
        return known
    return survey(path, shard_size)


def _from_index(index: Any) -> Survey | None:
    try:
        known = Survey(
            *(index[key] for key in ("path", "size_bytes", "mtime_ns", "records", "shard_size")),
            digests=[str(shard["digest"]) for shard in index["shards"]],
        )
        return known if known.digests and known.digest == index["digest"] else None
    except (KeyError, TypeError):
        return None
