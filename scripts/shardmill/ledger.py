"""The ledger: how many requests each job of this machine has in flight at each server.

Several shard jobs share the servers of one machine with no process between them. Each job owns a row
of counters in a small memory-mapped file, and its ownership is a kernel lock on one byte: when a job
dies, however it dies, the lock is gone and the row counts no more. Changes are made under a second
kernel lock, so a server's free places are never handed out twice.

Who gets a free place: the job that has the smallest part of its shard still to send. Equal shares would bring all
shards of a wave to their last long answers at the same time, with nothing left to fill the servers; this way shards
end one after another, and there is always one with prompts to send. Jobs that are equally far share equally, and
every job is sure of a part of its equal share, so none starves.

Layout of the file: header of 64 bytes, then `ROWS` rows of int32
`[used, waiting, part left (thousandths), last seen (monotonic seconds), in_flight[0..SERVERS-1]]`.
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
# Of its equal share, a job is sure of one part in so many, however far the others are.
SURE_PART = 4
# A job that has not asked for so many seconds (it is stopped, or swaps) keeps no place from others.
PATIENCE = 5
# After so many, its requests count no more: they were answered long ago and nobody took the answers in. A server
# that should hold them after all only queues a little more.
STOPPED = 30
_MAGIC = b"SHARDMILL-LEDGER-2"
_HEADER_BYTES = 64
_WAITING, _LEFT, _SEEN, _COUNTS = 1, 2, 3, 4  # positions in a row
_ROW_INTS = _COUNTS + SERVERS
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
        self._most_waiting = 1
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

    def join(self, total: int = 0) -> None:
        """Take a row of this process's own.

        Args:
            total: requests of the whole job, those already answered included; what its progress is measured by.

        Raises:
            UserError: if more jobs run at once than the ledger has rows.
        """
        self._most_waiting = max(1, total)
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
        start = self._own_row() * _ROW_INTS
        self._most_waiting = max(self._most_waiting, count)
        self._ints[start + _WAITING] = count
        self._ints[start + _LEFT] = 1000 * count // self._most_waiting
        self._ints[start + _SEEN] = _now()

    def claim(self, limits: Sequence[int], prefer: int | None = None) -> int | None:
        """Take a place at the server with the most room, and count it as in flight.

        Args:
            limits: for each server the most requests it should hold, over all jobs; 0: not usable.
            prefer: a server to take while it has room at all (its prefix cache knows the conversation).

        Returns:
            the server's position in `limits`, or None if there is no room, or if the room there is
            belongs to other jobs.
        """
        if len(limits) > SERVERS:
            raise ValueError(f"{len(limits)} servers; a row has counters for {SERVERS}")
        with self._mutex():
            self._sweep()
            self._publish()
            held, mine, rivals = self._look_around(len(limits))
            room = [limit - used for limit, used in zip(limits, held, strict=True)]
            best = max(range(len(room)), key=room.__getitem__, default=None)
            if best is None or room[best] <= 0:
                return None
            left = self._ints[self._own_row() * _ROW_INTS + _LEFT]
            if not is_due(mine, left, rivals, sum(limits) / (len(rivals) + 1)):
                return None
            if prefer is not None and room[prefer] > 0:
                best = prefer
            self._held[best] += 1
            self._publish()
            return best

    def _look_around(self, servers: int) -> tuple[list[int], int, list[tuple[int, int]]]:
        """Places held at each server; places of this job; and (places, part left) of each other job that wants more."""
        own, now = self._own_row(), _now()
        held, mine, rivals = [0] * servers, 0, []
        for row in range(ROWS):
            start = row * _ROW_INTS
            if not self._ints[start]:
                continue
            silent = abs(now - self._ints[start + _SEEN])
            if row != own and silent > STOPPED:
                continue
            counts = self._ints[start + _COUNTS : start + _COUNTS + servers].tolist()
            held = [a + b for a, b in zip(held, counts, strict=True)]
            if row == own:
                mine = sum(counts)
            elif self._ints[start + _WAITING] > 0 and silent <= PATIENCE:
                rivals.append((sum(counts), self._ints[start + _LEFT]))
        return held, mine, rivals

    def nobody_waits(self) -> bool:
        """Whether no job of this machine has a request to send that has no place yet."""
        with self._mutex():
            self._sweep()
            return not self._look_around(SERVERS)[2] and not self._ints[self._own_row() * _ROW_INTS + _WAITING]

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
            return sum(self._ints[start + _COUNTS + server] for start in rows if self._ints[start])

    def _own_row(self) -> int:
        assert self._row is not None, "join() comes first"
        return self._row

    def _publish(self) -> None:
        """Write this process's row anew, so that damage to the file does not last."""
        start = self._own_row() * _ROW_INTS
        self._ints[start] = 1
        self._ints[start + _SEEN] = _now()
        self._ints[start + _COUNTS : start + _ROW_INTS] = array("i", self._held)

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


def _now() -> int:
    """Seconds of the machine's monotonic clock, the same in all processes."""
    return int(time.monotonic()) & 0x7FFFFFFF


def is_due(mine: int, left: int, rivals: Sequence[tuple[int, int]], equal_share: float) -> bool:
    """Whether the next free place is for the job that asks.

    Args:
        mine, left: its places, and the part of its requests that it has still to send.
        rivals: the same of each other job that wants more.
        equal_share: places that each would have if all had as many.
    """
    if not rivals:
        return True
    sure = equal_share / SURE_PART
    if mine + 1 <= sure:
        return True
    if mine >= equal_share and any(places + 1 <= sure for places, _ in rivals):
        return False
    if any(theirs < left for _, theirs in rivals):
        return False
    level = [places for places, theirs in rivals if theirs == left]
    return not (level and mine >= equal_share and min(level) < equal_share - 1)
