"""What a person meets on the command line: plans, bad input, and faults, each said in one clear line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pipeline import (
    REPO,
    Workspace,
    check_complete,
    check_nothing_left,
    eventually,
    frozen_engines,
    prompts,
    read_dataset,
)

WITHOUT_NETWORK = ("unshare", "--net")


@pytest.fixture
def fresh(workspace: Callable[..., Workspace]) -> Workspace:
    """A folder with 12 prompts where nothing has run yet."""
    made = workspace("fresh")
    made.write_prompts(prompts(12))
    return made


IDS = [record["id"] for record in prompts(12)]


def without_engine(workspace: Workspace) -> None:
    """Make the engine's package one that is not installed."""
    stub = workspace.folder.parent / "stub"
    stub.mkdir()
    (stub / "sitecustomize.py").write_text("import sys\nsys.modules['xllamacpp'] = None\n")
    workspace.environment["PYTHONPATH"] = str(stub)


# Plans


def test_a_plan_needs_no_engine_no_gpu_no_network(fresh: Workspace) -> None:
    without_engine(fresh)
    fresh.configure(servers={"count": None, "gpus": [0, 1, 2, 3, 4, 5, 6]}, model={"source": "hf://Qwen/Qwen3.6-27B"})
    allowed = subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True, check=False).returncode == 0
    result = fresh.finish("-n", before=WITHOUT_NETWORK if allowed else ())
    assert {rule: result.jobs[rule] for rule in ("download", "serve", "generate", "merge")} == {
        "download": 1,
        "serve": 7,
        "generate": 2,
        "merge": 1,
    }
    assert not (fresh.folder / "results").exists(), "a plan writes nothing"


def test_lint_is_clean(fresh: Workspace) -> None:
    assert "good condition" in fresh.finish("--lint").output


def test_the_repository_as_it_stands_can_be_planned(fresh: Workspace) -> None:
    result = fresh.finish("-n", "--config", 'run={"name": "never-made"}', cwd=REPO)
    assert result.jobs["generate"] >= 1


def test_a_report_can_be_made(finished: Workspace) -> None:
    finished.finish("--report", "report.html")
    assert "generate" in (finished.folder / "report.html").read_text()


def test_from_another_directory(finished: Workspace, tmp_path: Path) -> None:
    finished.path("completions", "00001.jsonl.zst").unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert finished.finish("--directory", str(finished.folder), cwd=elsewhere).jobs == {"generate": 1, "merge": 1}
    assert not list(elsewhere.iterdir())
    assert finished.run().did_nothing


# The configuration


def refusal(workspace: Workspace, *arguments: str) -> str:
    """The error of a plan in which `sampling.max_tokens` cannot work: it tells which values were taken."""
    return workspace.run("-n", *arguments).error()


def test_a_configfile_is_laid_over_the_default_one(fresh: Workspace) -> None:
    (fresh.folder / "over.yaml").write_text("sampling: {max_tokens: 1024}\n")
    line = refusal(fresh, "--configfile", "over.yaml")
    assert "sampling.max_tokens: is 1024" in line and "`engine.llamacpp.context_length` (1024)" in line


def test_a_configfile_with_a_model_stands_alone(fresh: Workspace) -> None:
    alone = {"model": {"source": "x.gguf"}, "prompts": {"path": "prompts.jsonl"}, "sampling": {"max_tokens": 9999}}
    (fresh.folder / "alone.yaml").write_text(yaml.safe_dump(alone))
    # The length that config.yaml says is 1024; here the key's own default counts.
    line = refusal(fresh, "--configfile", "alone.yaml")
    assert "sampling.max_tokens: is 9999" in line and "(1024)" not in line


def test_the_command_line_has_the_last_word(fresh: Workspace, models: Callable[..., Path]) -> None:
    (fresh.folder / "over.yaml").write_text("run: {name: over}\nshards: {size: 12}\n")
    source = {"source": str(models(answer_clauses=3)), "ram_disk": False}
    over = ('run={"name": "over-2", "recut": true}', 'sampling={"seed": 7, "stop": ["never."]}')
    fresh.finish("--configfile", "over.yaml", "--config", *over, f"model={json.dumps(source)}")
    fresh.configure(run={"name": "over-2"})
    records = check_complete(fresh, IDS)
    assert fresh.json("run.json")["shard_size"] == 12
    answers = fresh.json("run.json")["answers"]
    assert answers["sampling"]["seed"] == 7 and answers["sampling"]["stop"] == ["never."]
    assert answers["model"]["source"] == source["source"]
    assert {record["sampling"]["max_tokens"] for record in records} == {512}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sampling": {"max_token": 9}}, "sampling.max_token: unknown key, did you mean `sampling.max_tokens`?"),
        ({"sampling": {"max_tokens": "9"}}, "sampling.max_tokens: expected a whole number, found '9'"),
        ({"sampling": {"max_tokens": 5000}}, "leaves no room for a prompt in `engine.llamacpp.context_length`"),
        ({"prompts": {"path": "none.jsonl"}}, "prompts.path: no such file: none.jsonl"),
        ({"prompts": {"path": "empty.jsonl"}}, "prompts.path: empty.jsonl is empty"),
        ({"prompts": {"path": "blank.jsonl"}}, "prompts.path: blank.jsonl holds no records"),
        ({"prompts": {"path": "array.json"}}, "prompts.path: array.json holds one JSON array, not JSON lines"),
        ({"prompts": {"path": "notes.txt"}}, "prompts.path: notes.txt: the name says no known format"),
        ({"prompts": {"path": "."}}, "prompts.path: . "),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(fresh: Workspace, change: dict[str, Any], told: str) -> None:
    for name, text in (
        ("empty.jsonl", ""),
        ("blank.jsonl", "\n \n"),
        ("array.json", '[{"prompt": "x"}]'),
        ("notes.txt", "x"),
    ):
        (fresh.folder / name).write_text(text)
    fresh.configure(**change)
    assert told in fresh.run().error()
    assert not (fresh.folder / "results").exists()


