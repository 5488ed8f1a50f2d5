"""Proving a finished dataset again, from its files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from .errors import UserError
from .files import iter_lines, iter_zstd_chunks, read_json, sha256_file
from .ids import IdsDigest


def verify(folder: Path) -> dict[str, Any]:
    """Check a dataset folder against its manifest; returns the manifest.

    Checked: the files' hashes, counts, that no id is there twice or missing (by
    the digest of the input's ids), input order, and that every completion ends in an assistant turn that
    says something.

    Raises:
        UserError: with what is wrong, where, and both values.
    """
    manifest_path = folder / "manifest.json"
    try:
        manifest = read_json(manifest_path)
    except FileNotFoundError:
        raise UserError("there is no manifest, so nothing can be proven", where=str(manifest_path)) from None
    counts = manifest["counts"]
    ids = _verify_file(folder, manifest["dataset"], is_reject=False)
    ids.merge(_verify_file(folder, manifest["rejects"], is_reject=True))
    _same("number of ids", ids.count, counts["usable"], folder)
    _same("digest of all ids", ids.hexdigest(), manifest["prompts"]["ids_digest"], folder)
    _same("records", counts["accepted"] + counts["rejected"] + counts["unusable"], counts["input"], folder)
    for key in ("accepted", "rejected", "unusable"):
        _same(f"{key} over all shards", sum(shard[key] for shard in manifest["shards"]), counts[key], folder)
    return manifest


def _verify_file(folder: Path, part: dict[str, Any], *, is_reject: bool) -> IdsDigest:
    """Check one file; returns the digest of its ids."""
    path = folder / part["file"]
    if not path.exists():
        raise UserError("is missing", where=str(path))
    _same("sha256", sha256_file(path), part["sha256"], path)
    ids, records, last_line = IdsDigest(), 0, 0
    for line in iter_lines(iter_zstd_chunks(path)):
        record = orjson.loads(line)
        records += 1
        if record["line"] <= last_line:
            raise UserError(f"record {records} (line {record['line']}) is out of input order", where=str(path))
        last_line = record["line"]
        if record["id"] is not None:
            ids.add(record["id"])
        if not is_reject:
            _verify_completion(record, path)
    _same("records", records, part["records"], path)
    _same("digest of the ids", ids.hexdigest(), part["ids_digest"], path)
    return ids


def _verify_completion(record: dict[str, Any], path: Path) -> None:
    last = record["messages"][-1]
    says_something = bool((last.get("content") or "").strip() or last.get("tool_calls"))
    if last["role"] != "assistant" or not says_something:
        raise UserError(f"completion {record['id']} does not end in an answer", where=str(path))


def _same(what: str, found: Any, expected: Any, where: Path) -> None:
    if found != expected:
        hint = "remove the folder `dataset` and run again: it is merged anew from the shards"
        raise UserError(f"{what} is {found}, but the manifest says {expected}", where=str(where), hint=hint)
