"""A few answers of each verdict, for a person to read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ..config import Config
from ..errors import UserError
from ..files import iter_zstd_lines
from ..journal import decode_entry

EACH = 3  # examples of a verdict
SHARDS = 40  # that are looked into
JOURNAL_TAIL = 2 << 20  # bytes of an open shard's journal
TEXT = 600  # characters of a text that are shown


@dataclass(frozen=True)
class Example:
    """One judged answer; texts are cut in the middle where they are long."""

    prompt_id: str
    outcome: str
    prompt: str
    thought: str
    answer: str
    detail: str
    tokens: int | None


def find_examples(config: Config, stats: dict[str, dict[str, Any]]) -> dict[str, list[Example]]:
    """Up to `EACH` examples of each verdict.

    Rejects come from finished shards' reject files and open shards' journals, good answers from a finished shard.

    Args:
        stats: statistics of the finished shards, by shard.
    """
    found: dict[str, list[Example]] = {}
    for verdict, example in _all(config, stats):
        kept = found.setdefault(verdict, [])
        if len(kept) < EACH:
            kept.append(example)
    return found


def _all(config: Config, stats: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Example]]:
    layout = config.layout
    with_rejects = [shard for shard in sorted(stats) if stats[shard]["rejected"]]
    for shard in with_rejects[:SHARDS]:
        for record in _records(layout.rejects(shard)):
            yield record.get("reason") or "?", _of_reject(record)
    for shard in sorted(shard for shard in stats if stats[shard]["accepted"])[:1]:
        for record in _records(layout.completions(shard)):
            yield record.get("verdict") or "ok", _of_completion(record)
    journals = sorted((layout.root / "journals").glob("*.jsonl"))
    for path in [path for path in journals if path.stem not in stats][:SHARDS]:
        for entry in _tail(path):
            if isinstance(entry.get("verdict"), str):
                yield entry["verdict"], _of_entry(entry)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(UserError, OSError):
        for line in iter_zstd_lines(path):
            with contextlib.suppress(orjson.JSONDecodeError):
                yield orjson.loads(line)


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError), path.open("rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        handle.seek(max(0, size - JOURNAL_TAIL))
        for line in handle.read().split(b"\n"):
            if entry := decode_entry(line):
                yield entry


def _of_reject(record: dict[str, Any]) -> Example:
    answer = record.get("answer") or {}
    return _example(record["id"], "rejected", record.get("messages"), answer, record.get("detail"))


def _of_completion(record: dict[str, Any]) -> Example:
    *before, last = record.get("messages") or [{}]
    return _example(record["id"], "accepted", before, {**last, "usage": record.get("usage")}, "")


def _of_entry(entry: dict[str, Any]) -> Example:
    return _example(entry["id"], "judged", None, entry.get("answer") or {}, entry.get("detail"))


def _example(name: Any, outcome: str, messages: Any, answer: dict[str, Any], detail: Any) -> Example:
    asked = [m for m in messages or [] if isinstance(m, dict) and m.get("role") == "user"]
    tools = answer.get("tool_calls")
    text = _text(answer.get("content")) + (f"\n{orjson.dumps(tools).decode()}" if tools else "")
    return Example(
        prompt_id=str(name),
        outcome=outcome,
        prompt=cut(_text(asked[-1].get("content")) if asked else ""),
        thought=cut(_text(answer.get("reasoning_content"))),
        answer=cut(text),
        detail=cut(_text(detail)),
        tokens=(answer.get("usage") or {}).get("completion_tokens"),
    )


def _text(value: Any) -> str:
    if isinstance(value, list):  # content in parts
        return "\n".join(_text(part.get("text")) for part in value if isinstance(part, dict))
    return value if isinstance(value, str) else ""


def cut(text: str, length: int = TEXT) -> str:
    """`text`, its middle left out if it is long; what cannot be seen is shown as an escape."""
    if len(text) > length:
        text = f"{text[: length * 2 // 3]} [... {len(text) - length:,} characters ...] {text[-length // 3 :]}"
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )
