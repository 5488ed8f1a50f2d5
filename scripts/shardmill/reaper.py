"""Run a command so that nothing it ever forks outlives whoever asked for it.

    python -S -E reaper.py [--stop-timeout SECONDS] [--parent PID] -- COMMAND...

On Linux the reaper is a subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): descendants that fork twice,
change their session or lose their parent become its children, not init's, and so can be found and
ended. It gets SIGTERM when its own parent dies (PR_SET_PDEATHSIG), however that dies; the command
gets SIGKILL when the reaper dies. Elsewhere the command's process group is what it ends.

SIGTERM, SIGINT or SIGHUP, or the end of the command, end the whole tree: SIGTERM to all of it, SIGKILL
after the deadline to what remains, again and again until nothing is left. Its own exit code is the
command's, 128 + N if signal N ended that, 127 if it cannot be run.

It imports the standard library only, so that it starts in milliseconds and runs under any Python 3.11.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _prctl(option: int, argument: int) -> bool:
    """prctl(2); False where there is none."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(argument), 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def become_subreaper() -> bool:
    """Make orphaned descendants children of this process; False where the system cannot."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent (the thread that forked it) ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal_number)


def _parents() -> dict[int, int]:
    """Parent of every process, by pid; zombies left out."""
    if not sys.platform.startswith("linux"):
        listing = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=False)
        rows = [line.split() for line in listing.stdout.splitlines()]
        return {int(row[0]): int(row[1]) for row in rows if not row[2].startswith("Z")}
    found: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/stat", "rb") as handle:
                state, parent, *_ = handle.read().rpartition(b")")[2].split()
                if state not in (b"Z", b"X"):
                    found[int(entry.name)] = int(parent)
    return found


def descendants(root: int) -> list[int]:
    """Live descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


class Reaper:
    """One command and everything that descends from it."""

    def __init__(self, command: list[str], stop_timeout: float) -> None:
        self._command = command
        self._stop_timeout = stop_timeout
        self._stop_asked = False
        self._main = 0
        self._code: int | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def run(self) -> int:
        """Run the command to its end, or until told to stop; returns the exit code."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in _STOPPING:
            signal.signal(number, self._ask_stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._main = self._fork()
        while not self._stop_asked and self._code is None:
            self._reap()
            if self._code is None and not self._stop_asked:
                self._sleep(1.0)
        self._end_tree()
        return 128 if self._code is None else self._code

    def _ask_stop(self, number: int, frame: object) -> None:
        self._stop_asked = True

    def _fork(self) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            for number in (*_STOPPING, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            die_with_parent(parent, signal.SIGKILL)
            os.close(self._wake_read)
            os.close(self._wake_write)
            os.execvp(self._command[0], self._command)
        except OSError as error:
            os.write(2, f"cannot run {self._command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)

    def _reap(self) -> None:
        """Collect every child that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._main:
                code = os.waitstatus_to_exitcode(status)
                self._code = 128 - code if code < 0 else code

    def _sleep(self, seconds: float) -> None:
        """Sleep until a signal comes."""
        if select.select([self._wake_read], [], [], seconds)[0]:
            os.read(self._wake_read, 4096)

    def _end_tree(self) -> None:
        deadline = time.monotonic() + self._stop_timeout
        asked: set[int] = set()
        while left := self._left():
            if time.monotonic() >= deadline:
                self._signal(left, signal.SIGKILL)
            else:
                self._signal([pid for pid in left if pid not in asked], signal.SIGTERM)
                asked.update(left)
            self._sleep(0.05)
        self._reap()

    def _left(self) -> list[int]:
        self._reap()
        found = descendants(os.getpid())
        if not sys.platform.startswith("linux") and self._group_lives():
            found.append(-self._main)
        return found

    def _group_lives(self) -> bool:
        try:
            os.killpg(self._main, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _signal(self, pids: list[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # a stopped process takes no SIGTERM


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command; end all that descends from it with it.")
    parser.add_argument("--stop-timeout", type=float, default=10.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--parent", type=int, default=0, help="pid whose end ends the command; default: the parent's")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    become_subreaper()
    reaper = Reaper(options.command, options.stop_timeout)
    if options.parent and os.getppid() != options.parent:
        return 128 + signal.SIGTERM  # whoever asked is gone already
    die_with_parent(os.getppid(), signal.SIGTERM)
    return reaper.run()


if __name__ == "__main__":
    sys.exit(main())
