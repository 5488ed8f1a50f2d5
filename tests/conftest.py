"""What the tests of whole runs share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline import Door, Workspace, check_complete, open_door, prompts
from tests.tiny.gguf_model import Knobs, make
from tests.tiny.server import serve

# Minutes of real faults, disks, storage and environments: `make test-slow`. Everything else is `make test`.
SLOW = frozenset(
    {
        "test_cases",
        "test_chaos",
        "test_disk",
        "test_dispatch",
        "test_engine_env",
        "test_hub_prompts",
        "test_mirror",
        "test_module",
        "test_plan",
        "test_poison",
        "test_pools",
        "test_monitor",
        "test_real_data",
        "test_report",
        "test_training",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow modules, so that `-m` can choose."""
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)


FINISHED = 20  # prompts of the finished run, in shards of 6: the last shard holds 2


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny GGUF models by their knobs, each made once."""
    made: dict[Knobs, Path] = {}

    def get(**knobs: Any) -> Path:
        key = Knobs(**knobs)
        if key not in made:
            made[key] = make(tmp_path_factory.mktemp("model") / "tiny.gguf", key)
        return made[key]

    return get


@pytest.fixture
def workspace(tmp_path: Path, models: Callable[..., Path]) -> Iterator[Callable[..., Workspace]]:
    """Makes working folders; whatever runs in them is killed at the end."""
    made: list[Workspace] = []

    def new(
        name: str = "work", *, model: Path | None = None, of: Workspace | None = None, **settings: Any
    ) -> Workspace:
        folder = tmp_path / name
        made.append(of.copy(folder) if of else Workspace(folder, model or models()))
        made[-1].configure(**settings)
        return made[-1]

    yield new
    for one in made:
        one.kill_everything()


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory, models: Callable[..., Path]) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("finished") / "work", models())
    try:
        records = prompts(FINISHED)
        made.write_prompts(records)
        made.finish()
        check_complete(made, [record["id"] for record in records])
    finally:
        made.kill_everything()
    return made


@pytest.fixture
def finished(_finished: Workspace, workspace: Callable[..., Workspace]) -> Workspace:
    """A copy of a finished run: 20 prompts in 4 shards, made by two llama.cpp servers."""
    return workspace("finished", of=_finished)


@pytest.fixture(scope="session")
def _engine(tmp_path_factory: pytest.TempPathFactory, models: Callable[..., Path]) -> Iterator[str]:
    with serve(models(), tmp_path_factory.mktemp("engine") / "log.txt", slots=8, context=1024) as url:
        yield url


@pytest.fixture
def door(_engine: str) -> Iterator[Door]:
    """A real server that is there already, behind a door where every request is counted."""
    with open_door(_engine) as opened:
        yield opened


@pytest.fixture
def counted(finished: Workspace, door: Door) -> Workspace:
    """The finished run, which from now on asks the server behind the door."""
    finished.configure(engine={"kind": "external", "external": {"urls": [door.url], "flavor": "llamacpp"}})
    return finished


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "shardmill-test", str(folder)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
