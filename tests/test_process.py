"""Identities, ports, the reaper and the run lock, with real processes and real kills."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import psutil
import pytest

from shardmill import engine_process, process, reaper
from shardmill.engine_process import EngineProcess
from shardmill.errors import UserError
from shardmill.layout import Layout
from shardmill.owner import RunLock, owner_is_alive, read_owner
from shardmill.process import Identity, identify, is_alive, own_identity, wait_until

SCRIPTS = str(Path(process.__file__).parents[1])
REAPER = [sys.executable, "-S", "-E", reaper.__file__]


def children_with(word: str) -> list[int]:
    """Pids of live processes with `word` among their arguments."""
    found = []
    for candidate in psutil.process_iter(["cmdline", "status"]):
        if word in (candidate.info["cmdline"] or []) and candidate.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(candidate.pid)
    return found


# Identities


def test_own_identity_is_alive_until_the_end() -> None:
    child = subprocess.Popen(["sleep", "100"])
    identity = identify(child.pid)
    assert identity is not None
    assert Identity.from_json(orjson.loads(orjson.dumps(identity.to_json()))) == identity
    assert is_alive(identity)
    child.kill()
    # Not waited for: until then it is a zombie, which is dead.
    assert wait_until(lambda: not is_alive(identity), 5)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    child.wait()
    assert not is_alive(identity)


@pytest.mark.parametrize("change", [{"start_time": 1.0}, {"boot_id": "another"}, {"host": "elsewhere"}])
def test_a_pid_used_again_is_another_process(change: dict) -> None:
    assert is_alive(own_identity())
    assert not is_alive(dataclasses.replace(own_identity(), **change))


def test_no_identity_in_damaged_json() -> None:
    for value in (None, [], {}, {"pid": "x", "start_time": 1, "boot_id": "", "host": ""}):
        assert Identity.from_json(value) is None
        assert not is_alive(Identity.from_json(value))


def test_port_holder_is_named_without_its_arguments() -> None:
    code = "import socket,sys,time; s=socket.socket(); s.bind(('127.0.0.1',0)); s.listen(); "
    code += "print(s.getsockname()[1], flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code, "--api-key=sesame"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        port = int(child.stdout.readline())
        try:
            assert not process.port_is_free("127.0.0.1", port)
            assert process.port_holder(port) == f"pid {child.pid} ({Path(sys.executable).name})"
        finally:
            child.kill()
    assert process.port_is_free("127.0.0.1", port)


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(OSError):
        process.port_is_free("192.0.2.1", 30000)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["-m", "http.server", "--bind", "127.0.0.1", "0"], "-m http.server"),
        (["-u", "-m", "http.server", "--bind", "127.0.0.1", "0"], "-m http.server"),
    ],
)
def test_python_programs_are_named_by_module(arguments: list[str], name: str) -> None:
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        expected = f"{Path(sys.executable).name} {name}"
        assert wait_until(lambda: process.program_name(psutil.Process(child.pid)) == expected, 5)
    finally:
        child.kill()
        child.wait()


# The reaper

FORKING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def daemon(depth):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            if depth: daemon(depth - 1)
            os.write(1, b"up\\n")
            time.sleep(1000)
        os._exit(0)
daemon(1)
daemon(0)
os.write(1, b"up\\n")
time.sleep(1000)
"""


def is_reaper(pid: int) -> bool:
    """Whether a process that may end at any moment is a reaper."""
    try:
        return reaper.__file__ in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False


class Forking:
    """A command that ignores SIGTERM and has daemons, and daemons of daemons, in sessions of their own."""

    def __init__(self, word: str, wrap: list[str]) -> None:
        self.word = word
        command = [*wrap, sys.executable, "-c", FORKING, word]
        self.top = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.top.stdout
        for _ in range(4):
            assert self.top.stdout.readline() == "up\n"

    @property
    def alive(self) -> list[int]:
        return [pid for pid in children_with(self.word) if pid != self.top.pid and pid not in self.reapers]

    @property
    def reapers(self) -> list[int]:
        return [pid for pid in children_with(self.word) if is_reaper(pid)]


