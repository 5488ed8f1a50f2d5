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
        path: file to lock; made if missing.
        shared: several may hold it, but not beside one that is not shared.
        wait: wait for it; otherwise BlockingIOError if it is taken.
        waiting: logged once if it has to be waited for.

    Raises:
        BlockingIOError: taken, and `wait` is false.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, shared: bool = False, wait: bool = True, waiting: str = "") -> None:
        self.path = path
        self._descriptor: int | None = None
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                self._acquire(fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait, waiting)
                if self._is_current():
                    return
            except BaseException:
                self.close()
                raise
            self.close()

    def _is_current(self) -> bool:
        """Whether the locked file is still the one at the path; while we waited it may have been removed."""
        try:
            return os.path.samestat(os.fstat(self.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Remove the lock's file, and let go. Only for a holder that shares it with nobody."""
        self.path.unlink(missing_ok=True)
        self.close()

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
