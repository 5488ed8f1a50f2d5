"""The journal: a shard's append-only log of finished requests, the truth that a restart resumes from.

One JSON line per entry, `{"crc":"<CRC-32 of the entry's bytes>","entry":{...}}`. The checksum tells a
damaged answer from a whole one even where the damage is still valid JSON.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from .errors import UserError
from .logs import get_logger

log = get_logger(__name__)

_HEAD = b'{"crc":"'
_MIDDLE = b'","entry":'
_CRC_DIGITS = 8
_PREFIX_BYTES = len(_HEAD) + _CRC_DIGITS + len(_MIDDLE)
FSYNC_INTERVAL = 0.5
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def encode_entry(entry: dict[str, Any]) -> bytes:
    """One journal line, its newline included."""
    payload = orjson.dumps(entry)
    return b"%b%08x%b%b}\n" % (_HEAD, zlib.crc32(payload), _MIDDLE, payload)


def decode_entry(line: bytes) -> dict[str, Any] | None:
    """The entry of a line (without its newline), or None if the line is damaged."""
    payload = line[_PREFIX_BYTES:-1]
    try:
        checksum = int(line[len(_HEAD) : len(_HEAD) + _CRC_DIGITS], 16)
        if not line.startswith(_HEAD) or not line.endswith(b"}") or zlib.crc32(payload) != checksum:
            return None
        entry = orjson.loads(payload)
    except ValueError:
        return None
    is_whole = isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("id", "fingerprint", "kind"))
    return entry if is_whole else None


@dataclass(frozen=True)
class EntryRef:
    """Where an entry lies in the journal, so that answers need not stay in memory."""

    offset: int
    length: int


class Journal:
    """One shard's journal, held by one process at a time.

    Opening it takes a kernel lock (waiting for a dying predecessor), cuts off a torn last line, and
    indexes the whole entries by (prompt id, request fingerprint). Entries of other fingerprints stay
    in the file, unused. Appends are written at once, and reach the disk within `FSYNC_INTERVAL` seconds.
    """

    def __init__(self, path: Path | str, *, lock_timeout: float = 60.0) -> None:
        self.path = Path(path)
        self.damaged_lines = 0
        self._index: dict[tuple[str, str], list[EntryRef]] = defaultdict(list)
        self._write_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._dirty = False
        self._failure: OSError | None = None  # of any kind: nothing more is appended
        self._sync_failure: OSError | None = None
        self._closed = threading.Event()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._explain(error) from error
        try:
            self._take_lock(lock_timeout)
            self._size = self._load()
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError):
                raise self._explain(error) from error
            raise
        self._syncer = threading.Thread(target=self._sync_loop, name="journal-fsync", daemon=True)
        self._syncer.start()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A disk that fails at the close as well must not hide the error that led here.
        with contextlib.suppress(*([UserError] if kind else [])):
            self.close()

    def __len__(self) -> int:
        return sum(len(refs) for refs in self._index.values())

    def entries(self, prompt_id: str, fingerprint: str) -> list[dict[str, Any]]:
        """All entries of one request, oldest first."""
        return [self.read(ref) for ref in self._index.get((prompt_id, fingerprint), ())]

    def refs(self, prompt_id: str, fingerprint: str) -> list[EntryRef]:
        """Where the entries of one request lie, oldest first."""
        return list(self._index.get((prompt_id, fingerprint), ()))

    def read(self, ref: EntryRef) -> dict[str, Any]:
        """The entry at `ref`.

        Raises:
            UserError: if the file was changed under the journal's feet.
        """
        entry = decode_entry(os.pread(self._fd, ref.length, ref.offset))
        if entry is None:
            raise UserError("changed while it was in use", where=str(self.path), hint="run the same command again")
        return entry

    def append(self, entry: dict[str, Any]) -> EntryRef:
        """Write one entry; whole or not at all.

        Raises:
            UserError: if the disk is full or failing. What was written before stays good.
        """
        line = encode_entry(entry)
        with self._write_lock:
            if self._failure:
                raise self._explain(self._failure)
            ref = EntryRef(self._size, len(line) - 1)
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._fd, line[written:])
            except OSError as error:
                self._failure = error
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._size)
                raise self._explain(error) from error
            self._size += len(line)
            self._dirty = True
            self._index[(entry["id"], entry["fingerprint"])].append(ref)
        return ref

    def sync(self) -> None:
        """Bring everything appended so far to the disk.

        Raises:
            UserError: if the disk failed, now or in the background before: what fsync once refused may be lost.
        """
        with self._sync_lock:
            with self._write_lock:
                dirty, self._dirty = self._dirty, False
            if dirty:
                try:
                    os.fsync(self._fd)
                except OSError as error:
                    self._failure = self._sync_failure = error
            if self._sync_failure:
                raise self._explain(self._sync_failure) from self._sync_failure

    def close(self) -> None:
        """Sync and give up the lock."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._syncer.join()
        try:
            self.sync()
        finally:
            # An append after the close must fail, not reach whatever file is given this number next.
            descriptor, self._fd = self._fd, -1
            os.close(descriptor)

    def _take_lock(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        "in use by another process",
                        where=str(self.path),
                        hint="wait for the other run to end, or end it",
                    ) from None
                time.sleep(0.1)

    def _load(self) -> int:
        """Index the whole lines, cut off a torn tail, and return the size of what is left."""
        offset = 0
        with open(self.path, "rb") as handle:
            for raw in handle:
                if not raw.endswith(b"\n"):
                    log.warning("%s: cut off a torn last line of %d bytes", self.path, len(raw))
                    os.ftruncate(self._fd, offset)
                    break
                line = raw[:-1]
                entry = decode_entry(line)
                if entry is None:
                    self.damaged_lines += 1
                else:
                    self._index[(entry["id"], entry["fingerprint"])].append(EntryRef(offset, len(line)))
                offset += len(raw)
        if self.damaged_lines:
            log.warning(
                "%s: %d damaged lines are left out; their prompts are asked again", self.path, self.damaged_lines
            )
        return offset

    def _sync_loop(self) -> None:
        while not self._closed.wait(FSYNC_INTERVAL):
            with contextlib.suppress(UserError):  # the next append raises it
                self.sync()

    def _explain(self, error: OSError) -> UserError:
        hint = "make room" if error.errno in NO_ROOM else "see to the disk"
        return UserError(
            f"cannot be written ({os.strerror(error.errno or 0)})",
            where=str(self.path),
            hint=f"{hint}, then run the same command again; all finished answers before this one are kept",
        )


def iter_entries(path: Path | str) -> Iterator[dict[str, Any]]:
    """The whole entries of a journal that nobody is writing, damaged and torn lines left out."""
    with open(path, "rb") as handle:
        for raw in handle:
            if raw.endswith(b"\n") and (entry := decode_entry(raw[:-1])) is not None:
                yield entry
