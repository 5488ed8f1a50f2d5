"""Kernel locks (flock) on files: freed by the kernel however their holder ends, kill -9 included."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from ..logs import get_logger

logger = get_logger(__name__)

_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class FileLock:
    """A held lock. Close it, or leave its `with` block, to let go.

    A child process that inherits the descriptor (`pass_fds=[lock.fileno()]`) holds the lock too, for
    as long as it lives.

    Args:
        path: file to lock; made if missing, never removed (removing a lock file is a race).
        shared: several may hold it, but not beside one that is not shared.
        wait: wait for it; otherwise BlockingIOError if it is taken.
        waiting: logged once if it has to be waited for.

    Raises:
        BlockingIOError: taken, and `wait` is false.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, shared: bool = False, wait: bool = True, waiting: str = "") -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._acquire(fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait, waiting)
        except BaseException:
            self.close()
            raise

    def _acquire(self, mode: int, wait: bool, waiting: str) -> None:
        try:
            fcntl.flock(self.fileno(), mode | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            if waiting:
                logger.info(waiting)
            fcntl.flock(self.fileno(), mode)
        except OSError as error:
            # Some network file systems have no locks. Every file is made by rename and verified by
            # hash, so two runs at once cost double work there, and nothing worse.
            if error.errno not in _UNSUPPORTED:
                raise
            logger.warning("this file system has no locks, so a second run at the same time is not noticed")

    def fileno(self) -> int:
        """The descriptor, for a child to inherit."""
        if self._descriptor is None:
            raise ValueError("the lock is closed")
        return self._descriptor

    def close(self) -> None:
        """Let go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
