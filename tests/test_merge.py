"""The merge and its proof: what adds up is merged and verified, whatever does not is refused with both numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from benchmarks.merge import make_run
from shardmill.config import Config
from shardmill.errors import UserError
from shardmill.files import read_json, write_bytes, write_json
from shardmill.ids import IdsDigest
from shardmill.merge import merge
from shardmill.shard_files import write_part
from shardmill.verify import verify

SHARDS, PROMPTS = 3, 5


@pytest.fixture
def finished(tmp_path: Path) -> Config:
    """A small run whose shards are all done and whose dataset is not merged yet."""
    return make_run(tmp_path, SHARDS, PROMPTS)


def lines_of(path: Path) -> list[dict]:
    """As a reader does that stops after the first frame."""
    unpacked = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())
    return [json.loads(line) for line in unpacked.split(b"\n") if line]


def test_the_dataset_is_one_frame_in_input_order(finished: Config) -> None:
    manifest = merge(finished)
    path = finished.layout.dataset
    assert [record["line"] for record in lines_of(path)] == list(range(1, SHARDS * PROMPTS + 1))
    frame = zstandard.ZstdDecompressor().decompressobj()
    frame.decompress(path.read_bytes())
    assert frame.eof and frame.unused_data == b""
    assert manifest["counts"]["accepted"] == SHARDS * PROMPTS
    assert verify(path.parent) == read_json(finished.layout.manifest)


def test_rejects_and_unusable_lines_stand_in_input_order(finished: Config) -> None:
    layout = finished.layout
    write_bytes(layout.prompt_rejects, b'{"line":7,"reason":"bad_json","detail":"x","text":"{"}\n')
    index, stats = read_json(layout.prompt_index), read_json(layout.stats("00001"))
    kept = [record for record in lines_of(layout.completions("00001")) if record["line"] not in (6, 7, 9)]
    rejected = [{"id": f"p{line}", "line": line, "messages": [], "reason": "empty"} for line in (6, 9)]
    stats |= {
        "completions": write_part(layout.completions("00001"), kept),
        "rejects": write_part(layout.rejects("00001"), rejected),
        "prompts": 4,
        "accepted": 2,
        "rejected": 2,
        "unusable": 1,
    }
    write_json(layout.stats("00001"), stats)
    index["shards"][1] |= {"prompts": 4, "unusable": 1}
    ids = IdsDigest()
    for line in range(1, SHARDS * PROMPTS + 1):
        if line != 7:
            ids.add(f"p{line}")
    write_json(layout.prompt_index, index | {"usable": 14, "unusable": 1, "ids_digest": ids.hexdigest()})
    counts = merge(finished)["counts"]
    assert (counts["input"], counts["accepted"], counts["rejected"], counts["unusable"]) == (15, 12, 2, 1)
    assert [(r["line"], r["reason"]) for r in lines_of(layout.dataset_rejects)] == [
        (6, "empty"),
        (7, "unusable:bad_json"),
        (9, "empty"),
    ]
    verify(layout.dataset.parent)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewrite_an_answer(path: Path) -> None:
    """Other content in a sound file."""
    records = lines_of(path)
    records[0]["messages"][0]["content"] = "another answer"
    write_part(path, records)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("harm", [flip_a_byte, rewrite_an_answer, truncate, Path.unlink])
def test_a_harmed_shard_is_named(finished: Config, harm: Callable[[Path], None]) -> None:
    path = finished.layout.completions("00001")
    harm(path)
    with pytest.raises(UserError) as caught:
        merge(finished)
    assert str(path) in str(caught.value)
    assert not finished.layout.dataset.exists() and not finished.layout.manifest.exists()


def test_a_shard_with_fewer_answers_than_prompts_is_refused_with_both_numbers(finished: Config) -> None:
    path = finished.layout.stats("00002")
    write_json(path, read_json(path) | {"prompts": PROMPTS - 1, "accepted": PROMPTS - 1})
    with pytest.raises(UserError, match=f"answers {PROMPTS - 1} prompts.* holds {PROMPTS}"):
        merge(finished)


def test_a_doubled_shard_does_not_pass_for_another(finished: Config) -> None:
    """Counts and hashes fit; only the set of ids tells."""
    layout = finished.layout
    shutil.copy(layout.completions("00000"), layout.completions("00001"))
    write_json(layout.stats("00001"), read_json(layout.stats("00000")) | {"shard": "00001"})
    with pytest.raises(UserError, match="ids of the output are not the ids of the input"):
        merge(finished)
    assert not list(layout.dataset.parent.iterdir())


@pytest.mark.parametrize("harm", [flip_a_byte, rewrite_an_answer, truncate, Path.unlink])
@pytest.mark.parametrize("name", ["completions.jsonl.zst", "rejected.jsonl.zst"])
def test_verify_finds_a_harmed_dataset(finished: Config, harm: Callable[[Path], None], name: str) -> None:
    merge(finished)
    path = finished.layout.dataset.with_name(name)
    if harm is rewrite_an_answer and name.startswith("rejected"):
        write_part(path, [{"id": "p1", "line": 1}])
    else:
        harm(path)
    with pytest.raises(UserError) as caught:
        verify(path.parent)
    assert name in str(caught.value)


def test_verify_finds_a_manifest_that_does_not_add_up(finished: Config) -> None:
    manifest = merge(finished)
    manifest["counts"]["input"] += 1
    write_json(finished.layout.manifest, manifest)
    with pytest.raises(UserError, match=r"records is 15, but the manifest says 16"):
        verify(finished.layout.dataset.parent)
