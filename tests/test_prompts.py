"""Reading, surveying and splitting prompts, on real files."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from shardmill.config import Config, Prompts
from shardmill.errors import UserError
from shardmill.files import iter_zstd_lines, read_json
from shardmill.ids import IdsDigest
from shardmill.load_config import load_config
from shardmill.prompts import seen, source
from shardmill.prompts.records import PromptRecord, Unusable, read_record
from shardmill.prompts.split import damaged_shards, read_shard, split
from shardmill.prompts.survey import cached_survey, shard_name, survey

REPO = Path(__file__).parents[1]
DATA = REPO.parent / "shared" / "data"


def config_for(path: Path | str, tmp_path: Path, *, size: int = 3, **prompts: object) -> Config:
    return load_config(
        {
            "run": {"results": str(tmp_path / "results")},
            "prompts": {"path": str(path), **prompts},
            "shards": {"size": size},
            "model": {"source": "x"},
            "sampling": {"max_tokens": 64},
        }
    )


def write_lines(path: Path, *records: object) -> Path:
    path.write_bytes(b"".join((r if isinstance(r, bytes) else orjson.dumps(r)) + b"\n" for r in records))
    return path


def numbered(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"id": f"p{at}", "prompt": f"question {at}"} for at in range(start, start + count)]


def read_all(config: Config, index: dict) -> list[dict]:
    return [record for entry in index["shards"] for record in read_shard(config.layout, entry["name"], entry)]


def rejects_of(config: Config) -> list[dict]:
    return [orjson.loads(line) for line in config.layout.prompt_rejects.read_bytes().split(b"\n") if line]


def one(record: object, **settings: object) -> PromptRecord | Unusable:
    raw = record if isinstance(record, bytes) else orjson.dumps(record)
    return read_record(raw, 7, Prompts(path="p.jsonl", **settings))


def messages_of(record: object, **settings: object) -> list[tuple[str, str]]:
    result = one(record, **settings)
    assert isinstance(result, PromptRecord), result
    assert orjson.loads(result.encoded) == result.value
    return [(message["role"], message["content"]) for message in result.value["messages"]]


def reason_of(record: object, **settings: object) -> str:
    result = one(record, **settings)
    assert isinstance(result, Unusable), result
    assert result.line == 7
    assert result.detail
    assert len(result.detail.splitlines()) == 1
    return result.reason


# Records


CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]
SHAREGPT = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "a"},
    {"from": "gpt", "value": "b"},
    {"from": "human", "value": "c"},
    {"from": "gpt", "value": "d"},
]


@pytest.mark.parametrize(
    ("record", "settings", "expected"),
    [
        ({"prompt": "a"}, {}, "user:a"),
        ({"question": "a", "answer": "b"}, {"field": "question"}, "user:a"),
        ({"prompt": [{"role": "user", "content": "a"}]}, {}, "user:a"),
        ({"messages": CHAT}, {}, "user:a|assistant:b|user:c"),
        ({"messages": CHAT}, {"turns": "all"}, "user:a|user:c"),
        ({"messages": CHAT, "prompt": "x"}, {}, "user:a|assistant:b|user:c"),
        ({"messages": None, "conversations": SHAREGPT}, {}, "system:s|user:a|assistant:b|user:c"),
        ({"conversations": SHAREGPT}, {"turns": "all"}, "system:s|user:a|user:c"),
        ({"conversations": CHAT}, {"system": "S"}, "system:S|user:a|assistant:b|user:c"),
        ({"conversations": SHAREGPT}, {"system": "S"}, "system:s|user:a|assistant:b|user:c"),
        ({"turns": ["a", "c"]}, {"turns": "all"}, "user:a|user:c"),
        ({"chat": ["a", "c"]}, {"turns": "all", "field": "chat"}, "user:a|user:c"),
        ({"chat": SHAREGPT}, {"field": "chat"}, "system:s|user:a|assistant:b|user:c"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]}, {}, "user:ab"),
        ({"prompt": "nul\0 and \u2028"}, {}, "user:nul\0 and \u2028"),
    ],
)
def test_recognised_forms(record: dict, settings: dict, expected: str) -> None:
    assert [":".join(turn) for turn in messages_of(record, **settings)] == expected.split("|")


def test_a_tool_result_is_answered() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "f"}}]}
    record = {"messages": [CHAT[0], call, {"role": "tool", "content": "42", "tool_call_id": "c1"}, CHAT[1]]}
    assert messages_of(record) == [("user", "a"), ("assistant", ""), ("tool", "42")]
    assert one(record).value["messages"][1]["tool_calls"] == call["tool_calls"]
    assert reason_of(record, turns="all") == "bad_conversation"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b'{"prompt": "a"', "bad_json"),
        (b'{"prompt": "a"} {"prompt": "b"}', "bad_json"),
        (b'{"prompt": "a", "n": NaN}', "bad_json"),
        (b'{"prompt": "a", "n": Infinity}', "bad_json"),
        (b'{"prompt": "a", "n": 1e999}', "bad_json"),
        (b'{"prompt": "a\x00"}', "bad_json"),
        (b'{"prompt": "\xff"}', "invalid_utf8"),
        (b'{"prompt": "\xed\xa0\x80"}', "invalid_utf8"),
        (rb'{"prompt": "\ud83d"}', "lone_surrogate"),
        (rb'{"prompt": "\udc00 x"}', "lone_surrogate"),
        (b'{"prompt": "a", "deep": ' + b"[" * 250 + b"]" * 250 + b"}", "too_deep"),
        (b"[" * 100_000, "too_deep"),
        (b'{"a":' * 100_000, "too_deep"),
        (b"[1]", "not_an_object"),
        (b'"prompt"', "not_an_object"),
        ({}, "no_prompt"),
        ({"text": "a"}, "no_prompt"),
        ({"prompt": None}, "no_prompt"),
        ({"prompt": " \n"}, "empty_prompt"),
        ({"messages": []}, "empty_prompt"),
        ({"messages": [{"role": "system", "content": "s"}]}, "empty_prompt"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty_prompt"),
        ({"turns": ["a", ""]}, "empty_prompt"),
        ({"prompt": 5}, "bad_conversation"),
        ({"messages": {"role": "user"}}, "bad_conversation"),
        ({"messages": [5]}, "bad_conversation"),
        ({"messages": [{"content": "a"}]}, "bad_conversation"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "bad_conversation"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "bad_conversation"),
        ({"messages": [{"role": "user"}]}, "bad_conversation"),
        ({"messages": [{"role": "user", "content": 5}]}, "bad_conversation"),
        ({"messages": [CHAT[0], {"role": "tool", "content": "42"}]}, "bad_conversation"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "unsupported_content"),
        ({"prompt": "a", "id": True}, "bad_id"),
        ({"prompt": "a", "id": 1.5}, "bad_id"),
        ({"prompt": "a", "id": ["x"]}, "bad_id"),
        ({"prompt": "a", "id": ""}, "bad_id"),
        ({"prompt": "a", "id": "x" * 513}, "bad_id"),
        (b'{"prompt": "a", "id": 123456789012345678901234567890}', "bad_id"),
        ({"prompt": "a", "tools": {}}, "bad_tools"),
        ({"prompt": "a", "tools": "[]"}, "bad_tools"),
        ({"prompt": "a", "tools": [5]}, "bad_tools"),
        ({"prompt": "a", "sampling": []}, "bad_sampling"),
        ({"prompt": "a", "sampling": {"seed": 1}}, "bad_sampling"),
        ({"prompt": "a", "sampling": {"extra": {}}}, "bad_sampling"),
        ({"prompt": "a", "sampling": {"temprature": 1}}, "bad_sampling"),
        ({"prompt": "a", "sampling": {"temperature": "1"}}, "bad_sampling"),
        ({"prompt": "a", "sampling": {"max_tokens": True}}, "bad_sampling"),
        ({"prompt": "a", "sampling": {"top_p": 1.5}}, "bad_sampling"),
    ],
)
def test_unusable_records_say_why(record: object, reason: str) -> None:
    assert reason_of(record) == reason


def test_normalised_record() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    record = {"label": 3, "id": 12, "messages": CHAT[:1], "tools": tools, "sampling": {"temperature": 0, "top_k": None}}
    assert list(one(record).value.items()) == [
        ("id", "12"),
        ("line", 7),
        ("messages", CHAT[:1]),
        ("tools", tools),
        ("sampling", {"temperature": 0}),
        ("fields", {"label": 3}),
    ]
    kept = one({"prompt": "a", "qid": 5, "id": "other"}, id_field="qid")
    assert (kept.id, kept.value["fields"]) == ("5", {"prompt": "a", "qid": 5, "id": "other"})


def test_an_id_is_made_from_what_decides_the_answer() -> None:
    made = one({"prompt": "a", "label": 1})
    canonical = b'{"messages":[{"content":"a","role":"user"}],"tools":null}'
    assert made.id == hashlib.sha256(canonical).hexdigest()[:16]
    assert made.id_is_made
    assert made.id == one({"label": 2, "messages": [{"from": "human", "value": "a"}], "id": None}).id
    assert made.id != one({"prompt": "a", "tools": [{"name": "f"}]}).id


# Survey


def test_survey_counts_and_hashes_records(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", *numbered(7))
    found = survey(str(path), 3)
    lines = path.read_bytes().splitlines(keepends=True)
    assert found.records == 7
    assert found.shard_names == ["00000", "00001", "00002"]
    assert found.digests == [hashlib.sha256(b"".join(lines[at : at + 3])).hexdigest() for at in (0, 3, 6)]
    assert (found.size_bytes, found.mtime_ns) == (path.stat().st_size, path.stat().st_mtime_ns)
    assert shard_name(99_999) == "99999"
    assert shard_name(100_000) == "100000"


def test_line_ends_blank_lines_and_bom_change_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_lines(tmp_path / "a.jsonl", *numbered(50))
    lines = plain.read_bytes().split(b"\n")[:-1]
    other = tmp_path / "b.jsonl"
    other.write_bytes(b"\xef\xbb\xbf\r\n \t\n" + b"\r\n\r\n\n".join(lines) + b"\r")
    expected = survey(str(plain), 7)
    for chunk in (1, 2, 3, 64, 1 << 20):
        monkeypatch.setattr(source, "CHUNK_BYTES", chunk)
        found = survey(str(other), 7)
        assert (found.records, found.digests) == (50, expected.digests)
    batches = list(source.iter_batches(source.open_source(str(other))))
    assert [number for batch in batches for number in batch.numbers] == list(range(3, 153, 3))
    assert b"".join(batch.text for batch in batches) == plain.read_bytes()


def test_only_the_shard_that_changed_has_a_new_digest(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", *numbered(8))
    before = survey(str(path), 3)
    os.utime(path, ns=(1, 1))
    assert survey(str(path), 3).digest == before.digest
    with path.open("ab") as handle:
        handle.write(b'{"prompt": "one more"}\n{"prompt": "and more"}')
    after = survey(str(path), 3)
    assert [new == old for new, old in zip(after.digests, before.digests, strict=False)] == [True, True, False]
    assert after.records == 10
    path.write_bytes(path.read_bytes().replace(b"question 4", b"QUESTION 4"))
    fixed = survey(str(path), 3)
    assert [new == old for new, old in zip(fixed.digests, after.digests, strict=True)] == [True, False, True, True]


def compressed_copies(path: Path) -> list[Path]:
    data = path.read_bytes()
    copies = [path.with_suffix(f".jsonl{suffix}") for suffix in (".gz", ".zst")]
    half = len(data) // 2
    copies[0].write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]))
    copies[1].write_bytes(zstandard.compress(data[:half]) + zstandard.compress(data[half:]))
    return copies


def write_parquet(path: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    return path


def test_every_format_gives_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"id": at, "messages": CHAT[: 1 + 2 * (at % 2)], "n": at} for at in range(1, 11)]
    plain = write_lines(tmp_path / "p.jsonl", *rows)
    paths = [plain, *compressed_copies(plain), write_parquet(tmp_path / "p.parquet", rows)]
    found = []
    for path in paths:
        config = config_for(path, tmp_path)
        index = split(config)
        found.append(read_all(config, index))
        assert index["digest"] == survey(str(path), 3).digest
    assert len(found[0]) == 10
    assert found[1:] == found[:1] * 3


def test_parquet_digests_follow_their_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{at}", "blob": bytes([at])} for at in range(8)]
    before = survey(str(write_parquet(tmp_path / "p.parquet", rows)), 3)
    rows[4]["blob"] = b"\xff"
    after = survey(str(write_parquet(tmp_path / "p.parquet", rows)), 3)
    assert [new == old for new, old in zip(after.digests, before.digests, strict=True)] == [True, False, True]


def test_parquet_text_that_is_not_utf8_costs_its_row_only(tmp_path: Path) -> None:
    prompts = pyarrow.array([b"good", b"\xff\xfe", b"fine"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts}), tmp_path / "p.parquet")
    config = config_for(tmp_path / "p.parquet", tmp_path)
    index = split(config)
    assert [record["line"] for record in read_all(config, index)] == [1, 3]
    assert [(r["line"], r["reason"]) for r in rejects_of(config)] == [(2, "invalid_utf8")]


BAD_FILES = {
    "empty.jsonl": (b"", "is empty"),
    "blank.jsonl": (b"\n \r\n\t\n", "no records"),
    "bom.jsonl": (b"\xef\xbb\xbf", "no records"),
    "p.csv": (b"a,b\n", "no known format"),
    "prompts": (b'{"prompt": "a"}\n', "no known format"),
    "p.csv.gz": (gzip.compress(b"a,b\n"), "no known format"),
    "p.jsonl.xz": (b"\xfd7zXZ\x00", "no known format"),
    "array.json": (b'[\n  {"prompt": "a"}\n]\n', "one JSON array"),
    "utf16.jsonl": ('{"prompt": "a"}\n'.encode("utf-16"), "UTF-16"),
    "gzip.jsonl": (gzip.compress(b'{"prompt": "a"}\n'), "holds gzip"),
    "twice.jsonl.gz": (gzip.compress(gzip.compress(b'{"prompt": "a"}\n')), "holds gzip"),
    "plain.jsonl.gz": (b'{"prompt": "a"}\n', "no gzip file"),
    "plain.jsonl.zst": (b'{"prompt": "a"}\n', "no zstd file"),
    "plain.parquet": (b'{"prompt": "a"}\n', "no Parquet file"),
    "torn.parquet": (b"PAR1" + b"x" * 100, "Parquet"),
    "torn.jsonl.gz": (gzip.compress(os.urandom(5000))[:-20], "damaged gzip"),
    "torn.jsonl.zst": (zstandard.compress(os.urandom(5000))[:-20], "truncated zstd"),
    "empty.jsonl.gz": (gzip.compress(b""), "no records"),
    "empty.jsonl.zst": (zstandard.compress(b""), "no records"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_no_prompts_are_refused(tmp_path: Path, name: str) -> None:
    data, message = BAD_FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    for call in (lambda: survey(str(path), 3), lambda: split(config_for(path, tmp_path))):
        with pytest.raises(UserError) as caught:
            call()
        assert caught.value.where == "prompts.path"
        assert message in caught.value.what
        assert str(path) in caught.value.what
        assert caught.value.hint and "remove" not in caught.value.hint


def test_paths_that_are_no_readable_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "link.jsonl").symlink_to("nowhere.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("none.jsonl", "folder.jsonl", "link.jsonl", "pipe.jsonl", "n\0l.jsonl", "x" * 300 + ".jsonl"):
        with pytest.raises(UserError) as caught:
            survey(str(tmp_path / name), 3)
        assert caught.value.where == "prompts.path"


def test_a_file_without_line_ends_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_LINE_BYTES", 3 << 20)
    (tmp_path / "p.jsonl").write_bytes(b"x" * (5 << 20))
    with pytest.raises(UserError, match="a line of more than 3 MiB"):
        survey(str(tmp_path / "p.jsonl"), 3)


# Split


def test_split_accounts_for_every_record(tmp_path: Path) -> None:
    nasty = "".join(map(chr, range(1, 0x250))) + "\u2028\u2029\x85\0"
    long = "x" * 10_000_000
    path = tmp_path / "p.jsonl"
    lines = [
        b'{"id": "crlf", "prompt": "a"}\r',
        b"",
        b"\xff not JSON " + "\U0001f600".encode() * 1000,
        orjson.dumps({"id": "nasty", "prompt": nasty}),
        b" \t ",
        '{"id": "u2028", "prompt": "a\u2028b"}'.encode(),
        b'{"prompt": ""}\r',
        orjson.dumps({"id": "long", "prompt": long}),
        b'{"id": "last", "prompt": "no line end"}',
    ]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    config = config_for(path, tmp_path, size=2)
    index = split(config)
    assert index == read_json(config.layout.prompt_index)
    prompts = read_all(config, index)
    assert [(p["id"], p["line"]) for p in prompts] == [
        ("crlf", 1),
        ("nasty", 4),
        ("u2028", 6),
        ("long", 8),
        ("last", 9),
    ]
    texts = [p["messages"][0]["content"] for p in prompts]
    assert texts == ["a", nasty, "a\u2028b", long, "no line end"]
    rejects = rejects_of(config)
    assert [(r["line"], r["reason"]) for r in rejects] == [(3, "invalid_utf8"), (7, "empty_prompt")]
    assert rejects[0]["text"] == "\ufffd not JSON " + "\U0001f600" * 489
    assert (index["records"], index["usable"], index["unusable"]) == (7, 5, 2)
    assert [(s["first_line"], s["records"], s["prompts"], s["unusable"]) for s in index["shards"]] == [
        (1, 2, 1, 1),
        (4, 2, 2, 0),
        (7, 2, 1, 1),
        (9, 1, 1, 0),
    ]
    found = survey(str(path), 2)
    assert [s["digest"] for s in index["shards"]] == found.digests
    assert index["digest"] == found.digest
    assert cached_survey(str(path), 2, config.layout.prompt_index) == found
    ids, merged = IdsDigest(), IdsDigest()
    for prompt in reversed(prompts):
        ids.add(prompt["id"])
    for entry in index["shards"]:
        merged.merge(IdsDigest.of_hex(entry["ids_digest"], entry["prompts"]))
    assert ids == merged
    assert ids.hexdigest() == index["ids_digest"]


def test_appending_rewrites_the_last_shard_only(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", *numbered(8))
    config = config_for(path, tmp_path)
    first = split(config)
    shards = [config.layout.prompt_shard(f"{at:05d}") for at in range(4)]
    for shard in shards[:3]:
        os.utime(shard, ns=(1, 1))
    write_lines(path, *numbered(10))
    assert len(split(config)["shards"]) == 4
    assert [shard.stat().st_mtime_ns == 1 for shard in shards] == [True, True, False, False]
    shards[0].write_bytes(b"damaged")
    (shards[0].parent / f".{shards[0].name}.killed.tmp").write_bytes(b"torn")
    write_lines(path, *numbered(8))
    again = split(config)
    assert {**again, "mtime_ns": 0} == {**first, "mtime_ns": 0}
    assert sorted(p.name for p in shards[0].parent.iterdir()) == [p.name for p in shards[:3]]
    assert len(read_all(config, again)) == 8


def test_cached_survey_believes_the_index_only_about_the_same_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", *numbered(8))
    config = config_for(path, tmp_path)
    index_path = config.layout.prompt_index
    assert cached_survey(str(path), 3, index_path) == survey(str(path), 3)
    split(config)
    status = path.stat()
    # Same size and mtime, other content: only a survey that did not read the file can miss it.
    path.write_bytes(path.read_bytes().replace(b"question 0", b"QUESTION 0"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached_survey(str(path), 3, index_path).digest != survey(str(path), 3).digest
    assert cached_survey(str(path), 4, index_path) == survey(str(path), 4)
    os.utime(path, ns=(1, 1))
    assert cached_survey(str(path), 3, index_path) == survey(str(path), 3)
    recorded = split(config)
    recorded["shards"][0]["digest"] = "0" * 64
    for damage in (b"{", b"[]", b"{}", b'{"path": 1}', orjson.dumps(recorded)):
        index_path.write_bytes(damage)
        assert cached_survey(str(path), 3, index_path) == survey(str(path), 3)


def test_damaged_shards_are_seen_and_refused(tmp_path: Path) -> None:
    config = config_for(write_lines(tmp_path / "p.jsonl", *numbered(12)), tmp_path)
    index = split(config)
    layout, entries = config.layout, {entry["name"]: entry for entry in index["shards"]}
    names = list(entries)
    assert damaged_shards(layout, index, names) == []
    layout.prompt_shard("00000").unlink()
    lines = list(iter_zstd_lines(layout.prompt_shard("00001")))
    layout.prompt_shard("00001").write_bytes(zstandard.compress(b"\n".join(lines[:2]) + b"\n"))
    data = bytearray(layout.prompt_shard("00002").read_bytes())
    data[len(data) // 2] ^= 1
    layout.prompt_shard("00002").write_bytes(data)
    same = b"".join(line + b"\n" for line in iter_zstd_lines(layout.prompt_shard("00003")))
    layout.prompt_shard("00003").write_bytes(zstandard.compress(same.replace(b"question", b"QUESTION")))
    assert damaged_shards(layout, index, [*names, "00009"])[:2] == ["00000", "00001"]
    assert damaged_shards(layout, index, ["00009"]) == ["00009"]
    for name, message in {"00000": "cannot be read", "00001": "holds 2 prompts, but the index says 3"}.items():
        with pytest.raises(UserError, match=message):
            read_shard(layout, name, entries[name])
    for name in ("00002", "00003"):
        with pytest.raises(UserError):
            read_shard(layout, name, entries[name])


def test_a_shard_of_unusable_records_is_an_empty_file(tmp_path: Path) -> None:
    config = config_for(write_lines(tmp_path / "p.jsonl", b"1", b"2", b"3", *numbered(1)), tmp_path)
    index = split(config)
    assert [entry["prompts"] for entry in index["shards"]] == [0, 1]
    assert read_shard(config.layout, "00000", index["shards"][0]) == []


def test_nothing_usable_is_an_error_with_reasons(tmp_path: Path) -> None:
    config = config_for(write_lines(tmp_path / "p.jsonl", *[{"question": "a"}] * 5), tmp_path)
    with pytest.raises(UserError, match=r"none of the 5 records.*line 1: no_prompt, .*\(question\)") as caught:
        split(config)
    assert "prompts.field" in caught.value.hint
    assert len(rejects_of(config)) == 5
    assert not config.layout.prompt_index.exists()


def test_duplicate_ids_are_refused_by_both_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", b"", *numbered(5), {"id": "p1", "prompt": "again"})
    config = config_for(path, tmp_path)
    with pytest.raises(UserError, match=r"lines 3 and 7 .*'p1'") as caught:
        split(config)
    assert "prompts.duplicates: reject" in caught.value.hint
    assert not config.layout.prompt_index.exists()
    write_lines(path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"})
    with pytest.raises(UserError, match=r"lines 1 and 3 .*the same prompt and no id of their own"):
        split(config)


def test_duplicate_ids_can_be_rejected(tmp_path: Path) -> None:
    records = [*numbered(5), {"id": "p1", "prompt": "again"}, {"id": "p9", "prompt": "x"}, *numbered(3, 1)]
    config = config_for(write_lines(tmp_path / "p.jsonl", *records), tmp_path, duplicates="reject")
    index = split(config)
    assert [p["id"] for p in read_all(config, index)] == ["p0", "p1", "p2", "p3", "p4", "p9"]
    assert [(r["line"], r["reason"]) for r in rejects_of(config)] == [(at, "duplicate_id") for at in (6, 8, 9, 10)]
    assert "line 2" in rejects_of(config)[0]["detail"]


@pytest.mark.parametrize("duplicates", ["refuse", "reject"])
def test_ids_whose_hashes_collide_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duplicates: str
) -> None:
    monkeypatch.setattr(seen, "KEY_BYTES", 1)
    records = numbered(300)
    path = write_lines(tmp_path / "p.jsonl", *records)
    config = config_for(path, tmp_path, size=50, duplicates=duplicates)
    assert split(config)["usable"] == 300
    write_lines(path, *records, records[299], records[0])
    if duplicates == "refuse":
        with pytest.raises(UserError, match="lines 300 and 301"):
            split(config)
    else:
        assert split(config)["usable"] == 300
        assert [r["line"] for r in rejects_of(config)] == [301, 302]


def test_seen_ids_survive_growth() -> None:
    table = seen.SeenIds()
    digests = [hashlib.sha256(str(at).encode()).digest() for at in range(20_000)]
    assert all(table.first_line("", digest, line) is None for line, digest in enumerate(digests, 1))
    assert [table.first_line("", digest, 99_999) for digest in digests] == list(range(1, 20_001))


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "p.jsonl", *numbered(2000))
    monkeypatch.setattr(source, "CHUNK_BYTES", 4096)
    blocks = source._blocks

    def append_meanwhile(*args: object) -> object:
        for at, block in enumerate(blocks(*args)):
            if at == 3:
                with path.open("ab") as handle:
                    handle.write(b'{"prompt": "late %d"}\n' % path.stat().st_size)
            yield block

    monkeypatch.setattr(source, "_blocks", append_meanwhile)
    config = config_for(path, tmp_path)
    for call in (lambda: survey(str(path), 3), lambda: split(config)):
        with pytest.raises(UserError, match="changed while it was read"):
            call()
    assert not config.layout.prompt_index.exists()


def split_script(preamble: str = "") -> list[str]:
    """A command that splits by the configuration on stdin; it prints the prompts' count and its peak memory in KiB."""
    script = f"""
import json, resource, sys
sys.path.insert(0, {str(REPO / "scripts")!r})
from shardmill.errors import UserError
from shardmill.load_config import load_config
from shardmill.prompts.split import split
{preamble}
try:
    index = split(load_config(json.load(sys.stdin)))
except UserError as error:
    sys.exit(f"refused: {{error}}")
# Of this program alone: ru_maxrss would begin at the size of the process that started it.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps([index["usable"], int(peak.split()[1])]))
"""
    return [sys.executable, "-c", script]


