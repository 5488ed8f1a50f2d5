"""Faults seen in the field, each as a whole run in small. docs/reliability.md names the tests of the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.door import open_door
from tests.pipeline import (
    Workspace,
    check_complete,
    check_nothing_left,
    check_sent_once,
    eventually,
    prompts,
    read_dataset,
)
from tests.sglang.workspaces import standin_workspace

FAST = ("--standin-time-scale", "0.2", "--standin-lengths", "200,0.5,1500")


@pytest.fixture
def standins(tmp_path: Path) -> Iterator[Callable[..., Workspace]]:
    """Makes folders whose two servers are stand-ins with these faults."""
    made: list[Workspace] = []

    def new(faults: dict[str, Any], count: int, **settings: Any) -> Workspace:
        defaults: dict[str, Any] = {
            "shards": {"size": count},
            "sampling": {"max_tokens": 2048},
            "quality": {"canary": {"skip": True}},
        }
        options = (*FAST, "--standin-faults", json.dumps(faults))
        made.append(standin_workspace(tmp_path / "work", *options, **(defaults | settings)))
        (tmp_path / "standin-model" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        made[-1].write_prompts(prompts(count))
        return made[-1]

    yield new
    for one in made:
        one.kill_everything()


def test_a_late_answer_and_a_kill_lose_no_row(workspace: Callable[..., Workspace], _engine: str) -> None:
    """Answers come out of order: #3 is 5 s late, everything is killed after 8, and a resume has each id once."""
    records = prompts(20)
    with open_door(_engine) as door:
        door.delays[records[3]["prompt"]] = 5.0
        external = {"urls": [door.url], "flavor": "llamacpp"}
        work = workspace(
            engine={"kind": "external", "external": external},
            shards={"size": 20},
            dispatch={"queue": 0},
            quality={"canary": {"skip": True}},
        )
        work.write_prompts(records)
        command = work.start()
        work.await_journal(8, command)
        work.kill_everything()
        done = {entry["id"] for entry in work.journal()}
        assert len(done) >= 8 and "p0003" not in done
        killed_at = time.time()
        door.delays.clear()
        work.finish()
        check_complete(work, [record["id"] for record in records])
        check_sent_once(work)
        texts = {record["prompt"]: record["id"] for record in records}
        again = {texts.get(json.loads(one.key[0])[-1][1]) for one in door.asked if one.at > killed_at}
        assert not again & done, "finished ones were asked again"


def test_a_server_that_goes_silent_after_some_answers_is_started_again(standins: Callable[..., Workspace]) -> None:
    """Each engine answers 12 requests, the readiness probes among them, and then nothing at all, with health 200."""
    work = standins({"silent": {"after": 12}}, 24, servers={"stall_after": 3, "max_restarts": 20})
    work.finish()
    check_all(work, 24)
    restarts = [
        path.read_text().count("the engine hangs") for path in work.results.glob("logs/servers/*supervisor.log")
    ]
    assert sum(restarts) >= 1


def test_failing_health_alone_restarts_nobody(standins: Callable[..., Workspace]) -> None:
    work = standins({"unhealthy": True}, 24, servers={"stall_after": 3})
    work.finish()
    check_all(work, 24)
    assert {work.json("servers", f"{name}.info.json")["instance"] for name in "01"} == {1}


def test_bursts_never_pass_the_ceiling(standins: Callable[..., Workspace], tmp_path: Path) -> None:
    """Servers that would fail above what they hold are never sent more than that and a short queue."""
    work = standins({}, 60, shards={"size": 10})
    work.finish()
    check_all(work, 60)
    limit = 8 + 2  # max_running_requests of tests/sglang/workspaces.py, and the least queue
    spans = {"0": [], "1": []}
    for entry in work.journal():
        spans[entry["server"]].append((entry["at"] - entry["seconds"], entry["at"]))
    for times in spans.values():
        moments = sorted([(start, 1) for start, _ in times] + [(end, -1) for _, end in times])
        held = most = 0
        for _, step in moments:
            held += step
            most = max(most, held)
        assert most <= limit + 1  # the clock of the journal is in thousandths


def check_all(work: Workspace, count: int) -> None:
    completions, rejects = read_dataset(work)
    assert rejects == [] and [c["id"] for c in completions] == [f"p{n:04}" for n in range(count)]
    check_sent_once(work)
    check_nothing_left(work)


# Servers that do not start, where that is allowed


def occupied(port: int) -> contextlib.AbstractContextManager[socket.socket]:
    rival = socket.socket()
    rival.bind(("127.0.0.1", port))
    rival.listen()
    return contextlib.closing(rival)


def failed_marks(work: Workspace) -> list[Path]:
    return [path for path in work.results.glob("servers/*.ready") if "failed" in json.loads(path.read_text())]


