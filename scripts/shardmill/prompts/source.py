"""The raw input: any of its file formats as batches of lines, in bounded memory."""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..files import CHUNK_BYTES, iter_zstd_chunks
from . import parquet

WHERE = "prompts.path"
LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
KNOWN = ".jsonl, .jsonl.gz, .jsonl.zst (also .ndjson and .json, of one record per line) or .parquet"

# A "line" beyond this is some other kind of file; without a limit it would be read into memory whole.
MAX_LINE_BYTES = 256 << 20

BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r"
# Lines that start with a byte below this may be blank: they need a look. No JSON value starts so.
FIRST_PRINTABLE = b"!"

MAGIC = {
    "gzip": b"\x1f\x8b",
    "zstd": b"\x28\xb5\x2f\xfd",
    "Parquet": b"PAR1",
    "UTF-16": b"\xff\xfe",
    "UTF-16 (big endian)": b"\xfe\xff",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ\x00",
    "zip": b"PK\x03\x04",
}
# Skippable zstd frames, which some writers put first: any of 16 magic numbers.
ZSTD_SKIPPABLE = b"\x2a\x4d\x18"


@dataclass(frozen=True)
class Source:
    """A prompts file as it was found.

    Args:
        path: as the user wrote it.
        kind: `plain`, `gzip`, `zstd` or `parquet`.
        size_bytes, mtime_ns, inode: to see later whether it is still the same file.
    """

    path: str
    kind: str
    size_bytes: int
    mtime_ns: int
    inode: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Batch:
    r"""Consecutive records of the input, at least one.

    Args:
        text: the records' raw lines, each followed by b"\n"; no blank lines, no CR at line ends, no BOM.
        lines: the same lines without their b"\n".
        numbers: for each line its number in the file, from 1, blank lines counted; for Parquet the row number.
    """

    text: bytes
    lines: list[bytes]
    numbers: Sequence[int]


