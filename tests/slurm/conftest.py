"""A Slurm for the session, and runs on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline import Workspace
from tests.slurm.cluster import Cluster, reason_not_to


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not importlib.util.find_spec("snakemake_executor_plugin_slurm"):
        pytest.skip("Snakemake's executor for Slurm is not installed; `make test-slurm` does that")
    if reason := reason_not_to():
        pytest.skip(reason)
    # Slurm's paths must not be long, and its users must be able to reach them.
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """Three nodes: one with two GPUs, as Slurm counts them, and two with one."""
    yield _cluster
    _cluster.cancel_all()


@pytest.fixture
def on_slurm(
    cluster: Cluster, workspace: Callable[..., Workspace], models: Callable[..., Path]
) -> Callable[..., Workspace]:
    """Makes working folders whose runs know the cluster; a pool has as many servers as its job has GPUs: one."""

    def new(*, clauses: int = 2, **settings: Any) -> Workspace:
        defaults: dict[str, Any] = {
            "servers": {"count": None},
            "engine": {"llamacpp": {"context_length": 8192, "slots": 2}},
            "sampling": {"max_tokens": 4000},
            "quality": {"canary": {"skip": True}},
        }
        made = workspace("work", model=models(answer_clauses=clauses), **defaults)
        made.environment |= cluster.environment
        made.configure(**settings)
        return made

    return new
