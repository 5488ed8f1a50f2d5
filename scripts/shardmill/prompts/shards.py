"""Prompt shard files: writing one, reading one, and seeing at a glance which are gone or damaged."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
import zstandard

from ..errors import UserError
from ..files import CHUNK_BYTES, atomic_writer, iter_zstd_lines, sha256_file
from ..layout import Layout

# Shards are read once or twice and then thrown away: two thirds of level 3's time for 5 % more bytes.
ZSTD_LEVEL = 1

REMAKE = "remove prompts/index.json of the run and run again to have the prompts split anew"


@dataclass(frozen=True)
class Written:
    """A shard file: size in bytes, SHA-256 of the compressed file (64 hex digits), and whether it was there already."""

    bytes: int
    sha256: str
    kept: bool


class _Unchanged(Exception):
    """The file that was there holds the same bytes: drop the new one, so that the old one keeps its mtime."""


class _Tee:
    """A file that is hashed and measured while it is written."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        return self._handle.write(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a clear line about `path`.

    Raises:
        UserError: for every OSError within the block.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "make room there and run again" if full else "check that the run's folder can be written to"
        raise UserError(f"cannot be written ({error.strerror or error})", where=str(path), hint=hint) from None


def write_shard(path: Path, lines: Iterable[bytes]) -> Written:
    """Write a shard atomically as one zstd frame with a checksum, unless the same bytes are there already.

    It is not flushed to the disk here: `make_durable` does that for all shards at once, which is faster.

    Args:
        lines: JSON lines, each with its newline.

    Raises:
        UserError: if the disk refuses.
    """
    kept = False
    with writing(path):
        try:
            with atomic_writer(path, fsync=False) as handle:
                tee = _Tee(handle)
                compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)
                with compressor.stream_writer(tee, closefd=False) as stream:  # type: ignore[arg-type]
                    _write_behind(stream.write, _blocks(lines))
                if holds(path, Written(tee.size, tee.sha256, kept)):
                    raise _Unchanged
        except _Unchanged:
            kept = True
    return Written(tee.size, tee.sha256, kept)


def _write_behind(write: Callable[[bytes], Any], blocks: Iterable[bytes]) -> None:
    """Compress each block in a second thread while the next one is being made; zstd does not hold the GIL."""
    with ThreadPoolExecutor(1, thread_name_prefix="compress") as thread:
        pending: Future[Any] | None = None
        for block in blocks:
            if pending:
                pending.result()
            pending = thread.submit(write, block)
        if pending:
            pending.result()


def _blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines joined to blocks that are worth a call of the compressor."""
    pending: list[bytes] = []
    size = 0
    for line in lines:
        pending.append(line)
        size += len(line)
        if size >= CHUNK_BYTES:
            yield b"".join(pending)
            pending, size = [], 0
    yield b"".join(pending)


def holds(path: Path, written: Written) -> bool:
    """Whether the file at `path` has those bytes already."""
    try:
        return path.stat().st_size == written.bytes and sha256_file(path) == written.sha256
    except OSError:
        return False


def make_durable(paths: Iterable[Path]) -> None:
    """Make files survive a power loss. Called for all at once, most of their data has long been written out."""
    for path in paths:
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())


def sweep(layout: Layout, names: Iterable[str]) -> int:
    """Remove shard files that are none of `names`, and what killed writers left; return how many."""
    keep = {layout.prompt_shard(name).name for name in names}
    removed = 0
    for path in layout.prompt_shard("0").parent.iterdir():
        is_old = path.name.endswith(".jsonl.zst") and path.name not in keep
        is_torn = path.name.startswith(".") and path.name.endswith(".tmp")
        if is_old or is_torn:
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def read_shard(layout: Layout, name: str, index_entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompts of a shard in input order, as `records.PromptRecord.value` describes them.

    Args:
        index_entry: the shard's entry in the prompt index.

    Raises:
        UserError: if the file is missing or is not the one that the index describes.
    """
    path = layout.prompt_shard(name)
    expected = index_entry["prompts"]
    try:
        # The hash comes first: what does not match it is not parsed as if it did.
        intact = sha256_file(path) == index_entry["sha256"]
        lines = list(iter_zstd_lines(path))
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror or error})", where=str(path), hint=REMAKE) from None
    except UserError as error:
        raise UserError(error.what, where=str(path), hint=REMAKE) from None
    if len(lines) != expected:
        raise UserError(f"holds {len(lines)} prompts, but the index says {expected}", where=str(path), hint=REMAKE)
    if not intact:
        raise UserError("is not the file that the index describes (SHA-256)", where=str(path), hint=REMAKE)
    return [orjson.loads(line) for line in lines]


def damaged_shards(layout: Layout, index: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Those of `names` whose shard file is missing, of the wrong size, or unknown to the index.

    For planning: it only looks at sizes. `read_shard` looks at the content.
    """
    sizes = {entry["name"]: entry["bytes"] for entry in index["shards"]}
    damaged = []
    for name in names:
        try:
            intact = layout.prompt_shard(name).stat().st_size == sizes.get(name)
        except OSError:
            intact = False
        if not intact:
            damaged.append(name)
    return damaged
