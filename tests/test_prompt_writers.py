"""Prompt shards written by several processes: the same files, whatever the input holds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shardmill.errors import UserError
from shardmill.prompts import split as module
from shardmill.prompts import writers
from shardmill.prompts.split import split
from tests.test_prompts import config_for, numbered, read_all, rejects_of, write_lines

pytestmark = pytest.mark.skipif(not writers.writers_wanted(), reason="needs Linux and two cores")


@pytest.fixture(params=["all in writers", "large shards streamed"])
def side_by_side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers from the first record on; in one variant shards with long records are streamed between them."""
    monkeypatch.setattr(module, "WORTH_BYTES", 0)
    monkeypatch.setattr(module, "writers_wanted", lambda: 2)
    if request.param == "large shards streamed":
        monkeypatch.setattr(module, "SHARD_BYTES", 400)


def mixed(folder: Path) -> Path:
    records: list[object] = [*numbered(40)]
    records[7] = b"no json"
    records[11] = records[3]  # in another shard
    records[13] = records[12]  # in the same one
    records[20] = {"id": "long", "prompt": "x" * 1000}
    records[30] = {"id": "empty"}
    return write_lines(folder / "prompts.jsonl", *records)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "results").rglob("*")) if path.is_file()}


@pytest.mark.usefixtures("side_by_side")
def test_the_same_files_come_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mixed(tmp_path)
    submitted: list[Path] = []
    submit = writers._submit
    monkeypatch.setattr(
        writers, "_submit", lambda pool, path, *rest: submitted.append(path) or submit(pool, path, *rest)
    )
    config = config_for(path, tmp_path / "many", duplicates="reject")
    index = split(config)
    assert len(submitted) >= 10

    monkeypatch.setattr(module, "writers_wanted", lambda: 0)
    alone = config_for(path, tmp_path / "one", duplicates="reject")
    assert split(alone) == index
    assert len(submitted) < 28
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    assert index["usable"] == 36 == len(read_all(config, index))
    assert [entry["reason"] for entry in rejects_of(config)] == [
        *["bad_json", "duplicate_id", "duplicate_id", "no_prompt"],
    ]


@pytest.mark.usefixtures("side_by_side")
def test_a_second_split_leaves_the_files_alone(tmp_path: Path) -> None:
    config = config_for(mixed(tmp_path), tmp_path, duplicates="reject")
    index = split(config)
    shards = [config.layout.prompt_shard(entry["name"]) for entry in index["shards"]]
    before = [path.stat().st_mtime_ns for path in shards]
    assert split(config) == index
    assert [path.stat().st_mtime_ns for path in shards] == before
    assert {path.name for path in shards[0].parent.iterdir()} == {path.name for path in shards}


@pytest.mark.usefixtures("side_by_side")
def test_duplicates_are_refused_by_their_lines(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lines 4 and 12 of .* have the same id"):
        split(config_for(mixed(tmp_path), tmp_path))


@pytest.mark.usefixtures("side_by_side")
def test_a_killed_writer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, owner = writers.read_record, os.getpid()

    def fatal(raw: bytes, line: int, settings: object) -> object:
        if line == 25 and os.getpid() != owner:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(raw, line, settings)

    monkeypatch.setattr(writers, "read_record", fatal)
    config = config_for(write_lines(tmp_path / "prompts.jsonl", *numbered(40)), tmp_path)
    with pytest.raises(UserError, match="was killed; is there memory left"):
        split(config)
    assert not config.layout.prompt_index.exists()


@pytest.mark.usefixtures("side_by_side")
def test_what_the_disk_refuses_crosses_the_processes(tmp_path: Path) -> None:
    config = config_for(write_lines(tmp_path / "prompts.jsonl", *numbered(12)), tmp_path)
    config.layout.prompt_shard("00002").mkdir(parents=True)
    with pytest.raises(UserError, match="00002"):
        split(config)
