"""The section of the configuration about what an answer must be to count."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .config_section import Section

Action = Literal["accept", "retry", "reject"]


class VerdictActions(Section):
    """What is done about an answer that is not ok: `accept` it as it is, `retry` with a new seed, or `reject` it."""

    empty: Action = Field("retry", description="No text and no tool call, or nothing but blank characters.")
    no_reasoning: Action = Field("retry", description="Thinking is on and the answer holds no thought.")
    unexpected_reasoning: Action = Field("retry", description="Thinking is off and the answer holds a thought.")
    unclosed_thought: Action = Field("retry", description="`sampling.max_tokens` came before the end of the thought.")
    leaked_tags: Action = Field("retry", description="Raw tags such as `<think>` stand in the answer.")
    truncated: Action = Field(
        "reject",
        description="`sampling.max_tokens` cut off the answer. A new attempt costs as many tokens again, "
        "and often ends the same way.",
    )
    looping: Action = Field("retry", description="The answer or its thought repeats itself without end.")
    prompt_mismatch: Action = Field(
        "reject", description="The server read another number of prompt tokens than was sent; trying again cannot help."
    )
    too_short: Action = Field("retry", description="Fewer tokens than `quality.min_supervised_tokens`.")


class Canary(Section):
    """A sample that is answered and judged before any shard is released."""

    skip: bool = Field(False, description="Release the shards unseen.")
    prompts: int = Field(64, ge=1, le=10_000, description="Size of the sample; at most a tenth of a larger input.")
    max_bad_rate: float = Field(
        0.1, ge=0, le=1, description="Share of bad first answers above which the run is stopped, once it is sure."
    )


class Quality(Section):
    """What an answer must be to count."""

    canary: Canary = Field(default_factory=Canary)
    actions: VerdictActions = Field(default_factory=VerdictActions, description="What is done about each verdict.")
    retries: int = Field(
        2, ge=0, le=20, description="New attempts, each with a new seed, for an answer that may be retried."
    )
    retry_temperatures: list[float] = Field(
        default_factory=list,
        description="Temperatures of the second attempt, the third, ...; the last one holds for all that follow. "
        "Empty: `sampling.temperature` every time.",
    )
    min_supervised_tokens: int = Field(
        8, ge=0, description="Fewest tokens, thought included, that an answer must have to be worth training on."
    )
    tool_calls_count: bool = Field(True, description="An answer of tool calls without text is an answer.")
    max_reject_rate: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Share of rejected prompts above which a run stops, once it is sure: the lower end of the rate's "
        "95 % interval must lie above this.",
    )
    stop_run_above: float = Field(
        0.1, ge=0, le=1, description="The same over all shards of the run: above it every shard stops."
    )
    min_samples: int = Field(20, ge=1, description="Answers to judge before `max_reject_rate` is applied.")
