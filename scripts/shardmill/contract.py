"""What a run promises: the settings that decide its answers, locked by its first start.

Answers of two kinds are never mixed in one run, and two days of GPU time are not thrown away by an
edited digit: a change of these settings is refused unless it is asked for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson

from .config import Config
from .errors import UserError
from .files import canonical_json, read_json_or_none, sha256_file, sha256_hex, write_json
from .layout import Layout


def answer_settings(config: Config) -> dict[str, Any]:
    """All that decides an answer and is known before the model is there; never what does not.

    Ports, concurrency, GPUs, restarts and speculative decoding are left out on purpose.

    Raises:
        UserError: if the chat template's file cannot be read.
    """
    prompts = config.prompts
    return {
        "model": {"source": config.model.source, "chat_template": _template_digest(config.model.chat_template)},
        "prompts": {
            "field": prompts.field,
            "id_field": prompts.id_field,
            "turns": prompts.turns,
            "system": prompts.system,
        },
        "sampling": config.sampling.model_dump(),
        "thinking": config.thinking.model_dump(),
        **_deciding_engine_settings(config),
    }


def _deciding_engine_settings(config: Config) -> dict[str, Any]:
    """What of the engine's settings changes its arithmetic, or what is kept of an answer.

    `model.files` shows in the model's digest; pass-through arguments and external servers are the user's word.
    """
    if config.engine.kind != "sglang":
        return {}
    sglang = config.engine.sglang
    names = ("quantization", "kv_cache_dtype", "reasoning_parser", "tool_call_parser")
    return {"engine": {name: getattr(sglang, name) for name in names} | {"mamba_ssm_dtype": sglang.mamba.ssm_dtype}}


def _template_digest(path: str | None) -> str | None:
    try:
        return sha256_file(path) if path is not None else None
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=f"model.chat_template {path}") from None


def answer_fingerprint(config: Config) -> str:
    """Hash of `answer_settings`: equal exactly when the same model would be asked in the same way."""
    return sha256_hex(canonical_json(answer_settings(config)))[:32]


def request_fingerprint(
    answers: str, model_digest: str, messages: list[dict[str, Any]], tools: list[Any] | None, overrides: dict[str, Any]
) -> str:
    """Identity of one request: what is asked, of what, and how. The key that a resume goes by.

    Args:
        answers: the run's `answer_fingerprint`.
        model_digest: content hash of the model's files.
        messages, tools, overrides: the conversation up to this turn, and the prompt's own settings.
    """
    return sha256_hex(canonical_json([answers, model_digest, messages, tools, overrides]))[:32]


@dataclass(frozen=True)
class Contract:
    """What `run.json` holds."""

    answers: dict[str, Any]
    shard_size: int
    model_digest: str | None

    @classmethod
    def read(cls, layout: Layout) -> Contract | None:
        """The locked contract, or None in a run that never started.

        Raises:
            UserError: if the file is there but holds no contract; to go on without it could mix answers.
        """
        data = read_json_or_none(layout.contract)
        if data is None and not layout.contract.exists():
            return None
        try:
            answers, size, digest = data["answers"], data["shard_size"], data["model_digest"]
            if isinstance(answers["model"], dict) and isinstance(size, int) and isinstance(digest, str | None):
                return cls(answers, size, digest)
        except (TypeError, KeyError):
            pass
        raise UserError(
            "holds no contract of a run",
            where=str(layout.contract),
            hint="put it back from a copy, or remove it if the settings are still those of this run's answers",
        )

    def write(self, layout: Layout) -> None:
        write_json(
            layout.contract,
            {
                "answers": self.answers,
                "shard_size": self.shard_size,
                "model_digest": self.model_digest,
                "written_at": time.time(),
            },
            sealed=True,
        )


def holds_results(layout: Layout) -> bool:
    """Whether any answer of this run is on disk."""
    journals, completions = layout.journal("x").parent, layout.completions("x").parent
    return any(path.stat().st_size for path in journals.glob("*.jsonl")) or any(completions.glob("*.jsonl.zst"))


def check(config: Config) -> None:
    """Refuse settings that would mix answers of two kinds, or cut shards anew, in a run that holds results.

    Raises:
        UserError: naming what changed from what to what, and the ways on.
    """
    layout = config.layout
    locked = Contract.read(layout)
    if locked is None or not holds_results(layout):
        return
    where = f"run {config.run.name}"
    changes = _differences(locked.answers, answer_settings(config))
    if changes and not config.run.regenerate:
        raise UserError(
            f"{', '.join(changes)}, but this run holds answers made under the old settings",
            where=where,
            hint="use another `run.name`, or set `run.regenerate: true` to make every shard again",
        )
    if locked.shard_size != config.shards.size and not (config.run.recut or config.run.regenerate):
        raise UserError(
            f"shards.size changed from {locked.shard_size} to {config.shards.size}, but this run holds results",
            where=where,
            hint="set it back, or set `run.recut: true` to cut anew; finished answers are carried over",
        )


def lock(config: Config) -> None:
    """Write the contract at the start of a run, after `check` passed. Keeps the locked model."""
    layout = config.layout
    old = Contract.read(layout)
    answers = answer_settings(config)
    # Another chat template leaves the model's files, and so their digest, as they were.
    same_model = old is not None and old.answers["model"].get("source") == config.model.source
    known = old.model_digest if old and same_model else _digest_at_hand(config)
    new = Contract(answers, config.shards.size, known)
    if old is None or canonical_json(vars(new)) != canonical_json(vars(old)):
        new.write(layout)


def _digest_at_hand(config: Config) -> str | None:
    """The digest of the model that this run has obtained already, should its contract have been lost."""
    manifest = read_json_or_none(config.layout.model_manifest)
    return (
        manifest.get("digest") if isinstance(manifest, dict) and manifest.get("source") == config.model.source else None
    )


def lock_model(config: Config, digest: str) -> None:
    """Bind the run to the content of its model.

    Raises:
        UserError: if the run holds answers of a model with other content under the same name.
    """
    layout = config.layout
    locked = Contract.read(layout) or Contract(answer_settings(config), config.shards.size, None)
    if locked.model_digest == digest:
        return
    if locked.model_digest and holds_results(layout) and not config.run.regenerate:
        raise UserError(
            f"the files of {config.model.source} changed (digest {locked.model_digest[:12]} became {digest[:12]}), "
            "but this run holds answers of the old ones",
            where=f"run {config.run.name}",
            hint="use another `run.name`, or set `run.regenerate: true` to make every shard again",
        )
    Contract(locked.answers, locked.shard_size, digest).write(layout)


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """What changed between two nested mappings, as "path changed from a to b".

    Equal is what has the same canonical JSON, as in a fingerprint: 1 and 1.0, or null and nothing at
    all, are not.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[str] = []
        for key in [*old, *(key for key in new if key not in old)]:
            found += _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}.{key}" if path else key)
        return found
    if old is not _ABSENT and new is not _ABSENT and canonical_json(old) == canonical_json(new):
        return []
    before, after = _shown(old, new), _shown(new, old)
    return [f"{path} changed from {before} to {after}"]


_ABSENT = object()


def _shown(value: Any, other: Any) -> str:
    """`value` on one line; a long one from shortly before where it differs from `other`."""
    text, beside = _on_one_line(value), _on_one_line(other)
    if len(text) <= 80:
        return text
    pairs = enumerate(zip(text, beside, strict=False))
    start = max(0, next((at for at, (a, b) in pairs if a != b), min(len(text), len(beside))) - 20)
    return ("..." if start else "") + text[start : start + 74] + ("..." if start + 74 < len(text) else "")


def _on_one_line(value: Any) -> str:
    if value is _ABSENT or value is None:
        return "nothing" if value is _ABSENT else "null"
    text = value if isinstance(value, str) and value else orjson.dumps(value).decode()
    return text if text.isprintable() else ascii(text)