def test_broken_yaml(fresh: Workspace) -> None:
    (fresh.folder / "config.yaml").write_text("run: {name: [\n")
    result = fresh.run("-n")
    assert result.code != 0 and "Traceback" not in result.output
    assert "not valid JSON or YAML" in result.output


# Faults of a job


def test_prompts_of_which_none_can_be_used(fresh: Workspace) -> None:
    (fresh.folder / "prompts.jsonl").write_text('nothing\n[1]\n{"other": "field"}\n')
    line = fresh.run().error()
    assert "none of the 3 records of prompts.jsonl can be used" in line and "line 1: bad_json" in line
    check_nothing_left(fresh)


def test_two_prompts_of_one_id(fresh: Workspace) -> None:
    fresh.write_prompts([*prompts(3), {"id": "p0001", "prompt": "Again?"}])
    assert "lines 2 and 4 of prompts.jsonl have the same id ('p0001')" in fresh.run().error()


def test_unusable_prompts_are_accounted_for(counted_fresh: Workspace) -> None:
    path = counted_fresh.folder / "prompts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], "not JSON\n", *lines[4:], '{"id": "e", "prompt": ""}\n']))
    counted_fresh.finish()
    check_complete(counted_fresh, IDS)
    _, rejects = read_dataset(counted_fresh)
    assert [(reject["id"], reject["line"]) for reject in rejects] == [(None, 5), (None, 14)]
    assert counted_fresh.json("dataset", "manifest.json")["counts"]["input"] == 14


@pytest.fixture
def counted_fresh(fresh: Workspace, door: Any) -> Workspace:
    """The fresh folder with a server that is there already."""
    fresh.configure(engine={"kind": "external", "external": {"urls": [door.url], "flavor": "llamacpp"}})
    return fresh


def test_a_model_that_is_not_there(fresh: Workspace) -> None:
    fresh.configure(model={"source": "models/none.gguf"})
    line = fresh.run().error()
    assert "model.source models/none.gguf: no such file or folder" in line


def test_an_engine_that_is_not_installed(fresh: Workspace) -> None:
    fresh.configure(servers={"count": 1})
    without_engine(fresh)
    line = fresh.run().error()
    assert "xllamacpp is not installed" in line and "make env" in line


def test_a_port_in_use_names_who_has_it(fresh: Workspace) -> None:
    with socket.socket() as rival:
        rival.bind(("127.0.0.1", fresh.ports[1]))
        rival.listen()
        line = fresh.run().error()
    assert f"server 1: port {fresh.ports[1]} is in use by pid {os.getpid()} (" in line and "servers.port" in line
    check_nothing_left(fresh)


def test_a_shard_of_bad_answers_fails_with_a_table_while_others_finish(fresh: Workspace) -> None:
    records = prompts(60)
    for record in records[20:40]:
        record["sampling"] = {"max_tokens": 3}  # nobody can answer in three tokens
    fresh.write_prompts(records)
    fresh.configure(shards={"size": 20}, quality={"min_samples": 5, "stop_run_above": 1.0, "canary": {"skip": True}})
    result = fresh.run()
    line = result.error()
    assert "shard 00001: too many rejects" in line
    table = result.output.split(line)[1]
    assert "unclosed_thought" in table and "p002" in table, "reasons, with examples"
    made = sorted(path.name for path in fresh.results.glob("completions/*.jsonl.zst"))
    assert made == ["00000.jsonl.zst", "00002.jsonl.zst"]
    assert not fresh.path("dataset").exists()
    check_nothing_left(fresh)


# The RAM disk


def test_the_ram_disk_is_used_guarded_and_freed(fresh: Workspace, tmp_path: Path) -> None:
    ram = tmp_path / "ram"
    fresh.write_prompts(prompts(60))
    fresh.configure(model={"ram_disk": str(ram)}, shards={"size": 30})
    run = fresh.start()
    fresh.await_journal(1, run)
    with frozen_engines(fresh):
        copies = list(ram.rglob("*.gguf"))
        assert len(copies) == 1
        # Another run of the same model shares the copy; while servers read it, it cannot be taken from them.
        line = fresh.run("clean_ram", "--config", 'run={"name": "other"}').error()
        assert "a live server uses this copy" in line
        assert copies[0].exists()
    assert run.wait().code == 0, run.output
    check_nothing_left(fresh)
    eventually(lambda: not fresh.processes(), "servers let go of the copy")
    assert str(copies[0].parent.parent) in fresh.finish("clean_ram").output
    assert not list(ram.rglob("*.gguf"))
    assert "nothing is staged" in fresh.finish("clean_ram").output
    assert fresh.run().did_nothing, "a finished run needs no model"


def test_a_small_ram_disk_is_refused_with_both_numbers(fresh: Workspace, small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(3_700_000))
    fresh.configure(model={"ram_disk": str(small_disk)})
    line = fresh.run().error()
    assert "more on the RAM disk, where" in line and "are free" in line
