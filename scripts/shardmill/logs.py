"""The one way to log: a file that holds everything, and a console that holds what a person wants."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
from pathlib import Path

from .errors import UserError

FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CONSOLE_FORMAT = "[%(asctime)s] %(message)s"

# Faults of the disk and not of the program: no room, no quota, read-only, no permission, broken.
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)

get_logger = logging.getLogger


def configure(log_file: Path | str | None, *, console: bool = True) -> None:
    """Send log records to `log_file` (all of INFO and up) and to stderr (in short form).

    Uncaught exceptions go the same way: a UserError as one line, anything else as one line on the
    console with its traceback in the file.
    """
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    sys.excepthook = _log_uncaught
    # A log file on a full disk must not put a traceback on the console for each line that it cannot take.
    logging.raiseExceptions = False
    if log_file:
        with contextlib.suppress(OSError):  # whatever is wrong with the disk shows where it matters
            Path(log_file).parent.mkdir(parents=True, exist_ok=True)
            to_file = _FileHandler(log_file, encoding="utf-8")
            to_file.setFormatter(logging.Formatter(FILE_FORMAT))
            root.addHandler(to_file)
    if console:
        to_console = logging.StreamHandler(sys.stderr)
        to_console.setFormatter(_OneLineFormatter(CONSOLE_FORMAT, "%H:%M:%S"))
        root.addHandler(to_console)
    logging.getLogger("urllib3").setLevel(logging.ERROR)


class _FileHandler(logging.FileHandler):
    """A log whose disk may be full: then lines are lost, and nothing else, least of all the console's peace."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _OneLineFormatter(logging.Formatter):
    """Console lines carry no traceback: that is what the log file is for."""

    def format(self, record: logging.LogRecord) -> str:
        return f"[{self.formatTime(record, self.datefmt)}] {record.getMessage()}"


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: object) -> None:
    logger = logging.getLogger("shardmill")
    if issubclass(kind, UserError):
        logger.error("error: %s", error)
    elif issubclass(kind, KeyboardInterrupt):
        logger.error("interrupted: finished answers are kept; the same command goes on from here")
    elif isinstance(error, OSError) and error.errno in DISK_FAULTS:
        where = f" {error.filename}" if error.filename else ""
        logger.error(
            "error: cannot write%s: %s; see to the disk, then run the same command again", where, error.strerror
        )
    else:
        log_files = [h.baseFilename for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]
        where = f"; the traceback is in {log_files[0]}" if log_files else ""
        logger.error("error: unexpected %s: %s%s", kind.__name__, error, where, exc_info=(kind, error, trace))
