"""Whatever is in the input: each record becomes one prompt or one typed reject, and nothing else happens."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, get_args

import orjson
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardmill.config import Prompts
from shardmill.errors import UserError
from shardmill.ids import IdsDigest
from shardmill.load_config import load_config
from shardmill.prompts.conversation import Reason
from shardmill.prompts.records import PromptRecord, Unusable, read_record
from shardmill.prompts.split import read_shard, split
from shardmill.prompts.survey import survey

REASONS = get_args(Reason)
FIELDS = ["prompt", "messages", "conversations", "turns", "id", "tools", "sampling", "question", "line", "fields"]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | text
anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))
contents = text | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": text}) | anything, max_size=2)
roles = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "wizard"])
turns = (
    text
    | st.fixed_dictionaries({"role": roles, "content": contents}, optional={"tool_calls": anything, "name": anything})
    | st.fixed_dictionaries({"from": roles, "value": contents})
    | anything
)
sampling = st.dictionaries(st.sampled_from(["temperature", "top_k", "stop", "seed", "odd"]), anything, max_size=2)
values = anything | st.lists(turns, max_size=4) | sampling
records = st.dictionaries(st.sampled_from(FIELDS) | text, values, max_size=5)
prompts = st.builds(
    Prompts,
    path=st.just("p.jsonl"),
    field=st.none() | st.sampled_from(FIELDS),
    id_field=st.sampled_from(FIELDS),
    turns=st.sampled_from(["last", "all"]),
    system=st.none() | text,
)
lines = records.map(orjson.dumps) | st.binary(max_size=30) | anything.map(orjson.dumps)


def check(raw: bytes, result: Any, config: Prompts) -> None:
    """What holds for every record, whatever it was."""
    if isinstance(result, Unusable):
        assert result.reason in REASONS
        assert result.reason != "duplicate_id"
        assert len(result.detail.splitlines()) == 1
        return
    assert isinstance(result, PromptRecord)
    value, original = result.value, orjson.loads(raw)
    assert orjson.loads(result.encoded) == value
    assert result.encoded.count(b"\n") == 1
    assert list(value)[:3] == ["id", "line", "messages"]
    assert isinstance(value["id"], str) and value["id"].strip()
    assert all(isinstance(message["content"], str) for message in value["messages"])
    kept = [message["role"] for message in value["messages"]]
    assert set(kept) <= {"system", "user", "assistant", "tool"}
    assert "user" in kept
    if config.turns == "all":
        assert set(kept) <= {"system", "user"}
    else:
        assert kept[-1] in ("user", "tool")
    if config.system is not None:
        assert "system" in kept
    assert all(message["content"].strip() for message in value["messages"] if message["role"] == "user")
    assert value["fields"].items() <= original.items()


@settings(max_examples=800, deadline=None)
@given(lines, prompts)
@example(b'{"prompt":"a","id":-0}', Prompts(path="p.jsonl"))
@example(b'{"prompt":"a","x":' + b"[" * 198 + b"]" * 198 + b"}", Prompts(path="p.jsonl"))
def test_any_record_is_a_prompt_or_a_typed_reject(raw: bytes, config: Prompts) -> None:
    check(raw, read_record(raw, 1, config), config)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(records.map(orjson.dumps) | st.binary(max_size=20) | st.just(b'{"prompt":"a"}'), max_size=12),
    st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    st.integers(1, 5),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_any_file_adds_up(raws: list[bytes], ending: bytes, size: int, bom: bytes) -> None:
    data = bom + ending.join(raws)
    # The plain reading of the rule, line by line.
    expected = [
        (at, line.removesuffix(b"\r"))
        for at, line in enumerate(data.removeprefix(bom).split(b"\n"), 1)
        if line.strip(b" \t\r")
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.jsonl"
        path.write_bytes(data)
        config = load_config(
            {
                "run": {"results": folder},
                "prompts": {"path": str(path), "duplicates": "reject"},
                "shards": {"size": size},
                "model": {"source": "x"},
                "sampling": {"max_tokens": 64},
            }
        )
        try:
            index = split(config)
        except UserError as error:
            # Refused as a whole: then it must be because no record is usable, or it is some other kind of file.
            other_kind = "not JSON lines" in error.what
            usable = [isinstance(read_record(raw, at, config.prompts), PromptRecord) for at, raw in expected]
            assert other_kind or not any(usable)
            return
        found = survey(str(path), size)
        assert found.records == index["records"] == len(expected) == index["usable"] + index["unusable"]
        assert found.digests == [shard["digest"] for shard in index["shards"]]
        kept = [record for shard in index["shards"] for record in read_shard(config.layout, shard["name"], shard)]
        rejects = [orjson.loads(line) for line in config.layout.prompt_rejects.read_bytes().split(b"\n") if line]
        assert sorted([record["line"] for record in kept] + [reject["line"] for reject in rejects]) == [
            at for at, _ in expected
        ]
        assert len({record["id"] for record in kept}) == len(kept) == index["usable"]
        ids = IdsDigest()
        for record in kept:
            ids.add(record["id"])
        assert ids.hexdigest() == index["ids_digest"]
