"""Who owns a run: a lock that dies with its holder, and a record that says who that is.

The kernel's lock (flock) is what tells a live owner from a dead one on local disks. Network file
systems may keep flock to one machine or grant it to everyone, so the record counts as well: on the
same host by the identity of the process, from another host by a heartbeat, the file's mtime.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from .errors import UserError
from .files import read_json_or_none
from .layout import Layout
from .process import Identity, is_alive, own_identity

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0  # without a heartbeat, an owner on another host counts as dead
_SETTLE_SECONDS = 2.0  # for a lock whose holder has not written its record yet, or is about to let go


@dataclass(frozen=True)
class Owner:
    """The process that owns, or owned, a run.

    Args:
        identity: the process.
        run: name of the run.
        started_at: when it took the run, seconds since the epoch.
        leaves_to_pools: whether it makes no shard itself, but has pools make them.
    """

    identity: Identity
    run: str
    started_at: float
    leaves_to_pools: bool = False

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started_at).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
        return f"pid {self.identity.pid} on host {self.identity.host} since {since}"


class RunLock:
    """The ownership of a run, held until `release` or the end of this process, however it ends."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._released = threading.Event()
        # A forked child shares the lock; without this it would hold it beyond its parent's death.
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._beat, name="run-lock-heartbeat", daemon=True).start()

    @classmethod
    def acquire(cls, layout: Layout, *, leaves_to_pools: bool = False) -> RunLock:
        """Take the ownership of a run, or of a pool, for this process; a dead owner's is simply taken over.

        Raises:
            UserError: if another process that lives owns the run; names it.
        """
        path = layout.lock
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock_or_refuse(descriptor, layout)
            record = {"identity": own_identity().to_json(), "run": layout.run, "started_at": time.time()}
            record["leaves_to_pools"] = leaves_to_pools
            content = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))
            os.utime(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def release(self) -> None:
        """Give the run up; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        self._released.set()
        if descriptor is not None:
            with contextlib.suppress(OSError):
                # The file stays: removing it would let two newcomers lock two files of one name.
                os.ftruncate(descriptor, 0)
            os.close(descriptor)

    def _forget(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            descriptor = self._descriptor
            if descriptor is None:
                return
            with contextlib.suppress(OSError):
                os.utime(descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _lock_or_refuse(descriptor: int, layout: Layout) -> None:
    deadline = time.monotonic() + _SETTLE_SECONDS
    while not (locked := _try_lock(descriptor)) and not owner_is_alive(layout) and time.monotonic() < deadline:
        time.sleep(0.05)
    owner = read_owner(layout)
    if not locked:
        holder = str(owner) if owner and owner_is_alive(layout) else f"a process that holds {layout.lock} open"
        raise _another(layout, holder, "wait for it, stop it, or use another run.name")
    if owner and owner.identity != own_identity() and owner_is_alive(layout):
        hint = "wait for it, stop it, or use another run.name"
        if not owner.identity.is_local:
            hint += f" (if that host is gone: its lock counts as dead {STALE_SECONDS:.0f} s after its last heartbeat)"
        raise _another(layout, str(owner), hint)


def _another(layout: Layout, holder: str, hint: str) -> UserError:
    return UserError(f"another Shardmill run is live on {layout.home}: {holder}", hint=hint)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        # A file system without locks: the record alone decides.
    return True


def read_owner(layout: Layout) -> Owner | None:
    """The recorded owner, alive or dead; None if the run was released, or never owned."""
    record: Any = read_json_or_none(layout.lock)
    if not isinstance(record, dict) or (identity := Identity.from_json(record.get("identity"))) is None:
        return None
    started_at = record.get("started_at")
    return Owner(
        identity,
        str(record.get("run", "")),
        float(started_at) if isinstance(started_at, int | float) else 0.0,
        record.get("leaves_to_pools") is True,
    )


def owner_is_alive(layout: Layout) -> bool:
    """Whether the run has a live owner. Cheap: one small file, one look at the process table."""
    owner = read_owner(layout)
    if owner is None:
        return False
    if owner.identity.is_local:
        return is_alive(owner.identity)
    try:
        return time.time() - layout.lock.stat().st_mtime < STALE_SECONDS
    except OSError:
        return False
