"""The thinking contract: before a server is used, one whole answer must be what the run needs all its answers to be.

With thinking on, a thought, then an answer, then an end that the model chose; with thinking off, an answer and no
thought. A dataset was lost once because nobody had looked.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import requests

from .config import Config
from .engines.base import Answer, Engine, Fault, ServerPlace
from .engines.openai import post_chat
from .quality.verdicts import Expectation, judge

QUESTION = "Why is the sky blue? Answer in two or three sentences."
# Of the answer, thought included: enough for any thinking model on such a question, and soon over if one runs astray.
MOST_TOKENS = 8192
# Chances that a model gets: one bad draw says nothing of the server.
ATTEMPTS = 3
# Speed is not judged by fewer tokens than this: such a request is mostly its own beginning.
TOKENS_TO_MEASURE = 64
ANSWER_SECONDS = 600.0
_PAUSE = 0.5
# Verdicts that break the contract, as does a loop that only the limit ended; the rest is the canary's business.
_BROKEN = frozenset({"no_reasoning", "unexpected_reasoning", "unclosed_thought", "leaked_tags", "empty", "truncated"})


@dataclass
class Proof:
    """What came of it.

    Args:
        problem: why the server must not be used; empty if it may.
        warnings: what is below `servers.expect`.
        facts: `tokens_per_second` and `acceptance_length` of one request alone, where measured.
    """

    problem: str = ""
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def is_wanted(config: Config, engine: Engine) -> bool:
    """Whether a server of this run has to prove anything."""
    expect = config.servers.expect
    measured = expect.tokens_per_second is not None or expect.acceptance_length is not None
    return measured or (engine.proves_thinking and config.thinking.enabled is not None)


def prove(
    config: Config,
    engine: Engine,
    place: ServerPlace,
    model: str | None,
    *,
    context: int | None,
    deadline: float,
    stopped: threading.Event,
) -> Proof:
    """Ask for whole answers with the run's own sampling until one keeps the contract.

    Args:
        model: the `model` field, where the server wants one.
        context: tokens of prompt and answer together, where known.
        deadline: monotonic time after which to give up.
        stopped: ends it at once.
    """
    most = min(config.sampling.max_tokens, MOST_TOKENS, context // 2 if context else MOST_TOKENS)
    proof, broken, attempts = Proof(), "", 0
    while attempts < ATTEMPTS and not stopped.is_set():
        left = deadline - time.monotonic()
        if left <= 0:
            return Proof(problem=f"no whole answer in time: {broken or 'it does not answer'}")
        body = engine.request_body(config, [{"role": "user", "content": QUESTION}], None, attempts + 1, {})
        body["max_tokens"] = most
        if model:
            body.setdefault("model", model)
        began = time.monotonic()
        result = _ask(engine, place, body, min(left, ANSWER_SECONDS))
        if isinstance(result, str):
            broken = result
            stopped.wait(_PAUSE)
            continue
        if isinstance(result, Fault):
            if result.is_final or result.kind == "unauthorized":
                return Proof(problem=f"it refuses a plain request: {result.kind}: {result.message}")
            broken = f"{result.kind}: {result.message}"
            stopped.wait(_PAUSE)
            continue
        attempts += 1
        _measure(proof, result, time.monotonic() - began)
        broken = _breach(config, result, most) if engine.proves_thinking else ""
        if not broken:
            break
    if broken:
        return Proof(problem=_in_words(config, broken))
    _note_acceptance(proof, engine, place)
    _compare(config, proof)
    return proof


def _ask(engine: Engine, place: ServerPlace, body: dict[str, Any], timeout: float) -> Answer | Fault | str:
    try:
        return engine.read_answer(*post_chat(place, body, timeout=timeout))
    except requests.RequestException as error:
        return f"it breaks the connection ({type(error).__name__})"


def _breach(config: Config, answer: Answer, most: int) -> str:
    """How an answer breaks the contract, or an empty text."""
    thinking = config.thinking.enabled
    if thinking is None:
        return ""
    judgement = judge(answer, Expectation(thinking=thinking, max_tokens=most, prompt_text=QUESTION))
    verdict = judgement.verdict
    if verdict not in _BROKEN and not (verdict == "looping" and answer.finish_reason == "length"):
        return ""
    cut = verdict in ("truncated", "unclosed_thought")
    if cut and thinking and (answer.reasoning_content or "").strip() and most < MOST_TOKENS:
        # So short a limit is the user's own choice, if the run takes what it cuts off.
        if getattr(config.quality.actions, verdict) == "accept":
            return ""
        return f"{judgement.detail}, and sampling.max_tokens or the context allows no more than {most}"
    return judgement.detail


def _in_words(config: Config, broken: str) -> str:
    """What a person has to know who reads this at night."""
    if config.thinking.enabled:
        return (
            f"thinking.enabled is true, but {ATTEMPTS} answers in a row were not a thought, an answer and an end of "
            f"the model's own ({broken}). Such a dataset would be worthless. See to the reasoning parser "
            f"(engine.sglang.reasoning_parser), the chat template's switch (thinking.template_key is "
            f"{config.thinking.template_key!r}) and sampling.max_tokens"
        )
    return (
        f"thinking.enabled is false, but {ATTEMPTS} answers in a row were not plain answers ({broken}). See to the "
        f"chat template's switch (thinking.template_key is {config.thinking.template_key!r}): does this model know it?"
    )


def _measure(proof: Proof, answer: Answer, seconds: float) -> None:
    tokens = answer.usage.get("completion_tokens", 0)
    proof.facts |= {"completion_tokens": tokens, "seconds": round(seconds, 3), "finish_reason": answer.finish_reason}
    if tokens >= TOKENS_TO_MEASURE and seconds > 0:
        proof.facts["tokens_per_second"] = round(tokens / seconds, 1)


def _note_acceptance(proof: Proof, engine: Engine, place: ServerPlace) -> None:
    load = engine.load(place, timeout=5)
    if load and "acceptance_length" in load.details:
        proof.facts["acceptance_length"] = round(load.details["acceptance_length"], 3)


def _compare(config: Config, proof: Proof) -> None:
    """Hold what was measured against `servers.expect`."""
    expect, below = config.servers.expect, []
    for name in ("tokens_per_second", "acceptance_length"):
        wanted, got = getattr(expect, name), proof.facts.get(name)
        if wanted is None:
            continue
        if got is None:
            proof.warnings.append(f"servers.expect.{name} is {wanted:g}, but it could not be measured")
        elif got < wanted:
            below.append(f"one request alone reaches {name} {got:g}, less than servers.expect.{name} ({wanted:g})")
    if below and expect.action == "error":
        proof.problem = "; ".join(below)
    proof.warnings += below
