"""Processes: who one is, whether it still lives, who holds a port, and how to end a whole tree.

A pid alone names nobody: pids are used again, within hours on a busy machine and at once after a
reboot. An `Identity` therefore holds the start time and the boot as well.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Identity:
    """One process, unmistakably.

    Args:
        pid: its number.
        start_time: when it started: clock ticks since boot on Linux (immune to clock changes), elsewhere
            seconds since the epoch.
        boot_id: which boot of which machine.
        host: the machine's name.
    """

    pid: int
    start_time: float
    boot_id: str
    host: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Identity | None:
        """The identity in a JSON value, or None if it holds none."""
        try:
            return cls(int(value["pid"]), float(value["start_time"]), str(value["boot_id"]), str(value["host"]))
        except (TypeError, KeyError, ValueError):
            return None

    @property
    def is_local(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.host == host_name()


def host_name() -> str:
    return socket.gethostname()


@functools.cache
def boot_id() -> str:
    """What is new at every boot: the kernel's boot id, or the boot time where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"boot-{int(psutil.boot_time()) // 60}"


def _stat(pid: int) -> tuple[str, float] | None:
    """State letter and start time of a process, or None if there is no such process (proc(5))."""
    if sys.platform == "linux":
        try:
            # The name, in parentheses, may itself hold spaces and parentheses.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            return fields[0].decode(), float(fields[19])
        except (OSError, IndexError, ValueError):
            return None
    try:
        process = psutil.Process(pid)
        return ("Z" if process.status() == psutil.STATUS_ZOMBIE else "R"), process.create_time()
    except psutil.Error:
        return None


def identify(pid: int | None = None) -> Identity | None:
    """Identity of a live process of this machine (this one by default), or None if there is none."""
    pid = os.getpid() if pid is None else pid
    stat = _stat(pid)
    return None if stat is None else Identity(pid, stat[1], boot_id(), host_name())


def own_identity() -> Identity:
    identity = identify()
    if identity is None:
        raise RuntimeError("this process cannot find itself in the process table")
    return identity


def is_alive(identity: Identity | None) -> bool:
    """Whether that very process lives on this machine; a zombie is dead, and so is whoever got its pid since."""
    if identity is None or not identity.is_local or identity.boot_id != boot_id():
        return False
    stat = _stat(identity.pid)
    return stat is not None and stat[0] not in "ZXx" and stat[1] == identity.start_time


def program_name(process: psutil.Process) -> str:
    """What runs, without its arguments: those may hold secrets. Of Python, also which module or script."""
    try:
        command = process.cmdline() or [process.name()]
    except psutil.Error:
        return "unknown program"
    name = Path(command[0]).name
    if not name.startswith(("python", "pypy")):
        return name
    for position, argument in enumerate(command[1:], start=1):
        if argument == "-m" and position + 1 < len(command):
            return f"{name} -m {command[position + 1]}"
        if argument == "-c":
            break
        if not argument.startswith("-"):
            return f"{name} {Path(argument).name}"
    return name


def port_owners(port: int) -> list[int]:
    """Pids of the processes that listen on a TCP port, as far as this user may see them."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:  # macOS shows them to root only
        return []
    return sorted(
        {c.pid for c in connections if c.pid and c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port}
    )


def port_holder(port: int) -> str:
    """Who listens on a port, for people: `pid 1234 (python -m http.server)`."""
    for pid in port_owners(port):
        with contextlib.suppress(psutil.Error):
            return f"pid {pid} ({program_name(psutil.Process(pid))})"
    return "a process that this user cannot see"


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on that address now.

    Raises:
        OSError: if the address is none of this machine's.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: connections in TIME_WAIT are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def descendants(pid: int) -> list[psutil.Process]:
    """All live descendants of a process, children first."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def kill_all(processes: Iterable[psutil.Process], *, timeout: float) -> list[psutil.Process]:
    """Kill processes at once and wait up to `timeout` seconds; returns those that still live."""
    victims = list(processes)
    for process in victims:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return psutil.wait_procs(victims, timeout=timeout)[1]


def kill_descendants(*, timeout: float) -> bool:
    """Kill whatever descends from this process until nothing is left; False if some outlive `timeout` seconds.

    For a subreaper (`shardmill.reaper.become_subreaper`) this includes all that was ever orphaned below it.
    """
    deadline = time.monotonic() + timeout
    while found := descendants(os.getpid()):
        if time.monotonic() > deadline:
            return False
        kill_all(found, timeout=0.2)
    return True


def stop(identity: Identity, *, term_timeout: float, kill_timeout: float = 5) -> bool:
    """SIGTERM a process, SIGKILL it after `term_timeout` seconds; True once it is gone."""
    for act, timeout in ((psutil.Process.terminate, term_timeout), (psutil.Process.kill, kill_timeout)):
        if not is_alive(identity):
            return True
        with contextlib.suppress(psutil.Error):
            act(psutil.Process(identity.pid))
        wait_until(lambda: not is_alive(identity), timeout)
    return not is_alive(identity)


def marked(name: str, value: str) -> list[psutil.Process]:
    """This user's processes that have the environment variable `name` set to `value`, this process aside."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def wait_until(condition: Callable[[], Any], timeout: float, *, interval: float = 0.05) -> bool:
    """Poll `condition()` until it is true; False once `timeout` seconds have passed."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
