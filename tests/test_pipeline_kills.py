"""Kills, signals and rivals: real Snakemake, real llama.cpp servers, and nothing finished is lost or made twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pipeline import (
    Command,
    Workspace,
    check_complete,
    check_nothing_left,
    check_sent_once,
    eventually,
    free_ports,
    frozen_engines,
    prompts,
)

COUNT = 96
IDS = [record["id"] for record in prompts(COUNT)]


@pytest.fixture
def busy(workspace: Callable[..., Workspace], models: Callable[..., Path]) -> Workspace:
    """A run that takes some seconds: 96 answers of about 150 tokens, in 6 shards."""
    made = workspace(
        "busy",
        model=models(answer_clauses=16),
        shards={"size": 16},
        engine={"llamacpp": {"context_length": 2048}},
        sampling={"max_tokens": 1500},
    )
    made.write_prompts(prompts(COUNT))
    return made


def good_answers(workspace: Workspace) -> dict[str, str]:
    """What the journals hold of accepted answers, by prompt."""
    return {e["id"]: e["answer"]["content"] for e in workspace.journal() if e.get("verdict") == "ok"}


def check_result(workspace: Workspace, *, kept: dict[str, str]) -> None:
    """A whole result, in which every answer of before is the one that was kept."""
    made = {record["id"]: record["messages"][-1]["content"] for record in check_complete(workspace, IDS)}
    assert {name: made[name] for name in kept} == kept
    check_sent_once(workspace)
    check_nothing_left(workspace)


def job_processes(workspace: Workspace) -> list[psutil.Process]:
    """Scripts of rules that still run."""
    found = []
    for process in workspace.processes():
        with contextlib.suppress(psutil.Error):  # it may end under our eyes
            if ".snakemake/scripts" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_everything_killed_again_and_again(busy: Workspace, tmp_path: Path) -> None:
    busy.configure(model={"ram_disk": str(tmp_path / "ram")})
    rng = random.Random(20261130)
    kept: dict[str, str] = {}
    for moment in (rng.randrange(1, 30), rng.randrange(35, 60), rng.randrange(65, 90)):
        command = busy.start()
        busy.await_journal(moment, command)
        assert busy.kill_everything() > 4
        assert good_answers(busy).items() >= kept.items()
        kept = good_answers(busy)
        tear(busy)
    busy.finish()
    check_result(busy, kept=kept)
    assert busy.run().did_nothing
    assert busy.finish("clean_ram").code == 0
    assert not any(path.is_file() for path in (tmp_path / "ram").rglob("*"))


def tear(workspace: Workspace) -> None:
    """What a power loss does to a journal: the last line is there in part."""
    path = max(workspace.results.glob("journals/*.jsonl"), key=lambda path: path.stat().st_size)
    line = path.read_bytes().split(b"\n")[0]
    with path.open("ab") as handle:
        handle.write(line[: len(line) // 2])


def test_only_snakemake_killed(busy: Workspace) -> None:
    busy.configure(servers={"linger": 120})
    command = busy.start()
    busy.await_journal(20, command)
    command.kill_main()
    eventually(lambda: not job_processes(busy), "jobs end when their run is dead")
    kept = good_answers(busy)
    engines = {server: busy.status(server)["pids"]["engine"] for server in "01"}
    result = busy.finish()
    assert "serve" not in result.jobs, "the servers were warm"
    assert {server: busy.json("servers", f"{server}.info.json")["instance"] for server in "01"} == {"0": 1, "1": 1}
    assert all(engines.values())
    check_result(busy, kept=kept)


def test_servers_do_not_outlive_a_dead_run(busy: Workspace) -> None:
    command = busy.start()
    busy.await_journal(5, command)
    command.kill_main()
    command.wait()

    def all_gone() -> bool:
        return not busy.processes() and not list(busy.results.glob("servers/*.ready"))

    eventually(all_gone, "servers end `linger` seconds after their run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term-group"])
def test_stopped_by_a_signal(busy: Workspace, number: int) -> None:
    busy.configure(shards={"size": 48})
    command = busy.start()
    busy.await_journal(20, command)
    with frozen_engines(busy):
        # Past their imports, where Python itself would answer a Ctrl-C.
        eventually(lambda: len(list(busy.path("progress").glob("*.json"))) == 2, "both shards are being answered")
        command.signal_group(number)
        result = command.wait(60)
    assert result.code != 0
    assert "Traceback" not in result.output, result.output
    assert "everything finished so far is kept" in result.output, result.output
    assert "same command" in result.output.split("not finished")[1], result.output
    check_nothing_left(busy)
    kept = good_answers(busy)
    assert 0 < len(kept) < COUNT
    busy.finish()
    check_result(busy, kept=kept)


def test_sigterm_to_snakemake_alone(busy: Workspace) -> None:
    """As `kill` and a batch system's deadline send it: what runs is finished, nothing new begins."""
    command = busy.start("--cores", "1")
    busy.await_journal(20, command)
    command.kill_main(signal.SIGTERM)
    result = command.wait()
    assert result.code != 0
    assert "Traceback" not in result.output, result.output
    check_nothing_left(busy)
    kept = good_answers(busy)
    assert len(kept) < COUNT and not busy.path("dataset").exists()
    busy.finish()
    check_result(busy, kept=kept)


