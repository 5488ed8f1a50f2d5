"""A finished shard on disk: its completions, its rejects and its statistics."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from .config import Config
from .contract import Contract
from .conversation import Conversation, Terms, assistant_message
from .errors import UserError
from .files import read_json, read_json_or_none, write_json, zstd_writer
from .ids import IdsDigest
from .journal import Journal
from .layout import Layout

# Names that the pipeline gives to a completion's own fields; an input field of that name is kept as `input_<name>`.
OWN_FIELDS = frozenset(
    "id line messages tools finish_reason usage sampling attempts turns server seconds fingerprint verdict "
    "reason detail answer token_ids".split()
)


def shard_entry(layout: Layout, shard: str) -> dict[str, Any]:
    """The prompt index's entry of a shard.

    Raises:
        UserError: if the index does not know it.
    """
    index = read_json(layout.prompt_index)
    for entry in index["shards"]:
        if entry["name"] == shard:
            return entry
    raise UserError(
        f"no such shard; there are {len(index['shards'])}", where=f"shard {shard}", hint="see prompts/index.json"
    )


def write_shard(
    config: Config,
    shard: str,
    conversations: list[Conversation],
    journal: Journal,
    *,
    entry: dict[str, Any],
    terms: Terms,
    sent: int,
    seconds: float,
    hedged: int = 0,
) -> dict[str, Any]:
    """Write the shard's files in prompt order, statistics last; returns the statistics."""
    layout = config.layout
    accepted = [c for c in conversations if c.outcome == "accepted"]
    rejected = [c for c in conversations if c.outcome == "rejected"]
    if len(accepted) + len(rejected) != len(conversations):
        raise AssertionError("a conversation without outcome reached the shard's files")
    reject_part = write_part(layout.rejects(shard), (reject_record(c, journal) for c in rejected))
    part = write_part(layout.completions(shard), (completion_record(config, c, journal) for c in accepted))
    usage: Counter[str] = Counter()
    for conversation in accepted:
        for answer in conversation.answers:
            usage.update({key: value for key, value in answer["usage"].items() if isinstance(value, int)})
    stats = {
        "shard": shard,
        "prompts_digest": entry["digest"],
        "answers_fingerprint": terms.answers,
        "model_digest": terms.model_digest,
        "prompts": len(conversations),
        "accepted": len(accepted),
        "rejected": len(rejected),
        "unusable": entry["unusable"],
        "completions": part,
        "rejects": reject_part,
        "verdicts": dict(Counter(c.verdict for c in conversations)),
        "finish_reasons": dict(Counter(a["finish_reason"] for c in accepted for a in c.answers)),
        "retries": sum(max(0, len(c.attempts) - max(1, len(c.answers))) for c in conversations),
        "usage": dict(usage),
        "requests_sent": sent,
        "requests_hedged": hedged,
        "journal_damaged_lines": journal.damaged_lines,
        "seconds": round(seconds, 3),
        "finished_at": round(time.time(), 3),
    }
    write_json(layout.stats(shard), stats, sealed=True)
    return stats


def completion_record(config: Config, conversation: Conversation, journal: Journal) -> dict[str, Any]:
    """An accepted prompt with its answers: the record of the dataset."""
    prompt, answers = conversation.prompt, conversation.answers
    last = answers[-1]
    seed = last["seed"]
    overrides = last.get("overrides") or {}
    sampling = {key: value for key, value in config.sampling.model_dump().items() if key != "extra"}
    record: dict[str, Any] = {
        "id": conversation.id,
        "line": prompt["line"],
        **_input_fields(prompt),
        "messages": conversation.messages,
        "finish_reason": last["finish_reason"],
        "usage": last["usage"],
        "sampling": {**sampling, **config.sampling.extra, **overrides, "seed": seed},
        "verdict": conversation.verdict,
        "attempts": conversation.attempts,
        "server": last["server"],
        "seconds": last["seconds"],
        "fingerprint": last["fingerprint"],
    }
    if prompt.get("tools"):
        record["tools"] = prompt["tools"]
    if conversation.terms.all_turns:
        keys = ("turn", "attempt", "seed", "finish_reason", "usage", "server", "seconds", "fingerprint")
        record["turns"] = [{key: answer[key] for key in keys} for answer in answers]
    if config.output.token_ids:
        record |= _token_ids(conversation, journal)
    return record


