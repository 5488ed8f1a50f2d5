"""The training view: one pass over the dataset that writes every format, the report and the dataset card."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from .. import __version__
from ..config import Config
from ..errors import UserError
from ..files import iter_zstd_lines, read_json, sha256_file, write_bytes, write_json, zstd_writer
from ..logs import get_logger
from ..model.download import read_manifest
from .card import dataset_card
from .masking import Template
from .report import Report
from .rows import conversation_lines, turn_rows, whole_row
from .tokenizer import load_tokenizer, template_arguments
from .tokens import Tokenizing, token_writer

log = get_logger(__name__)

PROGRESS_SECONDS = 60.0
CHECK_EVERY = 1000  # completions between two looks at the gates

Add = Callable[[dict[str, Any]], None]


def make_view(config: Config) -> dict[str, Any]:
    """Write the formats that `output.training` asks for, `report.json` and the dataset card; returns the report.

    Nothing is written unless the report passes its gates.

    Raises:
        UserError: with the report, where it does not; or if dataset, model or tokenizer are not what they must be.
    """
    layout = config.layout
    manifest = read_json(layout.manifest)
    formats = config.output.training.formats
    source = "loss_mask" if "tokens" in formats else "usage"
    report = Report(config, manifest["dataset"]["records"], source)
    with ExitStack() as stack:
        adds, finishes = _open(config, manifest, report, stack)
        _read_all(layout.dataset, manifest, report, adds)
        for finish in finishes:
            finish()
        report.check()
    result = report.to_json() | {
        "files": {name: _described(layout.training(name)) for name in formats},
        "dataset_sha256": manifest["dataset"]["sha256"],
        "made_at": round(time.time(), 3),
    }
    for name in ("conversations", "tokens"):
        if name not in formats:
            # Left from an earlier setting, it would pass for a view of this dataset.
            layout.training(name).unlink(missing_ok=True)
    write_bytes(layout.card, dataset_card(config, manifest, result).encode())
    write_json(layout.training_report, result)
    log.info("training view:\n%s", report.table())
    return result


def _open(
    config: Config, manifest: dict[str, Any], report: Report, stack: ExitStack
) -> tuple[list[Add], list[Callable[[], None]]]:
    """What is to be done with each completion, and at the end. Files are closed, or taken back, by `stack`."""
    training, layout = config.output.training, config.layout
    adds: list[Add] = []
    finishes: list[Callable[[], None]] = []
    if "conversations" in training.formats:
        stream = stack.enter_context(zstd_writer(layout.training("conversations"), level=config.output.zstd_level))
        adds.append(lambda record: [stream.write(line) for line in conversation_lines(record, training.multi_turn)])
    if "tokens" in training.formats:
        template = load_template(config)
        facts = {
            "shardmill": __version__,
            "model_digest": str(manifest["model_digest"]),
            "template_arguments": orjson.dumps(template.arguments).decode(),
        }
        writer = stack.enter_context(token_writer(layout.training("tokens"), facts))
        tokenizing = Tokenizing(template, training, report, writer.write)
        adds.append(tokenizing.add)
        finishes.append(tokenizing.flush)
    else:
        adds.append(lambda record: _count(config, record, report))
    return adds, finishes


def load_template(config: Config) -> Template:
    """The tokenizer and the chat template of the run's model.

    Raises:
        UserError: if the model brings none.
    """
    manifest = read_manifest(config)
    folder = Path(manifest["folder"])
    key = "output.training.formats"
    if not folder.is_dir():
        raise UserError(
            "the model's files are gone", where=str(folder), hint="remove model/manifest.json and run again"
        )
    settings = config.model
    tokenizer = load_tokenizer(
        folder, chat_template=settings.chat_template, trust_remote_code=settings.trust_remote_code
    )
    if tokenizer is None:
        raise UserError(
            f"asks for `tokens`, but the model brings no tokenizer files ({folder})", where=key, hint="leave it out"
        )
    if not tokenizer.chat_template:
        raise UserError(
            "asks for `tokens`, but the model brings no chat template",
            where=key,
            hint="name one in `model.chat_template`",
        )
    return Template(tokenizer, template_arguments(config))


def _read_all(path: Path, manifest: dict[str, Any], report: Report, adds: list[Add]) -> None:
    """Give every completion to each of `adds`."""
    hint = "remove it and run again"
    if not path.exists():
        raise UserError("is missing", where=str(path), hint="run the same command again")
    if sha256_file(path) != manifest["dataset"]["sha256"]:
        raise UserError("is not what its manifest says (hash differs)", where=str(path), hint=hint)
    said = time.monotonic()
    for line in iter_zstd_lines(path):
        record = orjson.loads(line)
        for add in adds:
            add(record)
        report.read += 1
        if report.read % CHECK_EVERY == 0:
            report.check_early()
        if time.monotonic() - said > PROGRESS_SECONDS:
            said = time.monotonic()
            log.info("training view: %s of %s completions", f"{report.read:,}", f"{report.completions:,}")
    if report.read != report.completions:
        problem = f"holds {report.read} completions, but its manifest says {report.completions}"
        raise UserError(problem, where=str(path), hint=hint)


def _count(config: Config, record: dict[str, Any], report: Report) -> None:
    """Without a tokenizer, what the engine counted stands for the masks."""
    training = config.output.training
    rows = turn_rows(record) if training.multi_turn == "per_turn" else [whole_row(record, training.loss_on)]
    for row in rows:
        if row.usage_tokens is None:
            report.add_unmasked(row.id, "not_counted", "the engine did not count its tokens")
        else:
            length = (row.prompt_tokens or 0) + row.usage_tokens
            report.add(row.usage_tokens, length, has_thought=row.has_thought)


def _described(path: Path) -> dict[str, Any]:
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
