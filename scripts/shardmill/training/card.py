"""The dataset card: README.md with a YAML head, as the Hugging Face hub reads it.

Names, paths and settings come from users and from data, so all of them are escaped: nothing that a record
holds can become markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

import orjson
import yaml

from ..config import Config

# https://huggingface.co/docs/hub/datasets-cards: the values that `size_categories` knows.
_SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"),
)
_MARKUP = re.compile(r"([\\`*_\[\]<>|~&$#])")
_FILES = {
    "completions": "completions.jsonl.zst",
    "conversations": "training/conversations.jsonl.zst",
    "tokens": "training/tokens.parquet",
}
_FIELDS = {
    "completions": (
        ("id", "the prompt's id"),
        ("messages", "the conversation with its answers: `role`, `content`, `reasoning_content`, `tool_calls`"),
        ("finish_reason", "why the answer ended"),
        ("usage", "tokens as the engine counted them"),
        ("sampling", "how it was drawn, its own seed included"),
        ("verdict", "what the checks said of it"),
        ("attempts", "every attempt at it, with its verdict"),
        ("fingerprint", "hash of all that decided the answer"),
        ("token\\_ids", "`prompt` and `completion`, where the engine returned them"),
    ),
    "conversations": (
        ("id", "the prompt's id; with a row per turn followed by `:` and the turn's number"),
        ("status", "always `success`"),
        ("conversations", "messages: `role`, `content`, `reasoning_content`; tool calls and `tools` as JSON text"),
    ),
    "tokens": (
        ("id", "the prompt's id"),
        ("turn", "number of the last supervised turn, from 0"),
        ("input\\_ids", "the conversation in the model's own chat template"),
        ("loss\\_mask", "1 for each token that the model made, the thought and the end token included, else 0"),
        ("length", "number of tokens"),
    ),
}


def dataset_card(config: Config, manifest: dict[str, Any], report: dict[str, Any]) -> str:
    """The card as text.

    Args:
        manifest: the dataset's manifest.
        report: the training view's report.
    """
    names = ["completions", *config.output.training.formats]
    return (
        _head(config, manifest, names)
        + f"# {plain(config.run.name)}\n\n"
        + _introduction(config, manifest)
        + _section("Model and sampling", _table(("setting", "value"), _settings(config, manifest)))
        + _section("Counts", _table(("what", "records"), _counts(manifest)))
        + _section("Quality", _quality(config, manifest, report))
        + _section("Files and fields", "\n".join(_files(name) for name in names))
        + _section("Licence", _licence(config))
    )


def plain(value: Any) -> str:
    """A value as text without markup: on one line, what cannot be seen as an escape, Markdown's signs escaped."""
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return _MARKUP.sub(r"\\\1", shown)


def size_category(records: int) -> str:
    """The hub's category for a number of records."""
    return next((name for limit, name in _SIZES if records < limit), "1B<n<10B")


def _head(config: Config, manifest: dict[str, Any], names: list[str]) -> str:
    training = config.output.training
    tags = ["synthetic", "text", "shardmill"]
    if training.formats:
        tags.append("speculative-decoding")
    if config.thinking.enabled:
        tags.append("reasoning")
    head: dict[str, Any] = {"license": training.license} if training.license else {}
    head |= {
        "pretty_name": config.run.name,
        "task_categories": ["text-generation"],
        "tags": tags,
        "size_categories": [size_category(manifest["counts"]["accepted"])],
        "configs": [
            {"config_name": name, "data_files": _FILES[name], **({"default": True} if name == names[0] else {})}
            for name in names
        ],
    }
    text = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    open_licence = "" if training.license else "# license: yours to choose; see below\n"
    return f"---\n{open_licence}{text}---\n\n"


