"""What makes what again: every row of the design's table, with the real Snakemake and a real server.

The finished run was made by two llama.cpp servers of its own. Where requests matter, it goes on with a server behind a
door that counts them, which is itself a change that must make nothing again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FINISHED
from tests.pipeline import (
    Door,
    Workspace,
    check_complete,
    check_nothing_left,
    check_sent_once,
    copy_code,
    prompts,
    read_records,
)

IDS = [record["id"] for record in prompts(FINISHED)]
TEXT_OF = {record["id"]: record["prompt"] for record in prompts(FINISHED + 10)}


def asked(door: Door) -> list[str]:
    return sorted(text for text, _ in door.asked)


def texts(ids: list[str]) -> list[str]:
    return sorted(TEXT_OF[name] for name in ids)


def test_a_finished_run_has_nothing_to_do(finished: Workspace) -> None:
    before = finished.snapshot()
    assert finished.run().did_nothing
    assert finished.snapshot() == before
    check_sent_once(finished)
    check_nothing_left(finished)


# One file deleted


def test_deleted_completions_are_made_again_from_the_journal(finished: Workspace) -> None:
    path = finished.path("completions", "00001.jsonl.zst")
    before, records = finished.snapshot(), read_records(path)
    path.unlink()
    assert finished.finish().jobs == {"generate": 1, "merge": 1}
    assert read_records(path) == records
    after = finished.snapshot()
    kept = [name for name in before if name.startswith(("completions/", "stats/", "journals/")) and "00001" not in name]
    assert [after[name] for name in kept] == [before[name] for name in kept]
    assert after["journals/00001.jsonl"] == before["journals/00001.jsonl"]
    assert finished.json("stats", "00001.json")["requests_sent"] == 0
    check_complete(finished, IDS)


@pytest.mark.parametrize("name", ["rejected/00002.jsonl.zst", "stats/00002.json"])
def test_a_shards_other_files_deleted(counted: Workspace, door: Door, name: str) -> None:
    counted.path(name).unlink()
    jobs = counted.finish().jobs
    assert jobs.pop("generate") == 1 and jobs.pop("merge") == 1 and set(jobs) <= {"serve", "canary"}
    assert asked(door) == []
    check_complete(counted, IDS)


def test_a_lost_journal_costs_its_own_shard_only(counted: Workspace, door: Door) -> None:
    for path in counted.results.glob("*/00001.*"):
        if path.parent.name in ("journals", "completions"):
            path.unlink()
    assert counted.finish().jobs == {"serve": 1, "canary": 1, "generate": 1, "merge": 1}
    assert asked(door) == texts(IDS[6:12])
    check_complete(counted, IDS)


def test_a_deleted_dataset_is_merged_again(finished: Workspace) -> None:
    path = finished.path("dataset", "completions.jsonl.zst")
    before = path.read_bytes()
    path.unlink()
    assert finished.finish().jobs == {"merge": 1}
    assert path.read_bytes() == before


# Settings that decide the answers


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sampling": {"temperature": 0.5}}, "sampling.temperature changed from 1.0 to 0.5"),
        ({"thinking": {"enabled": False}}, "thinking.enabled changed from true to false"),
        ({"prompts": {"system": "Be brief."}}, "prompts.system changed from null to Be brief."),
        ({"model": {"source": "other.gguf"}}, "to other.gguf"),
        ({"model": {"chat_template": "template.jinja"}}, "model.chat_template changed from null to "),
    ],
)
def test_a_change_that_would_mix_answers_is_refused(finished: Workspace, change: dict[str, Any], told: str) -> None:
    (finished.folder / "template.jinja").write_text("{{ messages }}")
    before = finished.snapshot()
    finished.configure(**change)
    line = finished.run().error()
    assert told in line and "`run.name`" in line and "`run.regenerate: true`" in line
    assert finished.snapshot() == before


def test_a_model_that_changed_under_its_name_is_refused(finished: Workspace, models: Callable[..., Path]) -> None:
    source = finished.folder / "model.gguf"
    shutil.copy2(models(), source)
    finished.configure(run={"name": "u"}, model={"source": str(source)})
    finished.finish()
    before = finished.json("run.json")["model_digest"]
    shutil.copy2(models(answer_clauses=3), source)
    for folder in ("journals", "completions"):
        next(finished.path(folder).glob("00000.*")).unlink()
    line = finished.run().error()
    assert f"digest {before[:12]} became " in line and "`run.name`" in line and "`run.regenerate: true`" in line


def test_regenerate_makes_every_shard_again_once(counted: Workspace, door: Door) -> None:
    counted.configure(sampling={"temperature": 0.5}, run={"regenerate": True})
    jobs = counted.finish().jobs
    assert (jobs["generate"], jobs["merge"]) == (4, 1)
    assert asked(door) == texts(IDS)
    assert {record["sampling"]["temperature"] for record in check_complete(counted, IDS)} == {0.5}
    assert counted.run().did_nothing
    counted.configure(run={"regenerate": False})
    assert counted.run().did_nothing


def test_another_run_name_leaves_the_first_alone(finished: Workspace) -> None:
    before = finished.snapshot()
    result = finished.finish("--config", 'run={"name": "u"}', 'sampling={"temperature": 0.5, "max_tokens": 256}')
    assert result.jobs["generate"] == 4
    assert finished.snapshot() == before
    finished.configure(run={"name": "u"}, sampling={"temperature": 0.5, "max_tokens": 256})
    records = check_complete(finished, IDS)
    assert {(r["sampling"]["temperature"], r["sampling"]["max_tokens"]) for r in records} == {(0.5, 256)}
    assert finished.run().did_nothing
    check_nothing_left(finished)


# Settings that do not


@pytest.mark.parametrize(
    "change",
    [
        {"servers": {"port": 31000, "linger": 5, "max_restarts": 1, "stop_timeout": 3, "stall_after": 99}},
        {"servers": {"count": None, "gpus": [0, 1, 2]}},
        {"dispatch": {"queue": 7, "attempts_per_fault": 2}, "engine": {"llamacpp": {"slots": 2, "threads": 2}}},
        {"engine": {"sglang": {"max_running_requests": 7, "reasoning_parser": "qwen3"}}},
    ],
)
def test_what_cannot_change_an_answer_makes_nothing_again(finished: Workspace, change: dict[str, Any]) -> None:
    before = finished.snapshot()
    finished.configure(**change)
    result = finished.run("--cores", "3")
    assert result.did_nothing, result.output
    assert finished.snapshot() == before


def test_another_compression_level_merges_only(finished: Workspace) -> None:
    finished.configure(output={"zstd_level": 9})
    assert finished.finish().jobs == {"merge": 1}


def test_an_edited_script_makes_nothing_again(finished: Workspace, tmp_path: Path) -> None:
    finished.code = copy_code(tmp_path / "code")
    for name in ("scripts/generate.py", "scripts/serve.py", "scripts/shardmill/generate.py", "rules/completions.smk"):
        with (finished.code / name).open("a") as handle:
            handle.write("\n# edited\n")
    assert finished.run().did_nothing
    # With Snakemake's own triggers it would all be made again: the edit is one that it sees.
    assert finished.finish("-n", "--rerun-triggers", "mtime", "code").jobs["generate"] == 4


# The prompts


def test_touched_prompts_make_nothing_again(finished: Workspace) -> None:
    path = finished.folder / "prompts.jsonl"
    os.utime(path)
    assert finished.run().did_nothing
    path.write_bytes(path.read_bytes())
    assert finished.run().did_nothing


def test_appended_prompts_make_their_own_shards_only(counted: Workspace, door: Door) -> None:
    before = counted.snapshot()
    counted.write_prompts(prompts(FINISHED + 6))
    # The last shard held 2 of 6; now it is full, and there is another.
    assert counted.finish().jobs == {"prepare_prompts": 1, "serve": 1, "canary": 1, "generate": 2, "merge": 1}
    ids = list(TEXT_OF)[: FINISHED + 6]
    assert asked(door) == texts(ids[FINISHED:])
    check_complete(counted, ids)
    check_sent_once(counted)
    after = counted.snapshot()
    whole = [f"{kind}/{n:05}{end}" for kind, end in SHARD_FILES for n in range(3)]
    assert [after[name] for name in whole] == [before[name] for name in whole]
    assert counted.run().did_nothing


SHARD_FILES = (("completions", ".jsonl.zst"), ("rejected", ".jsonl.zst"), ("stats", ".json"), ("journals", ".jsonl"))


def test_an_edited_prompt_is_asked_alone(counted: Workspace, door: Door) -> None:
    records = prompts(FINISHED)
    records[8]["prompt"] = "What is new?"
    counted.write_prompts(records)
    assert counted.finish().jobs == {"prepare_prompts": 1, "serve": 1, "canary": 1, "generate": 1, "merge": 1}
    assert asked(door) == ["What is new?"]
    made = check_complete(counted, IDS)
    assert made[8]["messages"][0]["content"] == "What is new?"


def test_reordered_and_filtered_prompts_ask_nothing(counted: Workspace, door: Door) -> None:
    answers = {record["id"]: record["messages"] for record in check_complete(counted, IDS)}
    kept = [record for record in reversed(prompts(FINISHED)) if record["id"] != "p0004"]
    counted.write_prompts(kept)
    counted.finish()
    assert asked(door) == []
    made = check_complete(counted, [record["id"] for record in kept])
    assert all(record["messages"] == answers[record["id"]] for record in made)


def test_another_shard_size_is_refused_unless_asked_for(counted: Workspace, door: Door) -> None:
    answers = {record["id"]: record["messages"] for record in check_complete(counted, IDS)}
    before = counted.snapshot()
    counted.configure(shards={"size": 8})
    line = counted.run().error()
    assert "shards.size changed from 6 to 8" in line and "`run.recut: true`" in line
    assert counted.snapshot() == before
    counted.configure(run={"recut": True})
    assert counted.finish().jobs["generate"] == 3
    assert asked(door) == []
    assert (
        sum(json.loads(path.read_text())["requests_sent"] for path in counted.results.glob("stats/0000[012].json")) == 0
    )
    assert {record["id"]: record["messages"] for record in check_complete_cut(counted)} == answers
    counted.configure(run={"recut": False})
    assert counted.run().did_nothing


def check_complete_cut(workspace: Workspace) -> list[dict[str, Any]]:
    """As `check_complete`, once no file of the old cut is left to confuse a reader of completions/."""
    names = sorted(path.name for path in workspace.results.glob("completions/*.jsonl.zst"))
    assert names == ["00000.jsonl.zst", "00001.jsonl.zst", "00002.jsonl.zst"], "shards of the old cut are still there"
    return check_complete(workspace, IDS)