def test_one_of_three_servers_may_fail(workspace: Callable[..., Workspace]) -> None:
    """No row goes to it, no row is rejected for it, one line says so, and the next start tries it again."""
    work = workspace(servers={"count": 3, "may_fail": 1}, shards={"size": 10}, quality={"canary": {"skip": True}})
    work.write_prompts(prompts(30))
    with occupied(work.ports[1]):
        result = work.finish()
        said = f"server 1 did not start; going on with the others (servers.may_fail): server 1: port {work.ports[1]} "
        assert result.output.count(said) == 1 and f"in use by pid {os.getpid()}" in result.output
        assert work.status("1")["state"] == "failed"
    check_complete(work, [record["id"] for record in prompts(30)])
    assert Counter(entry["kind"] for entry in work.journal()) == {"answer": 30}
    assert {entry["server"] for entry in work.journal()} <= {"0", "2"}
    assert failed_marks(work) == []
    servers = work.json("dataset", "manifest.json")["engine"]["servers"]
    assert [server["server"] for server in servers] == ["0", "2"]


def test_the_mark_of_a_killed_run_is_cleared_and_the_server_tried_again(workspace: Callable[..., Workspace]) -> None:
    work = workspace(servers={"may_fail": 1}, shards={"size": 10}, quality={"canary": {"skip": True}})
    work.write_prompts(prompts(30))
    with occupied(work.ports[1]):
        command = work.start()
        work.await_journal(3, command)
        assert len(failed_marks(work)) == 1
        work.kill_everything()
    result = work.finish()
    assert "server 1: cleared a stale readiness file: the server did not start last time" in result.output
    assert work.json("servers", "1.info.json")["server"] == "1"
    check_complete(work, [record["id"] for record in prompts(30)])
    check_nothing_left(work)


@pytest.mark.parametrize("allowed", [0, 1, 5])
def test_more_failures_than_allowed_stop_the_run(workspace: Callable[..., Workspace], allowed: int) -> None:
    """And the last server may never fail, whatever is allowed."""
    work = workspace(servers={"may_fail": allowed}, quality={"canary": {"skip": True}})
    work.write_prompts(prompts(6))
    with occupied(work.ports[0]), occupied(work.ports[1]):
        result = work.run()
    assert result.code != 0 and "Traceback" not in result.output
    assert f"port {work.ports[0]} is in use" in result.output or f"port {work.ports[1]} is in use" in result.output
    assert ("servers.may_fail is" in result.output) == (allowed > 0)
    assert work.journal() == []
    eventually(lambda: not work.processes(), "nothing is left")


def test_a_port_taken_between_check_and_bind(workspace: Callable[..., Workspace]) -> None:
    """A restart finds its port in the hands of a stranger, who answers: he is named, and no request goes to him."""
    work = workspace(servers={"count": 1, "max_restarts": 2}, quality={"canary": {"skip": True}})
    work.write_prompts(prompts(40))
    work.configure(sampling={"max_tokens": 512}, shards={"size": 40}, dispatch={"no_server_timeout": 10})
    command = work.start()
    work.await_journal(3, command)
    engine = work.status("0")["pids"]["engine"]["pid"]
    rival = socket.socket()
    rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    os.kill(engine, signal.SIGKILL)

    def take() -> bool:
        with contextlib.suppress(OSError):
            rival.bind(("127.0.0.1", work.ports[0]))
            rival.listen()
            return True
        return False

    eventually(take, "the port")
    with contextlib.closing(rival):
        result = command.wait()
        assert result.code != 0 and "Traceback" not in result.output
        assert f"port {work.ports[0]} is in use by pid {os.getpid()}" in result.output, result.output
    work.finish()
    check_complete(work, [record["id"] for record in prompts(40)])
    check_sent_once(work)
    check_nothing_left(work)


# Files of a finished shard that are not what they were, with nothing else that would have Snakemake look at it


@pytest.mark.parametrize("name", ["stats/00001.json", "rejected/00001.jsonl.zst", "completions/00001.jsonl.zst"])
@pytest.mark.parametrize("harm", ["remove", "truncate", "flip"])
def test_a_harmed_file_of_a_shard_is_written_again(finished: Workspace, name: str, harm: str) -> None:
    finished.configure(quality={"canary": {"skip": True}})
    path, before = finished.path(name), finished.journal()
    content = bytearray(path.read_bytes())
    for part in finished.path("dataset").iterdir():
        part.unlink()
    if harm == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 4
        path.write_bytes(content[: len(content) // 2] if harm == "truncate" else content)
    result = finished.run()
    if result.code:  # a flipped bit of a shard's file shows when it is merged
        assert "run the same command again" in result.error()
        finished.finish()
    check_complete(finished, [record["id"] for record in prompts(20)])
    assert finished.journal() == before, "nothing was asked again"
    check_nothing_left(finished)