def open_source(path: str) -> Source:
    """Look at a prompts file: that it is there, is a file, can be read, and is what its suffix says.

    Raises:
        UserError: otherwise.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}", where=WHERE, hint="write the path of your prompts file") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if stat.S_ISDIR(status.st_mode):
        raise UserError(f"{path} is a folder", where=WHERE, hint="name one file in it")
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is no regular file", where=WHERE, hint="write the prompts to a file first")
    kind = kind_of_name(path)
    if not status.st_size:
        raise UserError(f"{path} is empty", where=WHERE, hint="it needs at least one record")
    source = Source(path, kind, status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))
    _check_magic(source)
    return source


def kind_of_name(path: str) -> str:
    """`plain`, `gzip`, `zstd` or `parquet`, by the suffixes of `path`.

    Raises:
        UserError: if they name no format that can be read.
    """
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    last = suffixes[-1] if suffixes else ""
    if last == ".parquet":
        return "parquet"
    if last in LINE_SUFFIXES:
        return "plain"
    inner = suffixes[-2] if len(suffixes) > 1 else ""
    if last in (".gz", ".zst") and (not inner or inner in LINE_SUFFIXES):
        return "gzip" if last == ".gz" else "zstd"
    raise UserError(f"{path}: the name says no known format", where=WHERE, hint=f"its suffix must be {KNOWN}")


def check_unchanged(source: Source) -> None:
    """Make sure that the file is still the one that `open_source` saw.

    Raises:
        UserError: if it is not, because then what was read may be half of one and half of another.
    """
    try:
        status = os.stat(source.path)
    except OSError as error:
        raise _unreadable(source.path, error) from None
    now = (status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))
    if now != (source.size_bytes, source.mtime_ns, source.inode):
        raise UserError(
            f"{source.path} changed while it was read", where=WHERE, hint="run again when nothing writes to it"
        )


def iter_batches(source: Source) -> Iterator[Batch]:
    """All records of the input in order, as batches of about `CHUNK_BYTES`, or of one longer record.

    Raises:
        UserError: if the file cannot be read, is damaged, or is not what its suffix says.
    """
    hint = "is the file complete? copy or download it again"
    try:
        if source.kind == "parquet":
            yield from _row_batches(source.path)
        else:
            yield from _line_batches(_blocks(_chunks(source), source.path), source.path)
    except UserError as error:
        # files.py's own hint is to remove a damaged file, which is no advice for somebody's input.
        if error.where == WHERE:
            raise
        raise UserError(f"{source.path}: {error.what}", where=WHERE, hint=hint) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{source.path}: damaged gzip file ({error})", where=WHERE, hint=hint) from None
    except OSError as error:
        raise _unreadable(source.path, error) from None


def _unreadable(path: str, error: OSError | ValueError) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UserError(f"cannot read {path!r} ({reason})", where=WHERE, hint="check the path and its permissions")


def _check_magic(source: Source) -> None:
    try:
        with open(source.path, "rb") as handle:
            head = handle.read(16)
    except OSError as error:
        raise _unreadable(source.path, error) from None
    expected = {"gzip": "gzip", "zstd": "zstd", "parquet": "Parquet"}.get(source.kind)
    if expected is None or head.startswith(MAGIC[expected]):
        return
    if expected == "zstd" and head[1:4] == ZSTD_SKIPPABLE:
        return
    raise UserError(
        f"{source.path} is no {expected} file, though its name says so",
        where=WHERE,
        hint=f"rename it to what it is: {KNOWN}",
    )


def _chunks(source: Source) -> Iterator[bytes]:
    if source.kind == "zstd":
        for chunk in iter_zstd_chunks(source.path):
            # Text that compresses very well comes in huge chunks; its lines must not all become objects at once.
            for start in range(0, len(chunk), CHUNK_BYTES):
                yield chunk[start : start + CHUNK_BYTES]
        return
    with gzip.open(source.path, "rb") if source.kind == "gzip" else open(source.path, "rb", buffering=0) as handle:
        while chunk := handle.read(CHUNK_BYTES):
            yield chunk


def _blocks(chunks: Iterable[bytes], path: str) -> Iterator[bytes]:
    """Chunks cut anew so that each ends at the end of a line; a long line costs linear, not quadratic, time."""
    pending: list[bytes] = []
    size = 0
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if cut:
            pending.append(chunk[:cut])
            yield b"".join(pending)
            pending, size = [chunk[cut:]], len(chunk) - cut
        else:
            pending.append(chunk)
            size += len(chunk)
            if size > MAX_LINE_BYTES:
                raise UserError(
                    f"{path} holds a line of more than {MAX_LINE_BYTES >> 20} MiB",
                    where=WHERE,
                    hint="is it JSON lines, with one record per line?",
                )
    if size:
        yield b"".join(pending) + b"\n"


def _line_batches(blocks: Iterable[bytes], path: str) -> Iterator[Batch]:
    number = 1
    for position, block in enumerate(blocks):
        text = block
        if not position:
            _check_content(text, path)
            text = text.removeprefix(BOM)
        # CRLF only ever ends a line: inside a JSON string both characters must be escaped.
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        lines = text.split(b"\n")
        lines.pop()
        numbers: Sequence[int] = range(number, number + len(lines))
        number += len(lines)
        # The least line in byte order tells at C speed whether any line can be blank.
        if min(lines) < FIRST_PRINTABLE:
            kept = [(line, at) for line, at in zip(lines, numbers, strict=True) if line.strip(BLANKS)]
            if not kept:
                continue
            lines, numbers = [line for line, _ in kept], [at for _, at in kept]
            text = b"\n".join(lines) + b"\n"
        yield Batch(text, lines, numbers)


def _check_content(block: bytes, path: str) -> None:
    """Refuse a file whose first bytes show that it holds no JSON lines at all."""
    for name, magic in MAGIC.items():
        if block.startswith(magic):
            raise UserError(
                f"{path} holds {name}, not JSON lines", where=WHERE, hint=f"convert or rename it; known: {KNOWN}"
            )
    head = block[:4096].removeprefix(BOM).lstrip()
    if head[:1] == b"[" and head[1:].lstrip()[:1] == b"{":
        raise UserError(
            f"{path} holds one JSON array, not JSON lines",
            where=WHERE,
            hint=f"convert it: jq -c '.[]' {path} > prompts.jsonl",
        )


def _row_batches(path: str) -> Iterator[Batch]:
    number = 1
    for lines in parquet.iter_rows(path):
        yield Batch(b"\n".join(lines) + b"\n", lines, range(number, number + len(lines)))
        number += len(lines)