def run_split(config: Config, preamble: str = "") -> subprocess.CompletedProcess[str]:
    command = split_script(preamble)
    return subprocess.run(command, input=config.model_dump_json(), text=True, capture_output=True, check=False)


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", *numbered(1))
    path.chmod(0)
    # Root may read everything, so it has to become somebody else.
    result = run_split(config_for(path, tmp_path), "import os; os.getuid() or os.setuid(65534)")
    assert result.returncode == 1
    assert result.stderr.startswith(f"refused: prompts.path: cannot read '{path}' (Permission denied)")


def test_a_killed_split_is_never_taken_for_a_finished_one(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", *numbered(200))
    config = config_for(path, tmp_path, size=100)
    split(config)
    write_lines(path, *numbered(60_000))
    with subprocess.Popen(split_script(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdin.write(config.model_dump_json().encode())
        child.stdin.close()
        deadline = time.monotonic() + 60
        while not config.layout.prompt_shard("00020").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        child.kill()
    assert config.layout.prompt_shard("00020").exists()
    assert not config.layout.prompt_index.exists()
    index = split(config)
    assert damaged_shards(config.layout, index, [entry["name"] for entry in index["shards"]]) == []
    assert len(list(config.layout.prompt_shard("0").parent.iterdir())) == 600
    assert len(read_all(config, index)) == 60_000


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    records = [{"id": str(at), "prompt": os.urandom(3000).hex()} for at in range(40)]
    config = config_for(write_lines(tmp_path / "p.jsonl", *records), tmp_path, size=20)
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    result = run_split(config, limit)
    assert result.returncode == 1
    shard = config.layout.prompt_shard("00000")
    assert result.stderr.startswith(f"refused: {shard}: cannot be written ({os.strerror(errno.EFBIG)})")
    assert list(shard.parent.iterdir()) == []
    assert not config.layout.prompt_index.exists()
    assert json.loads(run_split(config).stdout)[0] == 40


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_no_space_left_says_to_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardmill.prompts import shards

    class OnFullDevice:
        def __init__(self, handle: object) -> None:
            pass

        def write(self, data: bytes) -> int:
            with open("/dev/full", "wb", buffering=0) as full:
                return full.write(data)

    monkeypatch.setattr(shards, "_Tee", OnFullDevice)
    config = config_for(write_lines(tmp_path / "p.jsonl", *numbered(3)), tmp_path)
    with pytest.raises(UserError, match=r"No space left.*make room") as caught:
        split(config)
    assert caught.value.where == str(config.layout.prompt_shard("00000"))


def test_100_000_prompts_need_little_memory(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        with path.open("wb") as handle:
            for at in range(count):
                handle.write(b'{"id": "id-%d", "prompt": "%s"}\n' % (at, b"word %d " % at * 60))
        result = run_split(config_for(path, tmp_path / str(count), size=1000))
        usable, kib = json.loads(result.stdout)
        assert usable == count
        return kib

    # The table of ids may take 32 bytes a prompt (3 MB), and arrays double for a moment as they grow.
    most = peak(100_000)
    assert most - peak(2_000) < 20 * 1024
    assert most < 200 * 1024


@pytest.mark.skipif(not DATA.is_dir(), reason="the sample data is not on this machine")
@pytest.mark.parametrize(
    ("name", "settings", "count"),
    [
        ("gsm8k_train.jsonl", {"field": "question"}, 7473),
        ("mt_bench_questions.jsonl", {"id_field": "question_id", "turns": "all"}, 80),
    ],
)
def test_real_data(tmp_path: Path, name: str, settings: dict, count: int) -> None:
    config = config_for(DATA / name, tmp_path, size=1000, **settings)
    index = split(config)
    assert (index["records"], index["usable"]) == (count, count)
    assert len(read_all(config, index)) == count
