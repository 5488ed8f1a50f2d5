"""Whole runs of the pipeline on two real SGLang servers on CPU, with real kills.

Needs the environment of build_env.py (`make test-sglang` builds it); without it everything here is skipped.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pipeline import (
    Command,
    Workspace,
    check_nothing_left,
    check_sent_once,
    prompts,
    read_dataset,
)

from . import build_env
from .pools import eventually
from .workspaces import real_workspace

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not build_env.is_built(), reason="SGLang's CPU environment is not built: make test-sglang"),
    pytest.mark.timeout(1200),
]
# Answers of a length that the model does not choose, so that there is always something in flight to be lost.
SLOW = {"max_tokens": 700, "extra": {"min_tokens": 250}}
KEPT = {"quality": {"actions": {"truncated": "accept", "unclosed_thought": "accept", "empty": "accept"}}}
PATIENCE = 600  # seconds: a start alone takes 30 s on two idle cores, and minutes on busy ones


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Workspace]]:
    made: list[Workspace] = []

    def new(sglang: dict[str, Any] | None = None, **settings: Any) -> Workspace:
        made.append(real_workspace(tmp_path / "work", sglang, **settings))
        return made[-1]

    yield new
    for workspace in made:
        workspace.kill_everything()


def scheduler(workspace: Workspace, server: str) -> psutil.Process:
    """The process of a server that does the work."""
    engine = psutil.Process(workspace.status(server)["pids"]["reaper"]["pid"])
    return next(child for child in engine.children(recursive=True) if "sglang::scheduler" in " ".join(child.cmdline()))


def engines(workspace: Workspace) -> list[int]:
    """Pids of all that is left of its servers."""
    found = []
    for process in workspace.processes():
        with contextlib.suppress(psutil.Error):
            if "sglang" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def finish(workspace: Workspace) -> None:
    result = workspace.start().wait(PATIENCE)
    assert result.code == 0, result.output


def await_answers(workspace: Workspace, count: int, command: Command) -> None:
    def enough() -> bool:
        assert command.process.poll() is None, f"ended too early:\n{command.output}"
        return workspace.journal_lines() >= count

    eventually(enough, f"{count} answers", PATIENCE)


def test_a_run_through_a_killed_and_a_hung_scheduler(make: Callable[..., Workspace]) -> None:
    """Server 0's scheduler is killed in mid-run, server 1's is stopped: both come back, and nothing is lost."""
    workspace = make(servers={"stall_after": 25, "max_restarts": 9}, sampling=SLOW, shards={"size": 25}, **KEPT)
    records = prompts(100)
    too_long = {"id": "too-long", "prompt": "hello there " * 6000}
    records.insert(17, too_long)
    workspace.write_prompts(records)
    command = workspace.start()
    await_answers(workspace, 16, command)
    scheduler(workspace, "0").kill()
    stopped = scheduler(workspace, "1")
    stopped.suspend()
    for server in ("0", "1"):
        eventually(lambda s=server: workspace.status(s).get("restarts"), f"restart of server {server}", PATIENCE)
    result = command.wait(PATIENCE)
    assert result.code == 0, result.output
    log = (workspace.path("logs", "servers") / "0.supervisor.log").read_text()
    assert "restart 1" in log
    assert "the engine hangs: no token for 25 s" in (workspace.path("logs", "servers") / "1.supervisor.log").read_text()
    assert not stopped.is_running()
    completions, rejects = read_dataset(workspace)
    assert {record["id"] for record in completions} | {record["id"] for record in rejects} == {r["id"] for r in records}
    assert len(completions) + len(rejects) == len(records)
    (reject,) = [record for record in rejects if record["id"] == "too-long"]
    assert reject["reason"] == "too_long"
    # One request for it: such an answer of the engine is final.
    assert [entry["verdict"] for entry in workspace.journal() if entry["id"] == "too-long"] == ["too_long"]
    check_sent_once(workspace)
    for record in completions:
        assert len(record["token_ids"]["completion"]) == record["usage"]["completion_tokens"]
    servers = workspace.json("dataset", "manifest.json")["engine"]["servers"]
    assert [server["facts"]["version"] for server in servers] == ["0.5.23"] * 2
    assert all(server["facts"]["effective_max_running_requests"] == 8 for server in servers)
    key = workspace.path("servers", "api_key").read_bytes()
    for path in workspace.results.rglob("*"):
        assert path.name == "api_key" or not path.is_file() or key not in path.read_bytes(), path
    check_nothing_left(workspace)


def test_sigterm_and_a_kv_cache_too_small_for_what_runs(make: Callable[..., Workspace]) -> None:
    """With room for three of eight requests SGLang takes some back. Told to stop, a run ends its shards in work."""
    workspace = make({"max_total_tokens": 1200}, sampling=SLOW, shards={"size": 5}, **KEPT)
    workspace.write_prompts(prompts(80))
    command = workspace.start()
    await_answers(workspace, 8, command)
    command.kill_main(signal.SIGTERM)
    result = command.wait(PATIENCE)
    assert result.code != 0 and "Traceback" not in result.output
    done = workspace.journal_lines()
    assert 8 <= done < 80
    eventually(lambda: not engines(workspace), "the end of all servers", PATIENCE)
    finish(workspace)
    ids = [record["id"] for record in prompts(80)]
    completions, rejects = read_dataset(workspace)
    assert sorted(record["id"] for record in completions + rejects) == ids
    check_sent_once(workspace)
    assert workspace.start().wait(PATIENCE).did_nothing
    logs = "".join(path.read_text() for path in workspace.path("logs", "servers").glob("*.engine.log"))
    assert "retract" in logs.lower(), "nothing was taken back, so this shows nothing"
    check_nothing_left(workspace)
