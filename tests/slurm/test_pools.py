"""Pools on a real Slurm of three emulated nodes, with the real engine, and what goes wrong on clusters."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pipeline import (
    MARK,
    REPO,
    SNAKEMAKE,
    Command,
    Result,
    Workspace,
    check_complete,
    check_sent_once,
    eventually,
    prompts,
)
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

PATIENCE = 400.0  # seconds for a run of several pools on a small machine; a deadline, not an expectation
NewWorkspace = Callable[..., Workspace]


def start(workspace: Workspace, *arguments: str, **resources: Any) -> Command:
    """Start a run with the profile as it is shipped, the cluster's own names and small resources laid over it."""
    shards_at_once = resources.pop("shards_at_once", 2)
    asked = {"slurm_partition": "main", "gres": "gpu:1", "cpus_per_task": 2, "mem_mb": 500, "runtime": 30} | resources
    command = [
        *(SNAKEMAKE, "--snakefile", str(REPO / "Snakefile"), "--profile", str(REPO / "profiles" / "slurm")),
        *("--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "2", "--slurm-no-account"),
        *("--set-resources", *(f"pool:{name}={value}" for name, value in asked.items())),
        *("--set-threads", f"pool={shards_at_once}", "--jobs", "4"),
    ]
    environment = os.environ | {MARK: str(workspace.folder), "TMPDIR": str(workspace.tmp)} | workspace.environment
    return Command([*command, *arguments], workspace.folder, environment)


def finish(workspace: Workspace, *arguments: str, **resources: Any) -> Result:
    result = start(workspace, *arguments, **resources).wait(PATIENCE)
    assert result.code == 0, result.output
    return result


def check(workspace: Workspace, ids: list[str]) -> None:
    """A whole result, every answer asked for once, and each pool's job has written its own shards alone."""
    check_complete(workspace, ids)
    check_sent_once(workspace)
    proven: list[str] = []
    for proof in sorted(workspace.results.glob("pools/*.json")):
        first, last = map(int, proof.stem.split("-"))
        shards = list(workspace.json("pools", proof.name)["shards"])
        assert all(first <= int(shard) <= last for shard in shards)
        written = [path.stem for path in workspace.results.glob(f"pools/{proof.stem}/logs/completions/*.log")]
        assert set(written) <= set(shards)
        proven += shards
    # Nothing but pools goes to the cluster.
    assert {path.name for path in workspace.folder.glob(".snakemake/slurm_logs/*")} <= {"rule_pool"}
    assert proven == sorted(path.name[:5] for path in workspace.results.glob("completions/*.jsonl.zst"))
    assert not list(workspace.results.rglob("*.ready")) and not list(workspace.results.rglob("*.tmp"))
    eventually(lambda: not workspace.processes(), "no process of the run is left")


@contextlib.contextmanager
def frozen_engines(workspace: Workspace) -> Iterator[None]:
    """No engine that runs now answers anything while the block runs, so that its job is caught in the middle."""
    engines = [process for process in workspace.processes() if "shardmill.engines" in " ".join(process.cmdline())]
    assert engines
    for engine in engines:
        engine.suspend()
    try:
        yield
    finally:
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()


def restarts(record: str) -> int:
    """How often Slurm has queued a job again, from `scontrol show job`."""
    return int(re.findall(r"Restarts=(\d+)", record)[0])


def test_three_nodes_at_once(cluster: Cluster, on_slurm: NewWorkspace) -> None:
    run = on_slurm(shards={"size": 4}, pools={"shards": 2}, model={"ram_disk": "/dev/shm/model"}, clauses=8)
    run.configure(quality={"canary": {"skip": False, "prompts": 4}})
    run.write_prompts(prompts(32))
    command = start(run)
    nodes: set[str] = set()

    def all_used() -> bool:
        assert command.process.poll() is None, command.output
        nodes.update(cluster.running().values())
        return len(nodes) == 3

    eventually(all_used, "pools on all three nodes", PATIENCE)
    result = command.wait(PATIENCE)
    assert result.code == 0, result.output
    ids = [record["id"] for record in prompts(32)]
    check(run, ids)
    # Each node staged the model on its own RAM disk; none of that is to be seen from here.
    assert not Path("/dev/shm/model").exists()
    hosts = {run.json("pools", path.name)["host"] for path in run.results.glob("pools/*.json")}
    assert hosts == {"n1", "n2", "n3"}
    assert len(run.json("dataset", "manifest.json")["engine"]["servers"]) == 4
    assert finish(run).did_nothing
    assert finish(run, "--config", 'pools={"shards": 3}', "--dry-run").jobs == {"pool": 3, "merge": 1}

    # One shard lost, another cut short: their pools, and no other, are submitted again, and ask for nothing.
    asked = run.journal_lines()
    run.path("completions", "00003.jsonl.zst").unlink()
    cut = run.path("completions", "00006.jsonl.zst")
    os.truncate(cut, cut.stat().st_size - 1)
    result = finish(run)
    assert re.search(r"pool 00002-00003 has work again: .*00003.* \(and 1 more pools\)", result.output)
    assert result.jobs == {"pool": 2, "merge": 1}
    check(run, ids)
    assert run.journal_lines() == asked


def test_jobs_cancelled_and_a_node_lost(cluster: Cluster, on_slurm: NewWorkspace) -> None:
    """A cancelled job, a power cut and a drained node, in one run: everything is made all the same, by this run."""
    run = on_slurm(shards={"size": 6}, pools={"shards": 2}, clauses=128)
    run.write_prompts(prompts(36))
    command = start(run)
    run.await_journal(3, command)
    running = cluster.await_running(3)
    job_of = {node: job for job, node in running.items()}
    cancelled, lost, drained = job_of["n1"], "n2", "n3"
    with frozen_engines(run):
        cluster.ask("scontrol", "update", f"nodename={drained}", "state=drain", "reason=test")
        cluster.ask("scancel", cancelled)
        cluster.power_off(lost)
    answers = {(entry["id"], entry["attempt"]) for entry in run.journal() if entry["kind"] == "answer"}
    try:
        result = command.wait(PATIENCE)
    finally:
        cluster.power_on(lost)
        cluster.ask("scontrol", "update", f"nodename={drained}", "state=resume")
    assert result.code == 0, result.output
    assert "JobState=CANCELLED" in cluster.ask("scontrol", "show", "job", cancelled)
    assert "Trying to restart job" in result.output
    # The pool of the lost node went on elsewhere, as the same job.
    assert "JobState=COMPLETED" in (record := cluster.ask("scontrol", "show", "job", job_of[lost]))
    assert restarts(record) >= 1 and f"NodeList={lost}" not in record
    assert "JobState=COMPLETED" in cluster.ask("scontrol", "show", "job", job_of[drained])
    check(run, [record["id"] for record in prompts(36)])
    assert answers <= {(entry["id"], entry["attempt"]) for entry in run.journal() if entry["kind"] == "answer"}


def test_time_is_up(cluster: Cluster, on_slurm: NewWorkspace) -> None:
    """A job whose time ends hands the rest back before it does, its answers kept, and uses up no retry."""
    run = on_slurm(shards={"size": 6}, pools={"shards": 4, "wind_down": 80, "margin": 10}, clauses=16)
    run.write_prompts(prompts(24))
    command = start(run, "--retries", "0", runtime=2, shards_at_once=2)
    run.await_journal(2, command)
    with frozen_engines(run):
        first = {(entry["id"], entry["attempt"]) for entry in run.journal() if entry["kind"] == "answer"}
        eventually(lambda: "PD" in str(cluster.jobs()), "the job queues again", 180)
        (job,) = cluster.jobs()
    result = command.wait(PATIENCE)
    assert result.code == 0, result.output
    assert "Trying to restart" not in result.output
    assert restarts(cluster.ask("scontrol", "show", "job", job)) == 1
    check(run, [record["id"] for record in prompts(24)])
    assert first <= {(entry["id"], entry["attempt"]) for entry in run.journal() if entry["kind"] == "answer"}


def test_outer_run_killed(cluster: Cluster, on_slurm: NewWorkspace) -> None:
    """The outer run dies; its jobs go on. The same command takes their pools over, and no answer is asked for twice."""
    run = on_slurm(shards={"size": 6}, pools={"shards": 2}, clauses=128)
    run.write_prompts(prompts(36))
    command = start(run)
    run.await_journal(3, command)
    old = cluster.await_running(2)
    with frozen_engines(run):
        command.kill_main()
        command.wait(PATIENCE)
        # Without pools this run would write what its jobs write.
        error = run.run("--config", 'pools={"shards": 0}').error()
        assert "pools of this run are at work: 0000" in error
        # Nor does another cut of the pools let two jobs have one shard.
        result = finish(run, "--config", 'pools={"shards": 3}')
    assert result.jobs["merge"] == 1
    check_complete(run, [record["id"] for record in prompts(36)])
    check_sent_once(run)
    eventually(lambda: not set(old) & set(cluster.jobs()), "none of the old jobs is left")
    logs = "".join(path.read_text() for path in run.results.glob("logs/pools/*.log"))
    assert re.search(rf"cancelling job ({'|'.join(old)}), which works on its shards", logs)
