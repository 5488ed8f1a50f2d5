"""Disks that fill up, refuse or fail while a real run writes to them. Small disks of one's own need root."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardmill import disk
from shardmill.files import write_json
from shardmill.journal import Journal
from shardmill.load_config import load_config
from tests.chaos.run import can_mount, small_disk
from tests.pipeline import Workspace, check_complete, check_nothing_left, check_sent_once, prompts

COUNT = 64
IDS = [record["id"] for record in prompts(COUNT)]


@pytest.fixture
def small(tmp_path: Path, workspace: Callable[..., Workspace], models: Callable[..., Path]) -> Iterator[Workspace]:
    """A run of some seconds whose folder is a disk of 16 MB."""
    if not can_mount(tmp_path / "probe"):
        pytest.skip("may not mount a small disk here")
    with small_disk(tmp_path / "small", "16m"):
        made = workspace(
            "small",
            model=models(answer_clauses=16),
            shards={"size": 16},
            engine={"llamacpp": {"context_length": 2048}},
            sampling={"max_tokens": 1500},
        )
        made.write_prompts(prompts(COUNT))
        yield made
        made.kill_everything()


def fill(workspace: Workspace, leave: int = 0) -> Path:
    """Take all room of its disk but `leave` bytes."""
    filler = workspace.folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as handle:
        while True:
            handle.write(bytes(4096))
    if leave:
        os.truncate(filler, max(0, filler.stat().st_size - leave))
    return filler


def kept(workspace: Workspace) -> dict[str, str]:
    return {e["id"]: e["answer"]["content"] for e in workspace.journal() if e.get("verdict") == "ok"}


def check_resumed(workspace: Workspace, before: dict[str, str]) -> None:
    made = {record["id"]: record["messages"][-1]["content"] for record in check_complete(workspace, IDS)}
    assert {name: made[name] for name in before} == before
    check_sent_once(workspace)
    check_nothing_left(workspace)


def test_a_disk_that_fills_up_in_mid_shard(small: Workspace) -> None:
    """The run ends in plain words, nothing finished is lost, and it goes on once there is room."""
    small.configure(run={"min_free_disk": 0})
    command = small.start()
    small.await_journal(12, command)
    filler = fill(small)
    result = command.wait()
    assert result.code != 0
    assert "No space left on device" in result.output and "Traceback" not in result.output, result.output
    before = kept(small)
    assert len(before) >= 12
    filler.unlink()
    small.finish()
    check_resumed(small, before)


def test_a_disk_that_gets_short_stops_the_run_before_it_is_full(small: Workspace) -> None:
    """What is in flight is finished and kept; no crash, no half line, no error of the disk."""
    small.configure(run={"min_free_disk": 0.004})
    command = small.start()
    small.await_journal(12, command)
    filler = fill(small, leave=3_000_000)
    result = command.wait()
    assert result.code != 0
    assert "of the disk are free, and 4.0 MB are to stay so (run.min_free_disk)" in result.output
    assert "No space left" not in result.output and "Traceback" not in result.output, result.output
    before, entries = kept(small), small.journal()
    assert len(before) >= 12 and all(entry["kind"] == "answer" for entry in entries)
    assert all(path.read_bytes().endswith(b"\n") for path in small.results.glob("journals/*.jsonl"))
    # Nor does it start while it is as it is.
    assert "run.min_free_disk" in small.run().error()
    filler.unlink()
    small.finish()
    check_resumed(small, before)


def test_a_full_disk_from_the_start(small: Workspace) -> None:
    small.configure(run={"min_free_disk": 0})
    filler = fill(small)
    result = small.run()
    assert result.code != 0 and "shardmill: not finished" not in result.output.split("Traceback")[-1]
    filler.unlink()
    small.finish()
    check_resumed(small, {})


def test_a_disk_that_turned_read_only(small: Workspace) -> None:
    """As the kernel makes it after an error: no server is started, nothing is lost, and it goes on once it can."""
    small.configure(run={"min_free_disk": 0})
    command = small.start()
    small.await_journal(12, command)
    small.kill_everything()
    before = kept(small)
    subprocess.run(["mount", "-o", "remount,ro", str(small.folder)], check=True)
    result = small.run()
    subprocess.run(["mount", "-o", "remount,rw", str(small.folder)], check=True)
    assert result.code != 0 and "Read-only file system" in result.output, result.output
    assert "Traceback" not in result.output, result.output
    assert kept(small) == before
    small.finish()
    check_resumed(small, before)


# Errors that no test can ask of a real disk, at the one place where answers are written


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.EROFS, errno.ENOSPC])
def test_a_journal_whose_disk_fails(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or not at all; what was there stays; the error says which and what to do."""
    path = tmp_path / "00000.jsonl"
    entry = {"id": "a", "fingerprint": "f", "kind": "answer", "text": "x" * 200}
    with Journal(path) as journal:
        journal.append(entry)
        before, write, calls = path.read_bytes(), os.write, []

        def fail(descriptor: int, data: bytes) -> int:
            calls.append(len(data))
            if len(calls) == 1:
                return write(descriptor, data[:50])  # a torn line first
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("shardmill.journal.os.write", fail)
        with pytest.raises(Exception, match=os.strerror(number)) as caught:
            journal.append(entry | {"id": "b"})
        assert "run the same command again" in str(caught.value)
        monkeypatch.undo()
        assert path.read_bytes() == before
    with Journal(path) as again:
        assert len(again) == 1 and again.damaged_lines == 0


# The estimate


def config_at(folder: Path, **run: object) -> object:
    settings = {
        "run": {"name": "t", "results": str(folder), **run},
        "prompts": {"path": "p.jsonl"},
        "model": {"source": "m.gguf"},
        "sampling": {"max_tokens": 1000},
    }
    return load_config(settings)


def test_room_is_judged_by_the_runs_own_answers(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    layout = config.layout
    upper, free = disk.room_needed(config, 100)
    assert upper == 100 * 1000 * disk.BYTES_PER_TOKEN * disk.COPIES and free > 0
    layout.journal("00000").parent.mkdir(parents=True)
    layout.journal("00000").write_bytes(b"x" * 5000)
    write_json(layout.stats("00000"), {"prompts": 10})
    assert disk.room_needed(config, 100)[0] == 100 * 500 * disk.COPIES
    assert disk.warning(config, 100) is None
    assert "the answers will take about" in (disk.warning(config, 10**15) or "")


@pytest.mark.parametrize(
    ("free", "total", "own", "stops"),
    [
        (2e9, 1e12, None, False),
        (0.9e9, 1e12, None, True),  # 1 GB of a large disk
        (0.2e9, 10e9, None, False),  # 1 % of a small one
        (0.05e9, 10e9, None, True),
        (2e9, 1e12, 3.0, True),
        (0, 1e12, 0.0, False),
    ],
)
def test_when_a_run_stops_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, total: float, own: float | None, stops: bool
) -> None:
    fields = [0] * 11
    fields[0] = fields[1] = 1
    fields[2], fields[4] = int(total), int(free)
    monkeypatch.setattr(disk.os, "statvfs", lambda path: os.statvfs_result(fields))
    problem = disk.no_room(config_at(tmp_path, min_free_disk=own))
    assert (problem is not None) == stops
    if problem:
        assert "make room" in problem.hint and "\n" not in str(problem)
