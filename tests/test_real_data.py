"""Public question sets through the whole pipeline, where they lie beside the repository."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.pipeline import REPO, Workspace, check_complete, check_nothing_left, check_sent_once, read_dataset

DATA = REPO.parent / "shared" / "data"
# All 7,473 of them take minutes on two cores.
GSM8K_LINES = 1500

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the public question sets are not here")


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").split("\n") if line]


def test_gsm8k(workspace: Callable[..., Workspace]) -> None:
    records = lines_of("gsm8k_train.jsonl")[:GSM8K_LINES]
    work = workspace("gsm8k", shards={"size": 500}, prompts={"field": "question"})
    work.configure(engine={"llamacpp": {"context_length": 2048, "slots": 8}})
    work.write_prompts(records)
    assert work.finish().jobs["generate"] == 3
    index = work.json("prompts", "index.json")
    assert (index["records"], index["usable"]) == (len(records), len(records))
    completions, rejects = read_dataset(work)
    made = {record["line"]: record for record in [*completions, *rejects]}
    assert sorted(made) == list(range(1, len(records) + 1))
    ids = [made[line]["id"] for line in sorted(made)]
    assert len(set(ids)) == len(records)
    check_complete(work, ids)
    for line, record in made.items():
        source = records[line - 1]
        assert record["messages"][0] == {"role": "user", "content": source["question"]}
        assert record["input_answer"] == source["answer"], "a field of the input whose name the pipeline needs itself"
    check_sent_once(work)
    check_nothing_left(work)


def test_mt_bench_in_two_turns(workspace: Callable[..., Workspace]) -> None:
    records = lines_of("mt_bench_questions.jsonl")
    work = workspace("mt_bench", shards={"size": 20}, prompts={"turns": "all", "id_field": "question_id"})
    work.configure(engine={"llamacpp": {"context_length": 8192}})
    work.write_prompts(records)
    work.finish()
    made = check_complete(work, [str(record["question_id"]) for record in records])
    assert len(made) == len(records) == 80
    for record, source in zip(made, records, strict=True):
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"] * 2
        assert [message["content"] for message in record["messages"][::2]] == source["turns"]
        assert [turn["turn"] for turn in record["turns"]] == [0, 1]
        assert all(message["reasoning_content"] for message in record["messages"][1::2])
        assert record["category"] == source["category"]
    second = {hashlib.sha256(record["messages"][3]["content"].encode()).hexdigest() for record in made}
    assert len(second) > 40, "second answers differ as their histories do"
    check_sent_once(work)
    check_nothing_left(work)
