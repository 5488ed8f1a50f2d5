"""The ledger: no place is handed out twice, none is lost with a dead process, and none is kept from a poorer one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from shardmill import ledger as ledger_module
from shardmill.errors import UserError
from shardmill.ledger import ROWS, SERVERS, Ledger

SCRIPTS = Path(__file__).parent.parent / "scripts"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SCRIPTS)}

# A process with a row of its own that does what it is told, a JSON line [method, arguments...] at a time.
WORKER = """
import sys
from pathlib import Path
import orjson
from shardmill.errors import UserError
from shardmill.ledger import Ledger
try:
    ledger = Ledger(Path(sys.argv[1]))
    ledger.join()
except UserError as error:
    print(orjson.dumps(str(error)).decode(), flush=True)
    sys.exit(3)
print("0", flush=True)
for line in sys.stdin.buffer:
    method, *arguments = orjson.loads(line)
    print(orjson.dumps(getattr(ledger, method)(*arguments)).decode(), flush=True)
"""

# A process that takes and gives back places at random, and writes down from when to when it surely held each.
SOAK = """
import os, random, sys, time
from pathlib import Path
from shardmill.ledger import Ledger
chance, limits = random.Random(int(sys.argv[2])), [int(limit) for limit in sys.argv[3].split(",")]
out = os.open(sys.argv[4], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
ledger = Ledger(Path(sys.argv[1]))
ledger.join()
held = []
while True:
    ledger.set_waiting(chance.randrange(3))
    if held and chance.random() < 0.5:
        server = held.pop(chance.randrange(len(held)))
        os.write(out, b"%d - %d\\n" % (time.monotonic_ns(), server))
        ledger.release(server)
    elif (server := ledger.claim(limits, chance.choice([None, 0, 1]))) is not None:
        os.write(out, b"%d + %d\\n" % (time.monotonic_ns(), server))
        held.append(server)
"""


class Worker:
    def __init__(self, path: Path, **options: Any) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            **options,
        )
        self.first = orjson.loads(self.child.stdout.readline() or b'"died"')

    def ask(self, method: str, *arguments: Any) -> Any:
        self.child.stdin.write(orjson.dumps([method, *arguments]) + b"\n")
        self.child.stdin.flush()
        return orjson.loads(self.child.stdout.readline())

    def claim(self, limits: list[int], prefer: int | None = None) -> int | None:
        return self.ask("claim", limits, prefer)

    def wants(self, count: int) -> None:
        self.ask("set_waiting", count)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


@pytest.fixture
def start(path: Path) -> Iterator[Callable[[], Worker]]:
    """Starts worker processes; all are gone at the end."""
    with ExitStack() as workers:

        def started() -> Worker:
            worker = Worker(path)
            workers.callback(worker.child.__exit__, None, None, None)
            workers.callback(worker.child.kill)
            assert worker.first == 0
            return worker

        yield started


@pytest.fixture
def own(path: Path) -> Iterator[Ledger]:
    """This process's own row."""
    ledger = Ledger(path)
    ledger.join()
    yield ledger
    ledger.close()


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.01)
    return value


def take_all(claim: Callable[[], int | None]) -> list[int]:
    return list(iter(claim, None))


# One process


def test_places_are_taken_where_there_is_most_room(own: Ledger):
    assert take_all(lambda: own.claim([2, 5, 0, 3])) == [1, 1, 1, 3, 0, 1, 3, 0, 1, 3]
    assert [own.in_flight(server) for server in range(4)] == [2, 5, 0, 3]
    own.release(1)
    assert take_all(lambda: own.claim([2, 5, 0, 3])) == [1]
    assert own.claim([2, 4, 0, 3]) is None, "a limit may fall below what is in flight"
    assert own.claim([0, 0]) is None
    assert own.claim([]) is None


def test_a_conversation_stays_where_it_was_while_there_is_room(own: Ledger):
    assert [own.claim([2, 9], 0) for _ in range(4)] == [0, 0, 1, 1]
    assert own.claim([0, 9], 0) == 1, "a server that cannot be used is no choice"


