"""The independent checker: it reads the files that a user gets, with json, zlib and zstandard alone.

Nothing here comes from the pipeline, and nothing here believes what the pipeline says of itself.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import zstandard

from .door import Asked, key_of

_LINE = re.compile(rb'\{"crc":"([0-9a-f]{8})","entry":(\{.*\})\}', re.DOTALL)


@dataclass
class Found:
    """What a check of one run found: `problems` is empty if all is well."""

    problems: list[str] = field(default_factory=list)
    completions: int = 0
    rejects: int = 0
    entries: int = 0
    damaged: int = 0
    asked_again: int = 0

    def expect(self, condition: Any, problem: str) -> None:
        if not condition:
            self.problems.append(problem[:600])


def read_frame(path: Path) -> bytes:
    """Content of a file that must be exactly one whole zstd frame."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    content = frame.decompress(path.read_bytes())
    if not frame.eof or frame.unused_data:
        raise ValueError(f"{path} is not one whole zstd frame")
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_frame(path).split(b"\n") if line]


def read_journals(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """(whole entries of all journals, lines whose CRC-32 does not hold)."""
    entries, damaged = [], 0
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            match = _LINE.fullmatch(line)
            if match and zlib.crc32(match[2]) == int(match[1], 16):
                entries.append(json.loads(match[2]))
            else:
                damaged += 1
    return entries, damaged


def good_answers(folder: Path) -> dict[tuple[str, int], tuple[str, str]]:
    """Accepted answers in the journals: (id, seed) to (content, thought)."""
    entries = read_journals(folder)[0]
    return {
        (e["id"], e["seed"]): _texts(e["answer"]) for e in entries if e["kind"] == "answer" and e["verdict"] == "ok"
    }


def _texts(message: dict[str, Any]) -> tuple[str, str]:
    return message.get("content") or "", message.get("reasoning_content") or ""


def check(
    results: Path,
    inputs: list[dict[str, Any]],
    *,
    kept: dict[tuple[str, int], tuple[str, str]],
    journals_damaged: bool,
    rejects_damaged: bool,
    oracle: str,
    template: dict[str, Any],
    asked: list[Asked],
    sample: int,
    seed: int,
) -> Found:
    """Check a run that said it was finished.

    Args:
        results: the run's folder.
        inputs: the prompts, in input order.
        kept: finished answers that were seen in the journals and not damaged since: they must be in the result.
        journals_damaged: whether this test itself damaged a journal.
        rejects_damaged: whether it damaged a shard's rejects, perhaps after they were merged.
        oracle: URL of a fresh server of the same model.
        template: fields of a request body that all requests share.
        asked: what the door saw, if there was one.
        sample: answers to ask the oracle for again.
        seed: of the sample.
    """
    found = Found()
    try:
        completions = read_lines(results / "dataset" / "completions.jsonl.zst")
        rejects = read_lines(results / "dataset" / "rejected.jsonl.zst")
        manifest = json.loads((results / "dataset" / "manifest.json").read_text())
    except (OSError, ValueError, zstandard.ZstdError) as error:
        found.problems.append(f"the dataset cannot be read: {error}")
        return found
    found.completions, found.rejects = len(completions), len(rejects)
    _check_ids(found, completions, rejects, inputs)
    _check_manifest(found, results, manifest, completions, rejects)
    wholes = {"completions": completions} | ({} if rejects_damaged else {"rejected": rejects})
    _check_parts(found, results, wholes)
    _check_journals(found, results, completions, kept, journals_damaged)
    _check_door(found, results, completions, asked)
    _ask_again(found, completions, oracle, template, sample, seed)
    return found


def _check_ids(
    found: Found, completions: list[dict[str, Any]], rejects: list[dict[str, Any]], inputs: list[dict[str, Any]]
) -> None:
    wanted = [record["id"] for record in inputs]
    made = [record["id"] for record in completions]
    counted = Counter(made + [record["id"] for record in rejects])
    off = {name: counted[name] for name in {*wanted, *counted} if counted[name] != 1 or name not in set(wanted)}
    found.expect(not off, f"ids that are not there exactly once: {off}")
    position = {name: at for at, name in enumerate(wanted)}
    found.expect(made == sorted(made, key=lambda name: position.get(name, -1)), "completions are not in input order")
    prompts = {record["id"]: record for record in inputs}
    for record in completions:
        messages = record["messages"]
        said = [message["content"] for message in messages if message["role"] == "user"]
        expected = prompts.get(record["id"], {}).get("turns") or [prompts.get(record["id"], {}).get("prompt")]
        found.expect(said == expected, f"{record['id']}: its prompt is not the input's: {said}")
        answers = [message for message in messages if message["role"] == "assistant"]
        found.expect(len(answers) == len(said), f"{record['id']}: {len(answers)} answers to {len(said)} turns")
        for answer in answers:
            found.expect((answer.get("content") or "").strip(), f"{record['id']}: an empty answer")
            found.expect((answer.get("reasoning_content") or "").strip(), f"{record['id']}: an answer without thought")
            found.expect("<think>" not in (answer.get("content") or ""), f"{record['id']}: a tag in the answer")
    for record in rejects:
        found.expect(record.get("reason"), f"{record['id']}: rejected for no reason")
        found.expect(record.get("reason") != "poison", f"{record['id']}: an innocent set aside as poison")


def _check_manifest(
    found: Found,
    results: Path,
    manifest: dict[str, Any],
    completions: list[dict[str, Any]],
    rejects: list[dict[str, Any]],
) -> None:
    counts = manifest["counts"]
    found.expect(counts["accepted"] == len(completions), f"manifest: {counts} but {len(completions)} completions")
    found.expect(counts["rejected"] == len(rejects), f"manifest: {counts} but {len(rejects)} rejects")
    total = counts["accepted"] + counts["rejected"] + counts["unusable"]
    found.expect(total == counts["input"], f"manifest: the counts do not add up: {counts}")
    verdicts = manifest["verdicts"]
    found.expect(sum(verdicts.values()) == counts["usable"], f"manifest: verdicts {verdicts} of {counts['usable']}")
    ended = Counter(record["finish_reason"] for record in completions)
    turns = sum(sum(message["role"] == "assistant" for message in record["messages"]) for record in completions)
    found.expect(
        sum(manifest["finish_reasons"].values()) == turns and set(ended) <= set(manifest["finish_reasons"]),
        f"manifest: finish reasons {manifest['finish_reasons']} of {turns} turns",
    )
    for key, name in (("dataset", "completions"), ("rejects", "rejected")):
        path = results / "dataset" / f"{name}.jsonl.zst"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found.expect(manifest[key]["sha256"] == digest, f"manifest: sha256 of {name} is {digest}")
        found.expect(manifest[key]["bytes"] == len(read_frame(path)), f"manifest: bytes of {name}")
    for key, records in (("accepted", completions), ("rejected", rejects)):
        in_all = sum(shard[key] for shard in manifest["shards"])
        found.expect(in_all == len(records), f"manifest: {in_all} {key} over all shards, {len(records)} there")


def _check_parts(found: Found, results: Path, wholes: dict[str, list[dict[str, Any]]]) -> None:
    for name, whole in wholes.items():
        try:
            parts = [
                record
                for path in sorted(results.joinpath(name).glob("[0-9]*.jsonl.zst"))
                for record in read_lines(path)
            ]
        except (ValueError, zstandard.ZstdError) as error:
            found.problems.append(f"a shard's file cannot be read: {error}")
            continue
        found.expect(parts == whole, f"the shards' {name} are not the dataset's")


def _check_journals(
    found: Found,
    results: Path,
    completions: list[dict[str, Any]],
    kept: dict[tuple[str, int], tuple[str, str]],
    journals_damaged: bool,
) -> None:
    entries, found.damaged = read_journals(results / "journals")
    found.entries = len(entries)
    found.expect(journals_damaged or not found.damaged, f"{found.damaged} damaged journal lines that nobody made")
    times = Counter((e["id"], e["fingerprint"], e["attempt"]) for e in entries if e["kind"] == "answer")
    double = {key: count for key, count in times.items() if count != 1}
    found.expect(not double, f"finished requests that were sent again: {double}")
    answers = {(e["id"], e["seed"]): _texts(e["answer"]) for e in entries if e["kind"] == "answer"}
    for record in completions:
        key = (record["id"], record["sampling"]["seed"])
        final = _texts(record["messages"][-1])
        found.expect(journals_damaged or key in answers, f"{key}: its answer is in no journal")
        found.expect(answers.get(key, final) == final, f"{key}: the journal has another answer")
        if record["id"] in {name for name, _ in kept}:
            mine = {text for (name, _), text in kept.items() if name == record["id"]}
            said = {_texts(message) for message in record["messages"] if message["role"] == "assistant"}
            found.expect(mine <= said, f"{key}: an answer that was finished earlier is not in the result")


def _check_door(found: Found, results: Path, completions: list[dict[str, Any]], asked: list[Asked]) -> None:
    """Against what the door saw: no made-up answer, and nothing asked once its answer was in the journal."""
    if not asked:
        return
    given: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for one in asked:
        if one.answer:
            given.setdefault(one.key, set()).add(one.answer)
    prompts = {}
    for record in completions:
        messages = record["messages"][:-1]
        key = key_of(messages, record["sampling"]["seed"])
        prompts[(record["id"], record["sampling"]["seed"])] = key
        found.expect(
            _texts(record["messages"][-1]) in given.get(key, set()), f"{record['id']}: no server gave this answer"
        )
    for entry in read_journals(results / "journals")[0]:
        key = prompts.get((entry["id"], entry["seed"]))
        if entry["kind"] != "answer" or key is None:
            continue
        late = [one for one in asked if one.key == key and one.at > entry["at"]]
        found.asked_again += len(late)
        found.expect(not late, f"{entry['id']}: asked {len(late)} times after its answer was in the journal")


def _ask_again(
    found: Found, completions: list[dict[str, Any]], oracle: str, template: dict[str, Any], sample: int, seed: int
) -> None:
    """Every answer is what the model says to that prompt under that seed: a sample is asked for again."""
    for record in random.Random(seed).sample(completions, min(sample, len(completions))):
        history = [
            {key: value for key, value in message.items() if key != "reasoning_content"}
            for message in record["messages"][:-1]
        ]
        body = template | {"messages": history, "seed": record["sampling"]["seed"]}
        response = requests.post(f"{oracle}/v1/chat/completions", json=body, timeout=120)
        again = _texts(response.json()["choices"][0]["message"]) if response.ok else ("", response.text)
        found.expect(
            again == _texts(record["messages"][-1]),
            f"{record['id']}: a fresh server says {again}, the dataset {_texts(record['messages'][-1])}",
        )
