"""The journal: what append acknowledged is there after any death, and nothing else is ever taken for an answer."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from shardmill import journal as journal_module
from shardmill.errors import UserError
from shardmill.journal import Journal, decode_entry, encode_entry, iter_entries

SCRIPTS = Path(__file__).parent.parent / "scripts"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SCRIPTS)}


def entry(number: int, *, fingerprint: str = "f", text: str = "é\u2028 😀", **more: Any) -> dict[str, Any]:
    answer = {"content": f"{text} {number}", "finish_reason": "stop"}
    return {"id": f"p{number}", "fingerprint": fingerprint, "kind": "answer", "answer": answer, **more}


def held(journal: Journal, numbers: range, fingerprint: str = "f") -> list[dict[str, Any]]:
    return [found for number in numbers for found in journal.entries(f"p{number}", fingerprint)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journals" / "00000.jsonl"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


# What is written is there


def test_entries_come_back_by_prompt_and_fingerprint_in_order(path: Path):
    with Journal(path) as journal:
        for attempt in (1, 2, 3):
            for number in (1, 2):
                ref = journal.append(entry(number, attempt=attempt))
                assert journal.read(ref) == entry(number, attempt=attempt)
        journal.append(entry(1, fingerprint="other"))
        live = [journal.entries("p1", name) for name in ("f", "other", "none")]
    with Journal(path) as journal:
        assert [journal.entries("p1", name) for name in ("f", "other", "none")] == live
        assert [found["attempt"] for found in live[0]] == [1, 2, 3]
        assert live[1:] == [[entry(1, fingerprint="other")], []]
        assert len(journal) == 7
        assert [journal.read(ref) for ref in journal.refs("p2", "f")] == journal.entries("p2", "f")
        assert journal.damaged_lines == 0
    assert len(list(iter_entries(path))) == 7


def test_entries_of_other_fingerprints_are_left_alone(path: Path):
    """Another contract's answers stay in the file, byte for byte, whatever is added or cut off."""
    with Journal(path) as journal:
        for number in range(5):
            journal.append(entry(number, fingerprint="old"))
    before = path.read_bytes()
    with path.open("ab") as handle:
        handle.write(encode_entry(entry(9))[:-5])
    with Journal(path) as journal:
        assert held(journal, range(10), "new") == []
        journal.append(entry(1, fingerprint="new"))
    assert path.read_bytes() == before + encode_entry(entry(1, fingerprint="new"))


def test_lines_are_json_with_one_line_each(path: Path):
    texts = ["\n", "\r\n", "\u2028\u2029\x85", "\0", '"}\n{"', "é" * 1000, ""]
    with Journal(path) as journal:
        for number, text in enumerate(texts):
            journal.append(entry(number, text=text))
    lines = path.read_bytes().split(b"\n")
    assert [orjson.loads(line)["entry"] for line in lines[:-1]] == [entry(n, text=t) for n, t in enumerate(texts)]
    assert lines[-1] == b""


def test_an_entry_that_is_no_json_leaves_the_journal_as_it_was(path: Path):
    with Journal(path) as journal:
        journal.append(entry(1))
        with pytest.raises(TypeError):
            journal.append(entry(2, more=object()))
        journal.append(entry(3))
        assert held(journal, range(5)) == [entry(1), entry(3)]
    assert list(iter_entries(path)) == [entry(1), entry(3)]


def test_many_threads_append_at_once(path: Path):
    threads, each = 16, 100
    with Journal(path) as journal, ThreadPoolExecutor(threads) as pool:

        def write(thread: int) -> None:
            for number in range(each):
                mine = entry(thread * each + number, text="x" * (number * 37 % 4000))
                assert journal.read(journal.append(mine)) == mine

        for done in [pool.submit(write, thread) for thread in range(threads)]:
            done.result()
        live = held(journal, range(threads * each))
    with Journal(path) as journal:
        assert held(journal, range(threads * each)) == live
        assert len(journal) == threads * each
        assert journal.damaged_lines == 0


# Torn and damaged


def test_a_last_line_torn_at_any_byte_is_cut_off(path: Path):
    """Bytes in the middle of a character among them; what is appended then starts on a line of its own."""
    whole, last = encode_entry(entry(1)) + encode_entry(entry(2)), encode_entry(entry(3))
    assert len(last.decode()) < len(last), "there are characters to cut through"
    path.parent.mkdir()
    for length in range(len(last)):
        path.write_bytes(whole + last[:length])
        with Journal(path) as journal:
            assert held(journal, range(9)) == [entry(1), entry(2)]
            journal.append(entry(4))
        assert path.read_bytes() == whole + encode_entry(entry(4))
        assert journal.damaged_lines == 0


@pytest.mark.parametrize(
    "tail", [b"\0" * 5000, b"\xff\xfe", b"{", b"x" * 100_000], ids=["nul", "bytes", "json", "long"]
)
def test_a_tail_of_anything_is_cut_off(path: Path, tail: bytes):
    path.parent.mkdir()
    path.write_bytes(encode_entry(entry(1)) + tail)
    with Journal(path) as journal:
        assert held(journal, range(9)) == [entry(1)]
    assert path.read_bytes() == encode_entry(entry(1))


