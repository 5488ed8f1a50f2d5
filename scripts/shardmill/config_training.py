"""The section of the configuration about the training view, and what cannot work in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from .config_section import Section

if TYPE_CHECKING:
    from .config import Config

_GGUF = re.compile(r"\.gguf(#.*)?$", re.IGNORECASE)


class Training(Section):
    """The dataset as trainers of drafters read it, with a report and a dataset card. Nothing of it by default."""

    formats: list[Literal["conversations", "tokens"]] = Field(
        default_factory=list,
        description="`conversations`: JSON lines that SpecForge and DeepSpec read; `tokens`: Parquet with `input_ids` "
        "and `loss_mask`, for models that bring a tokenizer. Empty: no training view.",
    )
    multi_turn: Literal["whole", "per_turn"] = Field(
        "whole",
        description="`whole`: a row per conversation; `per_turn`: a row per answered turn, the thoughts of earlier "
        "turns stripped.",
    )
    loss_on: Literal["last", "all"] = Field(
        "last",
        description="Turns of a row that `tokens` supervises: the `last`, or `all` that the model answered in this "
        "run. Turns that the input brought are context and never supervised.",
    )
    max_length: int | None = Field(
        None, ge=1, description="Longest sequence of `tokens`, the prompt included. Left out: no limit."
    )
    too_long: Literal["drop", "truncate"] = Field(
        "drop", description="What is done with a longer one: `drop` it, or `truncate` its end. Both are counted."
    )
    min_supervised_tokens: int | None = Field(
        None,
        ge=0,
        description="A sample with fewer supervised tokens counts as short; left out: `quality.min_supervised_tokens`.",
    )
    max_short_rate: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of short samples above which there is no training view, only an error that shows the "
        "report. A sample whose answer cannot be found in the template's rendering counts as short.",
    )
    max_no_thought_rate: float = Field(
        0.01, ge=0, le=1, description="The same for samples without a thought, with `thinking.enabled: true`."
    )
    check_share: float = Field(
        0.02,
        ge=0,
        le=1,
        description="Share of the samples with token ids of the engine's that are rendered again and compared; of the "
        "first hundred all.",
    )
    max_mismatch_rate: float = Field(
        0.01, ge=0, le=1, description="Share of compared samples that may differ from the template's rendering."
    )
    license: str | None = Field(
        None,
        min_length=1,
        description="Licence identifier for the dataset card, such as `apache-2.0`. Left out: the card leaves it open.",
    )


def training_conflicts(config: Config) -> list[tuple[str, str]]:
    """Combinations that cannot work, as (key to change, what is wrong and what to write)."""
    training = config.output.training
    found: list[tuple[str, str]] = []
    if len(set(training.formats)) != len(training.formats):
        found.append(("output.training.formats", f"names a format twice ({', '.join(training.formats)})"))
    has_tokens = "tokens" in training.formats
    if has_tokens and _GGUF.search(config.model.source.strip()):
        text = (
            "asks for `tokens`, but a GGUF file brings no tokenizer files; leave `tokens` out, or take the model from "
            "a folder or repo that has them"
        )
        found.append(("output.training.formats", text))
    if training.max_length is not None and not has_tokens:
        found.append(("output.training.max_length", "is of use only with `tokens` in `output.training.formats`"))
    return found
