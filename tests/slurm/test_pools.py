"""Pools on a real Slurm of three emulated nodes, with the real engine, and what goes wrong on clusters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]

PATIENCE = 300.0  # seconds for a run of several pools on a small machine; a deadline, not an expectation
NewWorkspace = Callable[..., Workspace]


def start(workspace: Workspace, *arguments: str, **resources: Any) -> Command:
    """Start a run with the profile as it is shipped, the cluster's own names and small resources laid over it."""
    asked = {"slurm_partition": "main", "gres": "gpu:1", "cpus_per_task": 2, "mem_mb": 500, "runtime": 30} | resources
    command = [
        *(SNAKEMAKE, "--snakefile", str(REPO / "Snakefile"), "--profile", str(REPO / "profiles" / "slurm")),
        *("--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "2", "--slurm-no-account"),
        *("--set-resources", *(f"pool:{name}={value}" for name, value in asked.items())),
        *("--set-threads", f"pool={resources.get('shards_at_once', 2)}", "--jobs", "4"),
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
    assert proven == sorted(path.name[:5] for path in workspace.results.glob("completions/*.jsonl.zst"))
    assert not list(workspace.results.rglob("*.ready")) and not list(workspace.results.rglob("*.tmp"))
    eventually(lambda: not workspace.processes(), "no process of the run is left")


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