def test_a_flipped_bit_anywhere_never_makes_another_answer():
    for number in (1, 12):
        line = encode_entry(entry(number, more=[1.5, None, {"a": True}]))[:-1]
        original = decode_entry(line)
        assert original == entry(number, more=[1.5, None, {"a": True}])
        for bit in range(len(line) * 8):
            damaged = bytearray(line)
            damaged[bit // 8] ^= 1 << bit % 8
            assert decode_entry(bytes(damaged)) in (None, original)


def test_a_damaged_line_costs_its_own_answer_only(path: Path):
    lines = [encode_entry(entry(number)) for number in range(4)]
    path.parent.mkdir()
    for at in range(len(lines[1])):
        damaged = bytearray(lines[1])
        damaged[at] ^= random.Random(at).randrange(1, 256)
        content = b"".join([lines[0], bytes(damaged), *lines[2:]])
        path.write_bytes(content)
        with Journal(path) as journal:
            found = held(journal, range(4))
            lost = {1, 2} if at == len(lines[1]) - 1 else {1}  # a lost line end joins two lines
            assert found in ([entry(n) for n in range(4)], [entry(n) for n in range(4) if n not in lost])
            assert bool(journal.damaged_lines) == (len(found) < 4)
        assert path.read_bytes() == content, "damage is not repaired, only passed over"
        assert list(iter_entries(path)) == found


@pytest.mark.parametrize(
    "value",
    [1, None, [], "x", {}, {"id": "p", "kind": "answer"}, {"id": 1, "fingerprint": "f", "kind": "answer"},
     {"id": ["p"], "fingerprint": "f", "kind": "answer"}, {"id": "p", "fingerprint": None, "kind": "answer"}],
)  # fmt: skip
def test_a_line_that_is_no_entry_counts_as_damaged(path: Path, value: Any):
    path.parent.mkdir()
    path.write_bytes(encode_entry(value) + b"\n" + b"\xff\n" + encode_entry(entry(1)))
    with Journal(path) as journal:
        assert journal.damaged_lines == 3
        assert held(journal, range(3)) == [entry(1)]


def test_a_file_changed_under_its_feet_is_noticed(path: Path):
    with Journal(path) as journal:
        ref = journal.append(entry(1))
        path.write_bytes(b"x" * 500)
        with pytest.raises(UserError, match="changed while it was in use"):
            journal.read(ref)


# Processes


WRITER = """
import sys
from shardmill.journal import Journal
journal, size, number = Journal(sys.argv[1]), int(sys.argv[3]), int(sys.argv[2])
print("open", flush=True)
while True:
    answer = {"content": "é" * (number * 7919 % size)}
    journal.append({"id": f"p{number}", "fingerprint": "f", "kind": "answer", "answer": answer})
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
    number += 1
"""


def test_kill_9_at_any_moment_loses_no_acknowledged_answer(path: Path):
    """One child after the other writes until it is killed, the next one straight after: without a word in between."""
    chance = random.Random(20261130)
    acknowledged: set[int] = set()
    for round_number in range(20):
        first = round_number * 1_000_000
        size = chance.choice([2, 200, 20_000, 300_000])
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(first), str(size)], stdout=subprocess.PIPE, env=ENVIRONMENT
        ) as child:
            assert child.stdout.readline() == b"open\n"
            for _ in range(chance.randrange(40)):
                acknowledged.add(int(child.stdout.readline()))
            child.kill()
            *told, _ = child.stdout.read().split(b"\n")
            acknowledged |= {int(line) for line in told}
        assert child.returncode == -signal.SIGKILL
    assert len(acknowledged) > 100
    with Journal(path) as journal:
        assert journal.damaged_lines == 0
        lost = [number for number in acknowledged if len(journal.entries(f"p{number}", "f")) != 1]
        assert not lost
        assert len(journal) <= len(acknowledged) + 20, "at most one unacknowledged answer of each child"


HOLDER = """
import sys
from shardmill.journal import Journal
journal = Journal(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[bytes]:
    """A child that has the journal open until its standard input ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    assert child.stdout.readline() == b"open\n"
    return child


def test_a_journal_in_use_is_refused_in_the_end(path: Path):
    with hold(path) as child:
        with path.open("ab") as handle:
            handle.write(b"torn, or just being written")
        with pytest.raises(UserError, match=r"00000\.jsonl: in use by another process; wait for"):
            Journal(path, lock_timeout=0.2)
        assert path.read_bytes() == b"torn, or just being written", "another's line is not cut off"
        child.kill()
    with Journal(path, lock_timeout=0.2) as journal, pytest.raises(UserError, match="in use"):
        journal.append(entry(1))
        Journal(path, lock_timeout=0)