def test_reaper_leaves_nothing_of_a_stubborn_tree() -> None:
    tree = Forking("stubborn-tree", [*REAPER, "--stop-timeout", "0.3", "--"])
    assert len(tree.alive) >= 4
    tree.top.terminate()
    assert tree.top.wait(10) == 128 + signal.SIGKILL
    assert tree.alive == []


def test_reaper_ends_the_tree_when_the_command_ends() -> None:
    tree = Forking("headless-tree", [*REAPER, "--stop-timeout", "0.3", "--"])
    main = psutil.Process(tree.top.pid).children()[0].pid
    mains_children = len(tree.alive) - 1
    assert mains_children >= 3
    os.kill(main, signal.SIGKILL)
    assert tree.top.wait(10) == 128 + signal.SIGKILL
    assert tree.alive == []


def test_reaper_ends_the_tree_when_its_parent_is_killed() -> None:
    code = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    wrap = [sys.executable, "-c", code, *REAPER, "--stop-timeout", "0.3", "--"]
    tree = Forking("orphaned-tree", wrap)
    assert len(tree.alive) >= 4
    tree.top.kill()
    tree.top.wait()
    assert wait_until(lambda: not tree.alive and not tree.reapers, 10)


def test_reaper_passes_exit_codes_on() -> None:
    for command, code in ((["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -9 $$"], 137), (["/no/such/program"], 127)):
        assert subprocess.call([*REAPER, "--", *command], stderr=subprocess.DEVNULL, timeout=10) == code


def test_reaper_whose_asker_is_gone_starts_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "started"
    code = subprocess.call([*REAPER, "--parent", "1", "--", "touch", str(marker)], timeout=10)
    assert code == 128 + signal.SIGTERM
    assert not marker.exists()


ENGINE_KEEPER = """
import os, sys, time
from pathlib import Path
from shardmill.engine_process import EngineProcess
from shardmill.reaper import become_subreaper
become_subreaper()
engine = EngineProcess(sys.argv[2:], dict(os.environ), Path(sys.argv[1]), 0.3, ())
while engine.engine_identity is None or engine.log.tail().count("up") < 4: time.sleep(0.02)
print(engine.reaper_identity.pid, flush=True)
while not engine.has_ended(): time.sleep(0.02)
print(engine.how_it_ended(), flush=True)
print(engine.stop(), flush=True)
time.sleep(1000)
"""


def test_a_killed_reaper_leaves_nothing_to_its_supervisor(tmp_path: Path) -> None:
    word = "reaperless-tree"
    command = [sys.executable, "-c", ENGINE_KEEPER, str(tmp_path / "log"), sys.executable, "-c", FORKING, word]
    environment = os.environ | {"PYTHONPATH": SCRIPTS}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as keeper:
        assert keeper.stdout
        try:
            os.kill(int(keeper.stdout.readline()), signal.SIGKILL)
            assert "keeper process was killed by SIGKILL" in keeper.stdout.readline()
            assert keeper.stdout.readline() == "True\n"
            assert [pid for pid in children_with(word) if pid != keeper.pid] == []
        finally:
            keeper.kill()


# The engine's log


def run_to_end(code: str, log: Path, secrets: tuple[str, ...] = ()) -> EngineProcess:
    engine = EngineProcess([sys.executable, "-c", code], dict(os.environ), log, 1, secrets)
    assert wait_until(engine.has_ended, 10)
    engine.stop()
    return engine


def test_secrets_do_not_reach_the_log(tmp_path: Path) -> None:
    code = "import sys,time; print('key=op', end='', flush=True); time.sleep(0.1); print('ensesame;'); sys.exit(3)"
    engine = run_to_end(code, tmp_path / "logs" / "log", ("opensesame",))
    assert (tmp_path / "logs" / "log").read_text() == engine.log.tail() == "key=***;\n"
    assert engine.how_it_ended() == "the engine exited with code 3"


