"""Prompts from a dataset of a hub: planned without a network, fetched once, at one commit."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from shardmill.errors import UserError
from shardmill.prompts.hub import DatasetSource, parse_dataset
from tests.hub import Hub
from tests.pipeline import Workspace, check_complete, check_nothing_left

REPO = "datasets/acme/chats"


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"q{n:03}", "question": f"How fast is mill {n}?", "topic": "mills"} for n in range(first, first + count)
    ]


def parquet(records: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), sink, row_group_size=3)
    return sink.getvalue()


FILES = {
    "README.md": b"# chats",
    "data/test-00000.parquet": parquet(rows(900, 2)),
    "data/train-00000.parquet": parquet(rows(0, 7)),
    "data/train-00001.parquet": parquet(rows(7, 4)),
}
IDS = [record["id"] for record in rows(0, 11)]


def test_a_split_of_a_dataset(workspace: Callable[..., Workspace]) -> None:
    path = "hf://datasets/acme/chats/data/train-*.parquet"
    run = workspace("work", prompts={"path": path, "field": "question"}, shards={"size": 4})
    with Hub() as hub:
        run.environment["HF_ENDPOINT"] = hub.url
        commit = hub.commit(REPO, FILES)
        assert run.finish("--dry-run").jobs == {"fetch_prompts": 1}
        assert not hub.requests and not run.results.exists()

        hub.ill_for = 2
        hub.drop_at["data/train-00000.parquet"] = 100
        result = run.finish()
        assert "getting the prompts first" in result.output
        completions = check_complete(run, IDS)
        assert completions[0]["topic"] == "mills"
        fetched = run.json("prompts", "fetched.json")
        assert (fetched["revision"], fetched["records"]) == (commit, 11)
        assert [file["name"] for file in fetched["files"]] == [name for name in FILES if "train" in name]
        assert not hub.fetches("data/test-00000.parquet")

        # A branch that moves on changes nothing in a run that has begun, and nobody is asked.
        hub.commit(REPO, FILES | {"data/train-00001.parquet": parquet(rows(7, 9))})
        asked = len(hub.requests)
        assert run.run().did_nothing
        assert len(hub.requests) == asked

        # Another revision is another input: what it shares with the old one is not answered again.
        newest = hub.repos[REPO].branches["main"]
        run.configure(prompts={"path": path.replace("chats", f"chats@{newest}")})
        before = run.journal_lines()
        assert run.finish("--dry-run").jobs == {"fetch_prompts": 1}
        run.finish()
        check_complete(run, [record["id"] for record in rows(0, 16)])
        assert run.journal_lines() == before + 5
    check_nothing_left(run)


def test_what_the_hub_does_not_have(workspace: Callable[..., Workspace]) -> None:
    run = workspace("work", prompts={"path": "hf://datasets/acme/chats@main/data/dev-*.jsonl"})
    with Hub() as hub:
        run.environment["HF_ENDPOINT"] = hub.url
        hub.commit(REPO, FILES)
        assert "the repo holds no file data/dev-*.jsonl" in run.run().error()
        run.configure(prompts={"path": "hf://acme/chats"})
        assert "names no files of a hub dataset" in run.run("--dry-run").error()


def test_forms() -> None:
    assert parse_dataset("hf://datasets/a/b@refs%2Fpr%2F1/x/y-*.jsonl") == DatasetSource(
        "a/b", "refs/pr/1", "x/y-*.jsonl"
    )
    assert parse_dataset("hf://datasets/a/b/c.parquet") == DatasetSource("a/b", "main", "c.parquet")
    for bad in ("hf://a/b", "hf://datasets/a/b", "hf://datasets/a/b@main", "hf://datasets/../b/c"):
        with pytest.raises(UserError, match="names no files"):
            parse_dataset(bad)
