"""The mirror in object storage: against a real S3 server process, with what such servers do on bad days."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardmill.bucket import Bucket
from shardmill.errors import UserError
from tests.object_storage import Storage, object_storage
from tests.pipeline import Workspace, check_complete, check_nothing_left, check_sent_once, eventually, prompts

MIRROR = {"mirror": "s3://bucket/runs", "mirror_interval": 0.2}


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    with object_storage(tmp_path) as opened:
        for name, value in opened.environment.items():
            monkeypatch.setenv(name, value)
        yield opened


def mirrored(run: Workspace) -> dict[str, int]:
    return Bucket("s3://bucket/runs/t").list()


def test_a_lost_machine(storage: Storage, workspace: Callable[..., Workspace], models: Callable[..., Path]) -> None:
    """Killed in the middle, its disk gone: another machine brings back what was mirrored and makes only the rest."""
    settings = {"shards": {"size": 12}, "output": MIRROR, "sampling": {"max_tokens": 900}}
    run = workspace("work", model=models(answer_clauses=16), **settings)
    run.write_prompts(prompts(48))
    storage.faults += ["503", "500", "cut", "503"]
    command = run.start()
    run.await_journal(30, command)
    eventually(lambda: sum(".jsonl/" in name for name in mirrored(run)) >= 4, "the journals are mirrored")
    run.kill_everything()
    answers = {entry["id"] for entry in run.journal() if entry["kind"] == "answer"}
    shutil.rmtree(run.results)
    shutil.rmtree(run.folder / ".snakemake")

    storage.faults += ["503", "half", "cut", "half", "500"]
    result = run.finish()
    assert "files brought back from s3://bucket/runs" in result.output
    ids = [record["id"] for record in prompts(48)]
    check_complete(run, ids)
    check_sent_once(run)
    kept = {entry["id"] for entry in run.journal() if entry["kind"] == "answer"}
    assert kept == answers | set(ids)
    sent = sum(run.json("stats", path.name)["requests_sent"] for path in run.results.glob("stats/*.json"))
    assert sent < 48, "nothing was brought back"
    check_nothing_left(run)

    # The end of the run waits for its mirror: everything is there, and a third machine has nothing to make.
    whole = {path.relative_to(run.results).as_posix() for path in run.results.glob("dataset/*.*")}
    assert whole <= set(mirrored(run)) and "run.json" in mirrored(run)
    before = run.path("dataset", "completions.jsonl.zst").read_bytes()
    shutil.rmtree(run.results)
    result = run.finish()
    assert result.did_nothing, result.output
    assert run.path("dataset", "completions.jsonl.zst").read_bytes() == before
    check_complete(run, ids)


def test_a_storage_that_is_away(storage: Storage, workspace: Callable[..., Workspace]) -> None:
    """A run begins only where the storage answers, since it may hold the run; later troubles do not touch it."""
    run = workspace("work", output=MIRROR)
    run.write_prompts(prompts(8))
    run.environment["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
    assert "object storage: Could not connect" in run.run().error()
    run.environment.clear()
    command = run.start()
    eventually(lambda: "run.json" in mirrored(run), "the mirror has begun")
    storage.is_away = True
    result = command.wait()
    assert result.code == 0 and "warning: the mirror is not complete" in result.output
    storage.is_away = False
    check_complete(run, [record["id"] for record in prompts(8)])
    run.path("completions", "00000.jsonl.zst").unlink()
    assert "the mirror" not in run.finish().output
    assert "dataset/manifest.json" in mirrored(run)


def test_large_files_go_on_where_they_broke_off(storage: Storage, tmp_path: Path) -> None:
    size = 5 << 20
    file = tmp_path / "large.bin"
    file.write_bytes(os.urandom(3 * size + 1234))
    bucket = Bucket("s3://bucket/x", part_bytes=size)
    bucket.put_bytes("before", b"")  # the connection stands
    original = bucket._client.upload_part

    def two_parts(**arguments: object) -> object:
        if arguments["PartNumber"] == 3:
            raise UserError("the machine is gone")
        return original(**arguments)

    bucket._client.upload_part = two_parts
    with pytest.raises(UserError, match="gone"):
        bucket.put_file("large.bin", file)
    assert "large.bin" not in bucket.list()

    again = Bucket("s3://bucket/x", part_bytes=size)
    again.uploads = bucket.uploads
    storage.requests.clear()
    again.put_file("large.bin", file)
    parts = [path for method, path in storage.requests if method == "PUT" and "partNumber" in path]
    assert len(parts) == 2 and not again.uploads
    again.get_file("large.bin", tmp_path / "back.bin")
    assert (tmp_path / "back.bin").read_bytes() == file.read_bytes()
    assert (tmp_path / "back.bin").stat().st_mtime_ns == file.stat().st_mtime_ns

    # An upload that nobody remembers is not left to be paid for.
    bucket.uploads.clear()
    with pytest.raises(UserError, match="gone"):
        bucket.put_file("large.bin", file)
    Bucket("s3://bucket/x", part_bytes=size).put_file("large.bin", file)
    assert not again._client.list_multipart_uploads(Bucket="bucket").get("Uploads")


def test_damage_is_noticed(storage: Storage, tmp_path: Path) -> None:
    bucket = Bucket("s3://bucket/x")
    bucket.put_bytes("note", b"content")
    bucket._client.put_object(Bucket="bucket", Key="x/note", Body=b"Content", Metadata={"sha256": "0" * 64})
    with pytest.raises(UserError, match="not what was put there"):
        bucket.get_bytes("note")
    with pytest.raises(UserError, match="not what was put there"):
        bucket.get_file("note", tmp_path / "note")
    assert not (tmp_path / "note").exists()


def test_a_url_that_is_none(workspace: Callable[..., Workspace]) -> None:
    run = workspace("work", output={"mirror": "bucket/prefix"})
    run.write_prompts(prompts(2))
    assert "output.mirror" in run.run("--dry-run").error()
