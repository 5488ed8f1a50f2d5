"""Another workflow that has Shardmill as a module, with its own rules, handlers and configuration."""

from __future__ import annotations

import json
from collections.abc import Callable

import yaml

from tests.pipeline import REPO, Workspace, check_complete, check_nothing_left, prompts, read_records

SNAKEFILE = f"""
configfile: "study.yaml"


rule all:
    input:
        "summary.json",


module mill:
    snakefile:
        "{REPO}/Snakefile"
    config:
        config["mill"]


use rule * from mill as mill_*


rule make_prompts:
    output:
        "prompts.jsonl",
    shell:
        "cp source.jsonl {{output}}"


rule summarise:
    input:
        dataset=rules.mill_merge.output.dataset,
        manifest=rules.mill_merge.output.manifest,
    output:
        "summary.json",
    run:
        import json

        counts = json.load(open(input.manifest))["counts"]
        json.dump({{"answers": counts["accepted"], "title": config["title"]}}, open(output[0], "w"))


onstart:
    print("the study's own onstart")


onsuccess:
    print("the study's own onsuccess")
"""


def test_rules_of_a_module(workspace: Callable[..., Workspace]) -> None:
    study = workspace("study")
    study.write_prompts(prompts(8))
    (study.folder / "Snakefile").write_text(SNAKEFILE)
    (study.folder / "source.jsonl").write_bytes((study.folder / "prompts.jsonl").read_bytes())
    (study.folder / "study.yaml").write_text(yaml.safe_dump({"title": "a study", "mill": study.settings}))
    (study.folder / "config.yaml").unlink()  # a module has the configuration that it is given, and no other
    study.code = study.folder

    profile = ("--workflow-profile", str(REPO / "profiles" / "default"))
    override = ("--config", 'mill={"shards": {"size": 5}}')
    plan = study.finish(*profile, *override, "--dry-run").jobs
    assert (plan["mill_serve"], plan["mill_generate"], plan["mill_merge"], plan["summarise"]) == (2, 2, 1, 1)
    assert not (study.folder / "results").exists()

    result = study.finish(*profile, *override)
    assert json.loads((study.folder / "summary.json").read_text()) == {"answers": 8, "title": "a study"}
    check_complete(study, [record["id"] for record in prompts(8)])
    # Both workflows' handlers ran: the run was locked and given up, and the study's own were not lost.
    assert result.output.count("shardmill: run t: 8 prompts, 2 of 2 shards to make") == 1
    assert "the study's own onstart" in result.output and "the study's own onsuccess" in result.output
    assert study.path("run.json").exists() and study.path("run.lock").read_bytes() == b""
    check_nothing_left(study)

    # It is the same run for Shardmill alone, which has nothing to do.
    study.code = REPO
    study.configure(shards={"size": 5})
    assert study.run(study.results.joinpath("dataset", "completions.jsonl.zst").relative_to(study.folder).as_posix())
    assert len(read_records(study.path("dataset", "completions.jsonl.zst"))) == 8


def test_a_module_is_locked_too(workspace: Callable[..., Workspace]) -> None:
    """A second run of the same results is refused, whichever workflow each of them belongs to."""
    study = workspace("study")
    study.write_prompts(prompts(8))
    (study.folder / "Snakefile").write_text(SNAKEFILE)
    (study.folder / "source.jsonl").write_bytes((study.folder / "prompts.jsonl").read_bytes())
    (study.folder / "study.yaml").write_text(yaml.safe_dump({"title": "a study", "mill": study.settings}))
    first = study.start()
    study.await_journal(1, first)
    study.code = study.folder
    result = study.run("--workflow-profile", str(REPO / "profiles" / "default"))
    assert result.code and "another Shardmill run is live" in result.output
    assert first.wait().code == 0