def _introduction(config: Config, manifest: dict[str, Any]) -> str:
    counts, model = manifest["counts"], manifest.get("model") or {}
    thinking = {True: " with thinking on", False: " with thinking off", None: ""}[config.thinking.enabled]
    turns = "the last user turn" if config.prompts.turns == "last" else "each user turn, on the regenerated history"
    what = f"{counts['accepted']:,} completions of {plain(_model_name(model, config))}{thinking}"
    return (
        f"{what}, made by Shardmill {plain(manifest['shardmill'])}. Every record of the input was answered at {turns}. "
        "Each answer was judged as it came; bad ones were asked for again with a new seed, or rejected. The result was "
        "proven: completions and rejects together are exactly the input. `manifest.json` holds counts, hashes and all "
        "settings.\n"
    )


def _model_name(model: dict[str, Any], config: Config) -> str:
    """The model's source; of a local one only its name, for paths of a machine are nobody's business."""
    source = str(model.get("source") or config.model.source)
    return PurePath(source).name if model.get("kind") == "local" else source.partition("#")[0]


def _settings(config: Config, manifest: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    model, engine = manifest.get("model") or {}, manifest.get("engine") or {}
    settings = manifest["config"]
    yield "model", _model_name(model, config)
    yield "revision", model.get("revision") or "not given"
    yield "content of the model (digest)", manifest.get("model_digest") or "not known"
    yield "engine", engine.get("kind") or config.engine.kind
    yield "thinking", {True: "on", False: "off", None: "left to the model"}[settings["thinking"]["enabled"]]
    for key, value in settings["sampling"].items():
        if value not in ([], {}):
            yield key, value
    yield "prompts", PurePath(str(manifest["prompts"]["path"])).name
    yield "system message", settings["prompts"]["system"] or "none of our own"


def _counts(manifest: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    counts = manifest["counts"]
    for key in ("input", "accepted", "rejected", "unusable", "retries"):
        yield key, f"{counts[key]:,}"
    for key, value in sorted(manifest["usage"].items()):
        yield key, f"{value:,}"


def _quality(config: Config, manifest: dict[str, Any], report: dict[str, Any]) -> str:
    total = sum(manifest["verdicts"].values())
    verdicts = (
        (name, f"{count:,}", f"{count / total:.2%}")
        for name, count in sorted(manifest["verdicts"].items(), key=lambda item: (-item[1], item[0]))
    )
    columns = ("min", "p1", "p5", "p25", "median", "p75", "p95", "max", "mean")
    counted = "supervised tokens" if report["supervised_tokens"]["source"] == "loss_mask" else "answer tokens"
    shares = (
        (counted, *(report["supervised_tokens"][column] for column in columns)),
        ("sequence length", *(report["length"][column] for column in columns)),
    )
    short, thoughtless = report["short"], report["without_thought"]
    words = [
        f"- fewer than {short['below']} supervised tokens: {short['samples']:,} of {report['samples']:,} samples",
        f"- without a thought: {thoughtless['samples']:,}",
    ]
    if (left_out := sum(report["unmasked"].values())) > 0:
        words.append(f"- left out because their answers could not be masked: {left_out:,}")
    limit = report["too_long"]
    if limit["max_length"] is not None:
        dropped = limit["dropped"] + limit["truncated_to_nothing"]
        words.append(
            f"- longer than {limit['max_length']:,} tokens: {dropped:,} dropped, {limit['truncated']:,} truncated"
        )
    return (
        "What the checks said of every prompt in the end; `quality.actions` decides which verdicts are accepted:\n\n"
        + _table(("verdict", "prompts", "share"), verdicts)
        + "\nThe training samples:\n\n"
        + _table(("", *columns), shares)
        + "\n"
        + "\n".join(words)
        + "\n"
    )


def _files(name: str) -> str:
    return f"`{_FILES[name]}`\n\n" + "".join(f"- **{field}**: {meaning}\n" for field, meaning in _FIELDS[name])


def _licence(config: Config) -> str:
    chosen = config.output.training.license
    said = f"{plain(chosen)}, as its publisher chose." if chosen else "Left to the publisher of this dataset to choose."
    return f"{said} The licences of the model and of the prompts may bind what is made with them.\n"


def _section(title: str, body: str) -> str:
    return f"\n## {title}\n\n{body}"


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join("-" if cell is None else plain(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
