"""The ledger: how many requests each job of this machine has in flight at each server.

Several shard jobs share the servers of one machine with no process between them. Each job owns a row
of counters in a small memory-mapped file, and its ownership is a kernel lock on one byte: when a job
dies, however it dies, the lock is gone and the row counts no more. Changes are made under a second
kernel lock, so a server's free places are never handed out twice.

Layout of the file: header of 64 bytes, then `ROWS` rows of int32 `[used, waiting, in_flight[0..SERVERS-1]]`.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from .errors import UserError

ROWS = 256
SERVERS = 64
_MAGIC = b"SHARDMILL-LEDGER-1"
_HEADER_BYTES = 64
_ROW_INTS = 2 + SERVERS
_FILE_BYTES = _HEADER_BYTES + ROWS * _ROW_INTS * 4
# Locked bytes lie past the end of the file: POSIX allows it, and nothing is ever stored there.
_MUTEX_BYTE = 1 << 30
_ROW_BYTE = 1 << 20
_SWEEP_INTERVAL = 1.0


class Ledger:
    """A view of the ledger; `join` makes it a job's own row as well.

    POSIX locks belong to the process, so one process must open a ledger only once at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread_lock = threading.Lock()
        self._row: int | None = None
        self._held = [0] * SERVERS  # what this process has in flight; its row only publishes it
        self._next_sweep = 0.0
        hint = "make room there, remove the file, or set TMPDIR to a folder of your own"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UserError(f"cannot be opened ({error.strerror})", where=str(path), hint=hint) from error
        try:
            if os.fstat(self._fd).st_uid != os.getuid():
                raise UserError("belongs to another user", where=str(path), hint=hint)
            with self._mutex():
                self._prepare_file()
            self._map = mmap.mmap(self._fd, _FILE_BYTES)
        except OSError as error:
            os.close(self._fd)
            raise UserError(f"cannot be used ({error.strerror})", where=str(path), hint=hint) from error
        except BaseException:
            os.close(self._fd)
            raise
        self._view = memoryview(self._map)
        self._ints = self._view[_HEADER_BYTES:].cast("i")

    def _prepare_file(self) -> None:
        """Make a new, damaged or foreign file a ledger. Others may have it mapped, so it never becomes shorter."""
        whole = os.pread(self._fd, len(_MAGIC), 0) == _MAGIC
        offset = min(os.fstat(self._fd).st_size, _FILE_BYTES) if whole else 0
        content = _MAGIC.ljust(_FILE_BYTES, b"\0")
        while offset < _FILE_BYTES:
            # Written out, not left as a hole: a mapped hole on a full disk would kill the process (SIGBUS).
            offset += os.pwrite(self._fd, content[offset:], offset)

    def close(self) -> None:
        """Give up the row, if any, and every lock."""
        if self._row is not None:
            with self._mutex():
                self._clear(self._row)
            self._row = None
        self._ints.release()
        self._view.release()
        self._map.close()
        os.close(self._fd)

    def join(self) -> None:
        """Take a row of this process's own.

        Raises:
            UserError: if more jobs run at once than the ledger has rows.
        """
        with self._mutex():
            for row in range(ROWS):
                if self._try_lock(row):
                    self._clear(row)
                    self._row = row
                    self._publish()
                    return
        raise UserError(f"more than {ROWS} jobs at once on one machine", hint="run with fewer --cores")

    def set_waiting(self, count: int) -> None:
        """Say how many requests this job could send at once if there were room."""
        self._ints[self._own_row() * _ROW_INTS + 1] = count

    def claim(self, limits: Sequence[int], prefer: int | None = None) -> int | None:
        """Take a place at the server with the most room, and count it as in flight.

        Args:
            limits: for each server the most requests it should hold, over all jobs; 0: not usable.
            prefer: a server to take while it has room at all (its prefix cache knows the conversation).

        Returns:
            the server's position in `limits`, or None if there is no room, or if the room there is
            belongs to jobs that have less than their fair share.
        """
        own = self._own_row()
        if len(limits) > SERVERS:
            raise ValueError(f"{len(limits)} servers; a row has counters for {SERVERS}")
        with self._mutex():
            self._sweep()
            self._publish()
            held = [0] * len(limits)
            mine, hungry, poorest = 0, 0, None
            for row in range(ROWS):
                start = row * _ROW_INTS
                if not self._ints[start]:
                    continue
                counts = self._ints[start + 2 : start + 2 + len(limits)].tolist()
                held = [a + b for a, b in zip(held, counts, strict=True)]
                total = sum(counts)
                if row == own:
                    mine, hungry = total, hungry + 1
                elif self._ints[start + 1] > 0:
                    hungry += 1
                    poorest = total if poorest is None else min(poorest, total)
            room = [limit - used for limit, used in zip(limits, held, strict=True)]
            best = max(range(len(room)), key=room.__getitem__, default=None)
            if best is None or room[best] <= 0:
                return None
            fair_share = sum(limits) / hungry
            if poorest is not None and mine >= fair_share and poorest < fair_share - 1:
                return None
            if prefer is not None and room[prefer] > 0:
                best = prefer
            self._held[best] += 1
            self._publish()
            return best

    def release(self, server: int) -> None:
        """Give a place back that `claim` gave.

        Raises:
            ValueError: if this process holds none there.
        """
        with self._mutex():
            if not self._held[server]:
                raise ValueError(f"no place at server {server} to give back")
            self._held[server] -= 1
            self._publish()

    def in_flight(self, server: int) -> int:
        """Requests that the live jobs of this machine have in flight at a server."""
        with self._mutex():
            self._sweep()
            rows = (row * _ROW_INTS for row in range(ROWS))
            return sum(self._ints[start + 2 + server] for start in rows if self._ints[start])

    def _own_row(self) -> int:
        assert self._row is not None, "join() comes first"
        return self._row

    def _publish(self) -> None:
        """Write this process's row anew, so that damage to the file does not last."""
        start = self._own_row() * _ROW_INTS
        self._ints[start] = 1
        self._ints[start + 2 : start + _ROW_INTS] = array("i", self._held)

    def _clear(self, row: int) -> None:
        start = row * _ROW_INTS
        for position in range(start, start + _ROW_INTS):
            self._ints[position] = 0

    def _try_lock(self, row: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _ROW_BYTE + row)
            return True
        except OSError:
            return False

    def _sweep(self) -> None:
        """Forget the rows of dead jobs: theirs are the ones whose lock is free."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_INTERVAL
        for row in range(ROWS):
            if row != self._row and self._ints[row * _ROW_INTS] and self._try_lock(row):
                self._clear(row)
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _ROW_BYTE + row)

    @contextlib.contextmanager
    def _mutex(self) -> Iterator[None]:
        """Exclusive among threads (a Python lock) and among processes (a kernel lock)."""
        with self._thread_lock:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, _MUTEX_BYTE)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _MUTEX_BYTE)