def test_the_log_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "LOG_BYTES", 100_000)
    run_to_end("for i in range(100_000): print(f'line {i:06}')", tmp_path / "log")
    # Oldest first; where the last line fell on a rotation there is no "log".
    files = [tmp_path / name for name in ("log.3", "log.2", "log.1", "log") if (tmp_path / name).exists()]
    assert len(files) >= 3 and set(files) == set(tmp_path.iterdir())
    kept = "".join(path.read_text() for path in files)
    first = int(kept.split()[1])
    assert kept == "".join(f"line {i:06}\n" for i in range(first, 100_000))


def test_a_log_that_cannot_be_written_costs_only_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    engine = run_to_end("for i in range(100_000): print(i)", tmp_path / "log")
    assert engine.log.tail().endswith("99999\n")


# The run lock

HOLDER = """
import os, sys, time
from shardmill.layout import Layout
from shardmill.owner import RunLock
lock = RunLock.acquire(Layout(sys.argv[1], "x"))
if "fork" in sys.argv and os.fork() == 0:
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(1000)
os.write(1, b"held\\n")
sys.stdin.readline()
lock.release()
print("released", flush=True)
time.sleep(1000)
"""


def hold(results: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(results), *more]
    environment = os.environ | {"PYTHONPATH": SCRIPTS}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    return child


def test_a_second_run_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path), "x")
    assert not owner_is_alive(layout)
    holder = hold(tmp_path)
    assert holder.stdout and holder.stdin
    try:
        assert holder.stdout.readline() == "held\n"
        assert owner_is_alive(layout)
        owner = read_owner(layout)
        assert owner and owner.identity == identify(holder.pid) and owner.run == "x"
        with pytest.raises(
            UserError, match=f"another Shardmill run is live on .*/x: pid {holder.pid} on host .* since"
        ):
            RunLock.acquire(layout)
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "released\n"
        assert read_owner(layout) is None and not owner_is_alive(layout)
        with RunLock.acquire(layout):
            assert owner_is_alive(layout)
    finally:
        holder.kill()
        holder.wait()


def test_a_killed_owner_frees_the_run_even_if_a_fork_of_it_lives_on(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path), "x")
    holder = hold(tmp_path, "fork")
    assert holder.stdout
    lines = {holder.stdout.readline().strip() for _ in range(2)}
    (fork,) = (int(line) for line in lines if line != "held")
    try:
        holder.kill()
        holder.wait()
        assert not owner_is_alive(layout)
        with RunLock.acquire(layout):
            owner = read_owner(layout)
            assert owner and owner.identity == own_identity()
        assert psutil.pid_exists(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_an_owner_on_another_host_lives_by_its_heartbeat(tmp_path: Path) -> None:
    """What a network file system shows whose locks do not reach other machines."""
    layout = Layout(str(tmp_path), "x")
    elsewhere = dataclasses.replace(own_identity(), host="node-7", boot_id="another")
    layout.lock.parent.mkdir(parents=True)
    layout.lock.write_bytes(orjson.dumps({"identity": elsewhere.to_json(), "run": "x", "started_at": time.time()}))
    assert owner_is_alive(layout)
    with pytest.raises(UserError, match=r"on host node-7 since .* 60 s after its last heartbeat"):
        RunLock.acquire(layout)
    os.utime(layout.lock, (time.time() - 61,) * 2)
    assert not owner_is_alive(layout)
    RunLock.acquire(layout).release()


def test_a_lock_from_before_a_reboot_is_dead(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path), "x")
    before = dataclasses.replace(own_identity(), boot_id="before")
    layout.lock.parent.mkdir(parents=True)
    layout.lock.write_bytes(orjson.dumps({"identity": before.to_json(), "run": "x", "started_at": time.time()}))
    assert not owner_is_alive(layout)
    RunLock.acquire(layout).release()
