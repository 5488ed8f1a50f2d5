"""A short stretch of chaos for every test run; `make chaos` is the long one, docs/reliability.md has its record."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from tests.chaos import check, schedule
from tests.chaos.run import Stage, run
from tests.chaos.schedule import Live, Rest, Round, Schedule
from tests.pipeline import Workspace
from tests.tiny.gguf_model import Knobs, make


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("stage")) as made:
        yield made


def live(kind: str, lines: int, server: int = 0) -> Live:
    return Live(kind, lines=lines, delay=0.0, seconds=1.0, server=server, draw=1)


KILLS = Round(
    (live("kill engine", 4), live("kill everything", 14)),
    (Rest("truncate journal", 3), Rest("flip bit in index", 7)),
    0.0,
)
DAMAGE = Round(
    (live("kill supervisor", 20, server=1),), (Rest("flip bit in completions", 5), Rest("flip bit in stats", 9)), 0.0
)


def test_a_run_survives_kills_and_damage(stage: Stage) -> None:
    """Two rounds of faults, then the same command until it is done, then the checker that believes nothing."""
    plan = Schedule(
        seed=1,
        prompts=24,
        shard_size=12,
        cores=7,
        external=False,
        canary=False,
        ram_disk=True,
        turns=1,
        bad_share=0.0,
        rounds=(KILLS, DAMAGE),
    )
    outcome = run(plan, stage)
    assert outcome.problems == []
    assert {"kill everything", "truncate journal"} <= set(outcome.done)
    assert outcome.found.completions == 24


def test_a_seed_names_a_run() -> None:
    assert schedule.make(7) == schedule.make(7)
    kinds = {kind for seed in range(600) for kind in schedule.make(seed).kinds()}
    assert kinds == {*schedule.LIVE, *schedule.REST, *schedule.DOOR}, "every fault is drawn"


# The checker itself: it must find what it is there to find


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run's folder, for harm to be done to copies of it."""
    folder = tmp_path_factory.mktemp("good")
    work = Workspace(folder / "work", make(folder / "m.gguf", Knobs()))
    work.write_prompts(INPUTS)
    try:
        work.configure(quality={"canary": {"skip": True}})
        work.finish()
    finally:
        work.kill_everything()
    return work.results


INPUTS = [{"id": f"p{n:04}", "prompt": f"What does mill {n} grind?"} for n in range(8)]


def problems(results: Path) -> list[str]:
    return check.check(
        results,
        INPUTS,
        kept=check.good_answers(results / "journals"),
        journals_damaged=False,
        rejects_damaged=False,
        oracle="",
        template={},
        asked=[],
        sample=0,
        seed=0,
    ).problems


def test_the_checker_finds_harm(good: Path, tmp_path: Path) -> None:
    assert problems(good) == []

    def harmed(name: str, harm: Callable[[list[bytes]], list[bytes]]) -> list[str]:
        """Problems of a copy in which the lines of a file were changed."""
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(good, copy)
        path = copy / name
        packed = path.suffix == ".zst"
        content = check.read_frame(path) if packed else path.read_bytes()
        changed = b"".join(harm(content.splitlines(keepends=True)))
        path.write_bytes(zstandard.ZstdCompressor().compress(changed) if packed else changed)
        return problems(copy)

    dataset, journal = "dataset/completions.jsonl.zst", "journals/00000.jsonl"
    assert any("not there exactly once" in found for found in harmed(dataset, lambda lines: lines[1:]))
    assert any("not there exactly once" in found for found in harmed(dataset, lambda lines: [lines[0], *lines]))
    assert any("not in input order" in found for found in harmed(dataset, lambda lines: lines[::-1]))
    other = harmed(dataset, lambda lines: [line.replace(b"The ", b"Teh ") for line in lines])
    assert any("the journal has another answer" in found for found in other)
    assert any("sent again" in found for found in harmed(journal, lambda lines: [*lines, lines[0]]))
    cut = harmed(journal, lambda lines: [lines[0].replace(b"p0", b"q0", 1), *lines[1:]])
    assert any("damaged journal lines that nobody made" in found for found in cut)
    manifest = harmed(
        "dataset/manifest.json", lambda lines: [line.replace(b'"accepted": 8', b'"accepted": 9') for line in lines]
    )
    assert any("manifest" in found for found in manifest)