def test_a_place_that_was_not_taken_cannot_be_given_back(own: Ledger):
    """A count below zero would be room for one request too many, for everyone."""
    with pytest.raises(ValueError, match="no place at server 0"):
        own.release(0)
    assert own.claim([1]) == 0
    own.release(0)
    with pytest.raises(ValueError, match="no place at server 0"):
        own.release(0)
    assert take_all(lambda: own.claim([1])) == [0]


def test_as_many_servers_as_a_row_has_counters(own: Ledger, start: Callable[[], Worker]):
    """The last server's counter is not the next row's first."""
    other = start()
    limits = [0] * (SERVERS - 1) + [3]
    assert take_all(lambda: own.claim(limits)) == [SERVERS - 1] * 3
    assert other.claim(limits) is None
    assert other.claim([1] * SERVERS) == 0
    own.release(SERVERS - 1)
    assert other.claim(limits) == SERVERS - 1
    with pytest.raises(ValueError, match="65 servers"):
        own.claim([1] * (SERVERS + 1))


def test_many_threads_share_a_row(own: Ledger):
    limits = [3, 4]

    def work(seed: int) -> None:
        chance, held = random.Random(seed), []
        for _ in range(300):
            if held and chance.random() < 0.5:
                own.release(held.pop())
            elif (server := own.claim(limits)) is not None:
                held.append(server)
            assert all(own.in_flight(server) <= limits[server] for server in range(2))
        for server in held:
            own.release(server)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, seed) for seed in range(8)]:
            done.result()
    assert [own.in_flight(server) for server in range(2)] == [0, 0]
    assert len(take_all(lambda: own.claim(limits))) == 7


# Several processes


def test_places_are_shared_among_processes(start: Callable[[], Worker], own: Ledger):
    one, two = start(), start()
    assert [one.claim([2, 2]), two.claim([2, 2]), one.claim([2, 2]), own.claim([2, 2])] == [0, 1, 0, 1]
    assert [worker.claim([2, 2]) for worker in (one, two)] == [None, None]
    assert [own.in_flight(server) for server in range(3)] == [2, 2, 0]
    one.ask("release", 0)
    assert two.claim([2, 2]) == 0
    two.ask("close")
    assert [own.in_flight(server) for server in range(2)] == [1, 1]


def test_kill_9_of_a_holder_gives_its_places_back(start: Callable[[], Worker], own: Ledger):
    holder, neighbour = start(), start()
    assert neighbour.claim([5]) == 0
    holder.wants(100)
    assert len(take_all(lambda: holder.claim([5]))) == 4
    own.set_waiting(9)
    assert own.claim([5]) is None
    holder.kill()
    assert until(lambda: own.in_flight(0) == 1)
    assert take_all(lambda: own.claim([5])) == [0] * 4, "all of the dead one's places, none of its neighbour's"


def test_a_row_is_used_again(start: Callable[[], Worker], path: Path):
    """Jobs come and go by the thousand; a dead one's row is the next one's, and starts at nothing."""
    for _ in range(4):
        worker = start()
        assert len(take_all(lambda worker=worker: worker.claim([3]))) == 3
        worker.kill()
    ledger = Ledger(path)
    rows = [ledger._ints[row * ledger_module._ROW_INTS] for row in range(ROWS)]
    ledger.close()
    assert sum(rows) == 1


