"""Prompts that bring their server down: set aside after three crashes, and nobody else with them."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline import Workspace, check_nothing_left, check_sent_once, prompts, read_dataset
from tests.sglang.workspaces import standin_workspace

COUNT = 40
FAST = ("--standin-time-scale", "0.2", "--standin-lengths", "300,0.5,2000")


@pytest.fixture
def poisoned(tmp_path: Path) -> Iterator[Workspace]:
    """Two servers that die of any prompt that speaks of arsenic, and a run of 40 prompts of which one does."""
    faults = json.dumps({"poison": {"match": "arsenic", "linger": 0.02}})
    made = standin_workspace(
        tmp_path / "work",
        *FAST,
        "--standin-faults",
        faults,
        shards={"size": COUNT},
        sampling={"max_tokens": 2048},
        quality={"canary": {"skip": True}},
        dispatch={"no_server_timeout": 60},
    )
    weights = tmp_path / "standin-model" / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", 2) + b"{}")
    records = prompts(COUNT)
    records[3]["prompt"] = "Does mill 3 grind arsenic?"
    made.write_prompts(records)
    yield made
    made.kill_everything()


def test_a_poisonous_prompt_is_set_aside_and_no_other(poisoned: Workspace) -> None:
    poisoned.finish()
    completions, rejects = read_dataset(poisoned)
    assert [(r["id"], r["reason"], r["detail"]) for r in rejects] == [
        ("p0003", "poison", "in flight at 3 server crashes")
    ]
    assert [c["id"] for c in completions] == [f"p{n:04}" for n in range(COUNT) if n != 3]
    crashes = Counter(entry["id"] for entry in poisoned.journal() if entry["kind"] == "crash")
    assert crashes.pop("p0003") == 3
    # It had company at each crash, but at no two of them the same.
    assert crashes and max(crashes.values()) <= 2
    assert poisoned.json("dataset", "manifest.json")["verdicts"] == {"ok": COUNT - 1, "poison": 1}
    check_sent_once(poisoned)
    check_nothing_left(poisoned)


def test_crashes_are_remembered_across_kills(poisoned: Workspace) -> None:
    command = poisoned.start()
    while not any(entry["kind"] == "crash" for entry in poisoned.journal()):
        assert command.process.poll() is None, command.output
    poisoned.kill_everything()
    before = sum(entry["kind"] == "crash" and entry["id"] == "p0003" for entry in poisoned.journal())
    poisoned.finish()
    assert [r["id"] for r in read_dataset(poisoned)[1]] == ["p0003"]
    crashes = Counter(entry["id"] for entry in poisoned.journal() if entry["kind"] == "crash")
    assert before >= 1 or crashes["p0003"] == 3
    assert crashes["p0003"] == 3, "those of before count"
    check_sent_once(poisoned)
