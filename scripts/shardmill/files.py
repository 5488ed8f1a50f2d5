"""Files: the one atomic write, JSON, zstd and hashes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import orjson
import zstandard

from .errors import UserError

CHUNK_BYTES = 1 << 20
# Of a compressed file, read at once: kept small, because text that repeats itself becomes a thousand times as much.
ZSTD_CHUNK_BYTES = 1 << 14
SEAL = "seal"


@functools.cache
def _umask() -> int:
    """The process's umask, without setting it: that would show in other threads for a moment."""
    with contextlib.suppress(OSError, StopIteration, ValueError), open("/proc/self/status", encoding="ascii") as status:
        return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def atomic_writer(path: Path | str, *, fsync: bool = True, mode: int | None = None) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces `path` only when the block ends without an error.

    The temporary name is unique per process and lies beside the target, so that the rename cannot
    cross file systems; what was at `path` stays untouched until then.

    Raises:
        OSError: if the file cannot be written; it names the file.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(descriptor)
    try:
        with open(name, "wb") as handle:
            yield handle
            handle.flush()
            if fsync:
                os.fsync(handle.fileno())
        os.chmod(name, 0o666 & ~_umask() if mode is None else mode)
        os.replace(name, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(target)  # a full disk does not say which
        raise
    if fsync:
        fsync_folder(target.parent)


def write_bytes(path: Path | str, data: bytes, *, fsync: bool = True, mode: int | None = None) -> None:
    """Write `data` to `path` atomically."""
    with atomic_writer(path, fsync=fsync, mode=mode) as handle:
        handle.write(data)


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power loss; file systems that cannot are left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(
    path: Path | str,
    value: Any,
    *,
    fsync: bool = True,
    indent: bool = True,
    sealed: bool = False,
    mode: int | None = None,
) -> None:
    """Write `value` as JSON to `path` atomically.

    Args:
        sealed: add a checksum to the mapping, so that whoever reads it here sees damage that is still valid JSON.
    """
    if sealed:
        value = {**value, SEAL: _seal(value)}
    options = orjson.OPT_APPEND_NEWLINE | (orjson.OPT_INDENT_2 if indent else 0)
    write_bytes(path, orjson.dumps(value, option=options), fsync=fsync, mode=mode)


def read_json(path: Path | str) -> Any:
    """Read a JSON file that Shardmill wrote.

    Raises:
        UserError: if the file holds no JSON, or its seal is broken.
        OSError: if it cannot be read.
    """
    try:
        return _unsealed(orjson.loads(Path(path).read_bytes()))
    except orjson.JSONDecodeError as error:
        raise UserError(f"not valid JSON ({error})", where=str(path), hint="remove it and run again") from None
    except _BrokenSeal:
        raise UserError("damaged (its checksum differs)", where=str(path), hint="remove it and run again") from None


def read_json_or_none(path: Path | str) -> Any | None:
    """Read a JSON file that may be missing, damaged, or half written by something that died: then None."""
    try:
        return _unsealed(orjson.loads(Path(path).read_bytes()))
    except (OSError, orjson.JSONDecodeError, _BrokenSeal):
        return None


class _BrokenSeal(Exception):
    """The content is not what was sealed."""


def _seal(value: dict[str, Any]) -> str:
    return sha256_hex(canonical_json(value))[:16]


def _unsealed(value: Any) -> Any:
    """A value as it was before it was sealed; one without a seal is taken as it is."""
    if not isinstance(value, dict) or SEAL not in value:
        return value
    seal = value.pop(SEAL)
    if seal != _seal(value):
        raise _BrokenSeal
    return value


def canonical_json(value: Any) -> bytes:
    """The same bytes for equal values, whatever the order of their keys; what fingerprints hash."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def sha256_hex(data: bytes) -> str:
    """SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path | str) -> str:
    """SHA-256 of a file's content as 64 hex digits, read in chunks."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextlib.contextmanager
def zstd_writer(path: Path | str, *, level: int = 3, threads: int = 0) -> Iterator[IO[bytes]]:
    """An atomic writer whose content is one zstd frame with a checksum. `threads=-1` uses all cores."""
    compressor = zstandard.ZstdCompressor(level=level, threads=threads, write_checksum=True)
    with atomic_writer(path) as handle, compressor.stream_writer(handle, closefd=False) as stream:
        yield stream


def iter_zstd_chunks(path: Path | str) -> Iterator[bytes]:
    """Decompressed content of a zstd file of one or more frames, in the chunks that `ZSTD_CHUNK_BYTES` of it make.

    Raises:
        UserError: if the file is truncated, damaged or no zstd file. (python-zstandard's own stream
            reader takes a truncated frame for a short one, so the end of each frame is checked here.)
    """
    hint = "remove it and run again to have it made anew"
    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    started = False
    try:
        with open(path, "rb") as handle:
            while data := handle.read(ZSTD_CHUNK_BYTES):
                while data:
                    if frame.eof:
                        frame = decompressor.decompressobj()
                    started = True
                    if out := frame.decompress(data):
                        yield out
                    data = frame.unused_data if frame.eof else b""
    except zstandard.ZstdError as error:
        raise UserError(f"damaged zstd file ({error})", where=str(path), hint=hint) from None
    if not started or not frame.eof:
        raise UserError("truncated zstd file", where=str(path), hint=hint)


def iter_zstd_lines(path: Path | str) -> Iterator[bytes]:
    r"""Lines of a zstd file of JSON lines, without their b"\n"; never split at anything but b"\n"."""
    return iter_lines(iter_zstd_chunks(path))


def iter_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Lines of a stream of chunks without their b"\n", in bounded memory however it is chunked."""
    pending: list[bytes] = []
    for chunk in chunks:
        *complete, rest = chunk.split(b"\n")
        if complete:
            pending.append(complete[0])
            yield b"".join(pending)
            yield from complete[1:]
            pending = [rest]
        else:
            pending.append(rest)
    if last := b"".join(pending):
        yield last