def test_no_server_ever_holds_more_than_its_limit(path: Path, tmp_path: Path):
    """Five processes take and give back at random, and are killed and replaced all the while."""
    limits, chance, events = [3, 5], random.Random(7), tmp_path / "events"
    events.mkdir()
    serial = 0
    with ExitStack() as stack:
        children: list[subprocess.Popen[bytes]] = []

        def replace(at: int) -> None:
            nonlocal serial
            serial += 1
            command = [sys.executable, "-c", SOAK, str(path), str(serial), ",".join(map(str, limits))]
            child = subprocess.Popen([*command, str(events / str(serial))], env=ENVIRONMENT)
            stack.callback(child.wait)
            stack.callback(child.kill)
            children[at : at + 1] = [child]

        for at in range(5):
            replace(at)
        view = Ledger(path)
        for _ in range(10):
            at = chance.randrange(5)
            log = events / str(children[at].args[-1]).rsplit("/", 1)[-1]
            wanted = chance.randrange(1, 300)
            until(lambda log=log, wanted=wanted: log.exists() and log.read_bytes().count(b"\n") >= wanted)
            assert all(view.in_flight(server) <= limit for server, limit in enumerate(limits))
            children[at].kill()
            replace(at)
        assert [child.poll() for child in children] == [None] * 5, "none died by itself"
        for child in children:
            child.kill()
            child.wait()
    assert until(lambda: [view.in_flight(server) for server in range(2)] == [0, 0])
    view.close()
    changes: list[tuple[int, int, int]] = []
    for log in events.iterdir():
        held: list[int] = []
        last = 0
        for line in log.read_text().splitlines():
            at, sign, server = line.split()
            last = int(at)
            changes.append((last, 1 if sign == "+" else -1, int(server)))
            held.append(int(server)) if sign == "+" else held.remove(int(server))
        changes += [(last, -1, server) for server in held]  # killed some time after that
    count, most = [0, 0], [0, 0]
    for _, change, server in sorted(changes):
        count[server] += change
        most[server] = max(most[server], count[server])
    assert len(changes) > 1000
    assert most == limits, "never more, and as many at times"


# Fairness


def test_a_newcomer_gets_its_share_from_one_that_holds_all(start: Callable[[], Worker]):
    limits = [8, 8]
    rich, poor = start(), start()
    rich.wants(1000)
    held = take_all(lambda: rich.claim(limits))
    assert len(held) == 16
    poor.wants(1000)
    got = []
    assert poor.claim(limits) is None
    for _ in range(50):  # both always want more, and the rich one asks first
        server = held.pop(0)
        rich.ask("release", server)
        if (again := rich.claim(limits)) is not None:
            held.append(again)
        if (mine := poor.claim(limits)) is not None:
            got.append(mine)
        assert len(held) + len(got) == 16, "no place stays empty"
    assert min(len(held), len(got)) >= 7
    third, its = start(), []
    third.wants(1000)
    for _ in range(50):
        for worker, places in ((rich, held), (poor, got)):
            if places:
                worker.ask("release", places.pop(0))
            if (again := worker.claim(limits)) is not None:
                places.append(again)
        its += take_all(lambda: third.claim(limits))
        assert len(held) + len(got) + len(its) == 16
    assert min(len(held), len(got), len(its)) >= 4


def test_room_that_nobody_else_wants_is_taken(start: Callable[[], Worker], own: Ledger):
    """A shard in its last answers leaves its room to the others."""
    idle = start()
    idle.wants(0)
    own.set_waiting(100)
    assert len(take_all(lambda: own.claim([8]))) == 8
    for _ in range(8):
        own.release(0)
    idle.wants(5)
    assert len(take_all(lambda: own.claim([8]))) == 4, "half is kept for one that wants it"
    assert take_all(lambda: idle.claim([8])) == [0] * 4


def test_a_dead_newcomer_keeps_nothing_from_anyone(start: Callable[[], Worker], own: Ledger):
    dead = start()
    dead.wants(100)
    own.set_waiting(100)
    got = take_all(lambda: own.claim([8]))
    assert len(got) == 4
    dead.kill()
    until(lambda: own.claim([8]) is not None and not got.append(0) and len(got) == 8)


# Files