def reject_record(conversation: Conversation, journal: Journal) -> dict[str, Any]:
    """A rejected prompt with the reason, and with its last answer if there was one."""
    prompt = conversation.prompt
    record = {
        "id": conversation.id,
        "line": prompt["line"],
        **_input_fields(prompt),
        "messages": conversation.messages,
        "reason": conversation.verdict,
        "detail": conversation.detail,
        "attempts": conversation.attempts,
    }
    last = _last_answer(conversation, journal)
    if last is not None:
        record["answer"] = {**assistant_message(last), "finish_reason": last["finish_reason"], "usage": last["usage"]}
    return record


def is_complete(layout: Layout, shard: str, *, prompts_digest: str, answers: str, model_digest: str | None) -> bool:
    """Whether a shard's files are there and were made from these prompts under these settings.

    Args:
        model_digest: the run's locked model; None if none is locked yet, then nothing is complete.
    """
    stats = read_json_or_none(layout.stats(shard))
    if _made_of(stats) != (prompts_digest, answers, model_digest):
        return False
    return _holds(layout.completions(shard), stats["completions"]) and _holds(layout.rejects(shard), stats["rejects"])


def _holds(path: Path, part: dict[str, Any]) -> bool:
    """Whether a file is there and of the size that its shard wrote; the merge looks at the content."""
    try:
        return path.stat().st_size == part["compressed_bytes"]
    except OSError:
        return False


def set_cut_aside(layout: Layout, shard: str) -> Path | None:
    """Set completions aside whose files are not those that were written; returns their new name, or None.

    So that they are made again, from the journal, as if they had been removed. Snakemake looks at completions alone,
    and takes missing servers for no reason to make them again.
    """
    stats, path = read_json_or_none(layout.stats(shard)), layout.completions(shard)
    if not path.exists():
        return None
    whole = stats and _holds(path, stats["completions"]) and _holds(layout.rejects(shard), stats["rejects"])
    return None if whole else set_aside(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that it is made again while whatever it still holds is there to be looked at."""
    target = path.with_name(f"{path.name}.damaged")
    path.replace(target)
    return target


def is_answered(layout: Layout, shard: str, *, prompts_digest: str, answers: str, model_digest: str | None) -> bool:
    """Whether a shard was finished from these prompts under these settings, and its journal is still there.

    Then its files can be made again with no server.
    """
    stats = read_json_or_none(layout.stats(shard))
    return layout.journal(shard).exists() and _made_of(stats) == (prompts_digest, answers, model_digest)


def _made_of(stats: Any) -> tuple[Any, ...] | None:
    if not isinstance(stats, dict):
        return None
    return stats.get("prompts_digest"), stats.get("answers_fingerprint"), stats.get("model_digest")


def _input_fields(prompt: dict[str, Any]) -> dict[str, Any]:
    """The input record's other fields, out of the way of the pipeline's own."""
    return {f"input_{k}" if k in OWN_FIELDS else k: v for k, v in (prompt.get("fields") or {}).items()}


def _last_answer(conversation: Conversation, journal: Journal) -> dict[str, Any] | None:
    fingerprint = conversation.current_fingerprint
    for entry in reversed(journal.entries(conversation.id, fingerprint)):
        if entry["kind"] == "answer":
            return entry["answer"]
    return None


def _token_ids(conversation: Conversation, journal: Journal) -> dict[str, Any]:
    """Token ids of the last turn, as the engine returned them; nothing where it returned none."""
    last = conversation.answers[-1]
    for entry in reversed(journal.entries(conversation.id, last["fingerprint"])):
        answer = entry.get("answer")
        if answer and entry["seed"] == last["seed"] and answer.get("completion_token_ids") is not None:
            ids = {"prompt": answer.get("prompt_token_ids"), "completion": answer["completion_token_ids"]}
            return {"token_ids": ids}
    return {}


def write_part(path: Path, records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Write records as one zstd file; returns its count, sizes and hashes.

    `content_sha256` is over the uncompressed lines, `ids_digest` over the set of ids.
    """
    content, ids, size, count = hashlib.sha256(), IdsDigest(), 0, 0
    with zstd_writer(path) as stream:
        for record in records:
            line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
            stream.write(line)
            content.update(line)
            ids.add(record["id"])
            size += len(line)
            count += 1
    return {
        "records": count,
        "bytes": size,
        "compressed_bytes": path.stat().st_size,
        "content_sha256": content.hexdigest(),
        "ids_digest": ids.hexdigest(),
    }


def locked_model_digest(layout: Layout) -> str | None:
    """The model digest that the run is bound to, if it is bound yet."""
    locked = Contract.read(layout)
    return locked.model_digest if locked else None