def test_a_dying_predecessor_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch):
    waits = threading.Event()
    pause = journal_module.time.sleep
    monkeypatch.setattr(journal_module.time, "sleep", lambda seconds: (waits.set(), pause(seconds)))
    with hold(path) as child, ThreadPoolExecutor(1) as pool:
        opening = pool.submit(Journal, path, lock_timeout=60)
        assert waits.wait(30)
        assert not opening.done()
        child.kill()
        with opening.result(timeout=30) as journal:
            journal.append(entry(1))
    assert list(iter_entries(path)) == [entry(1)]


# Disks


def test_a_full_disk_stops_the_journal_and_room_lets_it_go_on(tiny_disk: Path):
    path = tiny_disk / "00000.jsonl"
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(b"x" * 100_000)
    written = []
    with (
        pytest.raises(UserError, match=r"No space left on device\); make room, then") as caught,
        Journal(path) as journal,
    ):
        for number in range(1000):
            journal.append(entry(number, text="x" * 10_000))
            written.append(number)
    assert str(path) in str(caught.value)
    assert 5 < len(written) < 30
    assert path.read_bytes() == b"".join(encode_entry(entry(n, text="x" * 10_000)) for n in written)
    with Journal(path) as journal:
        assert held(journal, range(1000)) == [entry(n, text="x" * 10_000) for n in written]
        with pytest.raises(UserError, match="No space left"):
            journal.append(entry(len(written), text="x" * 10_000))
            journal.append(entry(len(written), text="x" * 10_000))
    ballast.unlink()
    with Journal(path) as journal:
        for number in range(len(written), len(written) + 5):
            journal.append(entry(number, text="x" * 10_000))
    assert [found["id"] for found in iter_entries(path)] == [f"p{n}" for n in range(len(written) + 5)]


def test_a_full_disk_at_the_start_is_a_clear_line(tiny_disk: Path):
    with pytest.raises(OSError, match="No space left"), (tiny_disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(b"x" * 4096)
    with pytest.raises(UserError, match="make room"), Journal(tiny_disk / "new" / "00000.jsonl") as journal:
        journal.append(entry(1))


def test_a_line_that_does_not_fit_leaves_no_part_behind(path: Path):
    """The kernel's limit on file sizes cuts a write in its middle, as a full disk does."""
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old_limit[1]))
    try:
        with Journal(path) as journal:
            journal.append(entry(1))
            with pytest.raises(UserError, match="File too large"):
                journal.append(entry(2, text="x" * 20_000))
            with pytest.raises(UserError, match="File too large"):
                journal.append(entry(3))  # it would fit, but a journal that failed once is not trusted again
            assert held(journal, range(9)) == [entry(1)], "what there is can still be read"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert path.read_bytes() == encode_entry(entry(1))


def test_a_disk_that_fails_in_the_background_is_said_by_the_next_call(path: Path, monkeypatch: pytest.MonkeyPatch):
    failed = threading.Event()

    def fail(_: int) -> None:
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    journal = Journal(path)
    monkeypatch.setattr(journal_module.os, "fsync", fail)
    journal.append(entry(1))
    assert failed.wait(30)
    # A shard's files must not be built on answers that may not be on the disk.
    with pytest.raises(UserError, match=r"Input/output error\); see to the disk"):
        journal.sync()
    with pytest.raises(UserError, match="Input/output error"):
        journal.append(entry(2))
    with pytest.raises(UserError, match="Input/output error"):
        journal.close()
    Journal(path, lock_timeout=0).close()


def test_sync_waits_for_the_one_under_way(path: Path, monkeypatch: pytest.MonkeyPatch):
    """An answer is on the disk when sync returns, though another thread was the one to bring it there."""
    begun, go, synced = threading.Event(), threading.Event(), threading.Event()
    real = os.fsync

    def slow(descriptor: int) -> None:
        begun.set()
        assert go.wait(30)
        real(descriptor)
        synced.set()

    monkeypatch.setattr(journal_module.os, "fsync", slow)
    with Journal(path) as journal, ThreadPoolExecutor(1) as pool:
        journal.append(entry(1))
        assert begun.wait(30)
        done = pool.submit(lambda: (journal.sync(), synced.is_set())[1])
        threading.Timer(0.05, go.set).start()
        assert done.result(timeout=30)


def test_the_first_error_is_the_one_that_is_told(path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ZeroDivisionError), Journal(path) as journal:
        journal.append(entry(1))
        monkeypatch.setattr(journal_module.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "io")))
        raise ZeroDivisionError


def test_an_append_after_the_close_fails_and_reaches_no_other_file(path: Path, tmp_path: Path):
    journal = Journal(path)
    journal.append(entry(1))
    journal.close()
    journal.close()
    # The other file likely has the journal's old descriptor number.
    with (tmp_path / "other").open("wb"), pytest.raises(UserError):
        journal.append(entry(2))
    assert (tmp_path / "other").read_bytes() == b""
    assert list(iter_entries(path)) == [entry(1)]


@pytest.mark.parametrize("spoil", ["folder", "parent"])
def test_a_place_that_cannot_be_written_to_is_a_clear_line(path: Path, spoil: str):
    if spoil == "folder":
        path.mkdir(parents=True)
    else:
        path.parent.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be written"):
        Journal(path)