def test_more_jobs_than_rows_are_refused(path: Path, own: Ledger):
    """All other rows are locked by one child, which costs less than as many children."""
    code = (
        "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.lockf(fd, fcntl.LOCK_EX, int(sys.argv[3]), int(sys.argv[2])); print(flush=True); sys.stdin.read()"
    )
    first, rest = str(ledger_module._ROW_BYTE + 1), str(ROWS - 1)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path), first, rest], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"\n"
        worker = Worker(path)
        assert worker.first == f"more than {ROWS} jobs at once on one machine; run with fewer --cores"
        assert worker.child.wait() == 3
        child.kill()
    worker = Worker(path)
    assert worker.first == 0
    worker.kill()


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"x" * 100, ledger_module._MAGIC, b"\xff" * ledger_module._FILE_BYTES,
     ledger_module._MAGIC + b"\xff" * ledger_module._FILE_BYTES, ledger_module._MAGIC[:-1] + b"0" * 70_000],
    ids=["empty", "short", "junk", "cut", "foreign", "long", "other version"],
)  # fmt: skip
def test_a_damaged_file_is_made_anew(path: Path, content: bytes):
    path.write_bytes(content)
    ledger = Ledger(path)
    ledger.join()
    ledger.set_waiting(10)
    assert take_all(lambda: ledger.claim([3, 3])) == [0, 1] * 3
    assert [ledger.in_flight(server) for server in range(3)] == [3, 3, 0]
    ledger.close()


@pytest.mark.parametrize("junk", [b"\0", b"\xff", b"\x7f"])
def test_damage_to_a_file_in_use_does_not_last(path: Path, start: Callable[[], Worker], own: Ledger, junk: bytes):
    """Whoever holds places says so again with its next call, and nobody dies of it."""
    other = start()
    for worker in (other.ask, lambda method, *arguments: getattr(own, method)(*arguments)):
        worker("set_waiting", 100)
        assert [worker("claim", [8, 8], 0) for _ in range(3)] == [0, 0, 0]
    # From another process: closing the file here would drop this process's locks.
    code = "import os, sys; os.pwrite(os.open(sys.argv[1], os.O_RDWR), bytes([int(sys.argv[2])]) * int(sys.argv[3]), 0)"
    size = str(ledger_module._FILE_BYTES)
    subprocess.run([sys.executable, "-c", code, str(path), str(junk[0]), size], check=True)
    newcomer = start()  # finds no ledger there, and makes one
    newcomer.wants(1)
    assert (other.claim([0]), own.claim([0])) == (None, None)
    assert newcomer.ask("in_flight", 0) == 6
    assert newcomer.claim([8, 0]) == 0
    other.ask("release", 0)
    own.release(0)
    assert newcomer.ask("in_flight", 0) == 5
    assert own.claim([8, 8], 0) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(path: Path):
    path.write_bytes(b"")
    os.chown(path, 12345, 12345)
    with pytest.raises(UserError, match=r"run\.ledger: belongs to another user; .*TMPDIR"):
        Ledger(path)


@pytest.mark.parametrize("what", ["link", "folder", "parent"])
def test_what_is_no_file_of_ours_is_refused(path: Path, tmp_path: Path, what: str):
    if what == "link":
        (tmp_path / "target").write_bytes(b"precious")
        path.symlink_to(tmp_path / "target")
    elif what == "folder":
        path.mkdir()
    else:
        path = tmp_path / "file" / "run.ledger"
        path.parent.write_bytes(b"")
    with pytest.raises(UserError, match=r"run\.ledger: cannot be opened"):
        Ledger(path)
    if what == "link":
        assert (tmp_path / "target").read_bytes() == b"precious"


def test_a_full_disk_is_a_clear_line_and_no_sudden_death(tmp_path: Path):
    """Writing to a mapped hole of a file on a full disk would end the process with SIGBUS."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    worker = Worker(disk / "run.ledger")
    try:
        assert "cannot be used (No space left on device)" in worker.first
        assert worker.child.wait(60) == 3
    finally:
        worker.kill()
        subprocess.run(["umount", str(disk)], check=True)


def test_a_forked_child_does_not_keep_the_row(path: Path, start: Callable[[], Worker]):
    """The kernel's locks, not the file's content, say who is alive; a child that was forked off holds none."""
    ledger = Ledger(path)
    ledger.join()
    assert ledger.claim([1]) == 0
    pid = os.fork()
    if not pid:
        signal.pause()
    try:
        ledger.close()
        assert start().claim([1]) == 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