def test_a_second_run_is_refused_and_does_no_harm(busy: Workspace) -> None:
    first = busy.start()
    busy.await_journal(12, first)
    with frozen_engines(busy):
        line = busy.run().error()
        assert f"pid {first.pid} on host {socket.gethostname()}" in line
        # Nor does a plan under other settings do harm, or an attempt to free the RAM disk.
        busy.finish("-n", "--config", f'servers={{"port": {free_ports(2)}}}')
        assert str(first.pid) in busy.run("clean_ram").error()
        assert first.process.poll() is None
    assert first.wait().code == 0, first.output
    assert [entry for entry in busy.journal() if entry["kind"] != "answer"] == []
    check_result(busy, kept={})


def kill_part(workspace: Workspace, command: Command, part: str) -> None:
    """Kill one process of server 0 while it has requests."""
    workspace.await_journal(12, command)
    pid = workspace.status("0")["pids"][part]["pid"]
    assert pid in [process.pid for process in workspace.processes()]
    os.kill(pid, signal.SIGKILL)


def test_an_engine_killed_in_mid_run(busy: Workspace) -> None:
    command = busy.start()
    kill_part(busy, command, "engine")
    kept = good_answers(busy)
    assert command.wait().code == 0, command.output
    check_result(busy, kept=kept)
    assert "killed by SIGKILL" in busy.path("logs", "servers", "0.supervisor.log").read_text()


def test_a_supervisor_killed_in_mid_run(busy: Workspace) -> None:
    command = busy.start()
    kill_part(busy, command, "supervisor")
    kept = good_answers(busy)
    assert command.wait().code == 0, command.output
    check_result(busy, kept=kept)


def test_a_readiness_file_without_a_server_is_not_believed(finished: Workspace) -> None:
    ready = finished.path("servers", "0.ready")
    lease: dict[str, Any] = finished.json("servers", "0.info.json")
    ready.write_text(finished.path("servers", "0.info.json").read_text())
    assert lease["supervisor"]["pid"]
    finished.path("completions", "00001.jsonl.zst").unlink()
    result = finished.finish()
    assert "shardmill: server 0: cleared a stale readiness file: its supervisor" in result.output
    assert not ready.exists()


def test_the_disk_is_full_in_mid_run(busy: Workspace, small_disk: Path) -> None:
    (busy.folder / "results").symlink_to(small_disk)
    command = busy.start()
    busy.await_journal(12, command)
    balloon = small_disk / "balloon"
    with frozen_engines(busy), balloon.open("wb", buffering=0) as handle, contextlib.suppress(OSError):
        while handle.write(bytes(1 << 12)):
            pass
    before = good_answers(busy)
    result = command.wait()
    assert result.code != 0
    assert "Traceback" not in result.output, result.output
    assert "No space left on device" in result.output and "make room" in result.output, result.output
    assert good_answers(busy).items() >= before.items()
    kept = good_answers(busy)
    balloon.unlink()
    busy.finish()
    check_result(busy, kept=kept)
