"""Pools without a cluster: one command makes one pool, on whatever machine it is run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from shardmill.pool_job import port_slot
from shardmill.pool_plan import cut, holds, overlaps, pool_of
from tests.pipeline import (
    MARK,
    Command,
    Result,
    Workspace,
    check_complete,
    check_sent_once,
    eventually,
    free_ports,
    prompts,
)

IDS = [record["id"] for record in prompts(10)]


def make_pool(workspace: Workspace, pool: str) -> Result:
    script = str(workspace.code / "scripts" / "run_pool.py")
    command = [sys.executable, script, "--configfile", "config.yaml", "--pool", pool, "--cores", "2"]
    environment = os.environ | {MARK: str(workspace.folder), "TMPDIR": str(workspace.tmp)} | workspace.environment
    return Command(command, workspace.folder, environment).wait()


def test_pools_by_hand(workspace: Callable[..., Workspace]) -> None:
    run = workspace("work", shards={"size": 3}, pools={"shards": 2})
    run.write_prompts(prompts(10))
    assert "the prompts are not the ones" in make_pool(run, "00000-00001").error()
    run.finish("prepare_prompts", "download")
    assert "no such shards; there are 4" in make_pool(run, "00004-00005").error()
    for pool in ("00000-00001", "00002-00003"):
        result = make_pool(run, pool)
        assert result.code == 0, result.output
        assert list(run.json("pools", f"{pool}.json")["shards"]) == [pool[:5], pool[6:]]
        assert not list(run.path("pools", pool, "servers").glob("*.ready"))
    eventually(lambda: not run.processes(), "nothing of a pool outlives it")
    assert run.finish("--dry-run").jobs.keys() - {"report"} == {"merge"}
    run.finish()
    check_complete(run, IDS)
    check_sent_once(run)

    # More prompts: only the pool that has more to do, and the one that is new.
    run.write_prompts(prompts(17))
    assert run.finish("--dry-run").jobs.items() >= {"prepare_prompts": 1, "pool": 2, "merge": 1}.items()
    # Other settings are refused as ever.
    assert "temperature" in run.run("--config", 'sampling={"temperature": 0.5}').error()


def test_cut() -> None:
    shards = [f"{number:05d}" for number in range(7)]
    assert cut(shards, 0) == {}
    assert cut(shards, 3) == {"00000-00002": shards[:3], "00003-00005": shards[3:6], "00006-00008": shards[6:]}
    assert pool_of(100_001, 50_001) == "50001-100001"
    assert holds("00003-00005", "00005") and not holds("00003-00005", "00006")
    assert overlaps("00003-00005", "00005-00009") and not overlaps("00003-00005", "00006-00008")


def test_pools_of_one_machine_take_different_ports() -> None:
    first = free_ports(6)
    with port_slot(first, 2) as one, port_slot(first, 2) as other:
        assert (one, other) == (first, first + 2)
    with port_slot(first, 2) as again:
        assert again == first


@pytest.mark.parametrize(
    ("pools", "problem"),
    [
        ({"shards": 0, "only": "00000-00001"}, "pools.only: names a pool, but"),
        ({"shards": 2, "only": "1-2"}, "pools.only"),
        ({"shards": -1}, "pools.shards"),
    ],
)
def test_settings_that_cannot_be(workspace: Callable[..., Workspace], pools: dict[str, object], problem: str) -> None:
    run = workspace("work", pools=pools)
    run.write_prompts(prompts(4))
    assert problem in run.run("--dry-run").error()
