"""Faults that the stand-in shows when told to.

A fault is a name and options, as in `{"refuse": {"rate": 0.1}, "crash": {"after": 100}}`; `true` means no options.
They come from the command line (`--standin-faults JSON`) or, while the server runs, from POST /_standin/faults (which
replaces all of them; `{}` ends them, GET shows them).

Options that select requests, for each fault; all that are given must hold:

    rate    share of requests, drawn from the request's number, so the same in every run (default 1.0)
    after   only requests after the first N of this server
    count   at most N times
    match   only prompts that contain this text

Faults and their own options (default):

    refuse         503 "The request queue is full."
    error          status (500) with SGLang's error body
    reset          connection reset in mid-answer, after part (0.5) of the answer's tokens
    abort          200 with finish_reason "abort", after part (0.5) of the answer's tokens
    short          finish_reason "length" after tokens (8), fewer than were asked for
    silent         never answered, and not counted as running
    empty          content "" with finish_reason "stop"
    no_reasoning   no thought
    raw_tags       the thought with its tags in content
    misplaced      the answer in reasoning_content, content null
    loop           the thought repeats one sentence until max_tokens
    under_report   prompt_tokens cut to tokens (half), as if the prompt had been truncated
    corrupt        every nth (5) word of thought and answer is missing
    boilerplate    a few tokens of politeness instead of an answer
    hang           server: /health 200, nothing finishes, token counters stand still, until the fault is lifted
    unhealthy      server: /health 503, answers as usual
    crash          the process ends as when SGLang's scheduler dies, linger (0) seconds after the request arrived
    poison         the same, for prompts that contain match
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from .answers import BOILERPLATE, LOOP, Answer, Plan, cut

SELECT = {"rate": float, "after": int, "count": int, "match": str}
OWN: dict[str, dict[str, type]] = {
    "refuse": {},
    "error": {"status": int},
    "reset": {"part": float},
    "abort": {"part": float},
    "short": {"tokens": int},
    "silent": {},
    "empty": {},
    "no_reasoning": {},
    "raw_tags": {},
    "misplaced": {},
    "loop": {},
    "under_report": {"tokens": int},
    "corrupt": {"nth": int},
    "boilerplate": {},
    "hang": {},
    "unhealthy": {},
    "crash": {"linger": float},
    "poison": {"linger": float},
}
Hits = dict[str, dict[str, Any]]


class FaultError(ValueError):
    """A fault or an option that does not exist, or an option of the wrong type."""


class Faults:
    """The faults that are on, and how often each has been shown."""

    def __init__(self, wanted: Any = None) -> None:
        self.active: Hits = {}
        self.shown: dict[str, int] = {}
        self.replace(wanted or {})

    def replace(self, wanted: Any) -> None:
        """Turn on exactly these faults. Raises FaultError."""
        if not isinstance(wanted, dict):
            raise FaultError("faults are a JSON object of name: options")
        checked: Hits = {}
        for name, options in wanted.items():
            if name not in OWN:
                raise FaultError(f"no fault {name!r}; there are: {', '.join(OWN)}")
            checked[name] = _check(name, {} if options is True else options)
        self.active, self.shown = checked, {}

    def hits(self, number: int, prompt: str) -> Hits:
        """The faults that request `number` (from 1) with this prompt text is to suffer."""
        found: Hits = {}
        for name, options in self.active.items():
            if number <= options.get("after", 0) or self.shown.get(name, 0) >= options.get("count", number):
                continue
            if options.get("match", "") not in prompt:
                continue
            rate = options.get("rate", 1.0)
            if rate < 1.0 and zlib.crc32(f"{name} {number}".encode()) >= rate * 2**32:
                continue
            self.shown[name] = self.shown.get(name, 0) + 1
            found[name] = options
        return found


def _check(name: str, options: Any) -> dict[str, Any]:
    known = SELECT | OWN[name]
    if not isinstance(options, dict):
        raise FaultError(f"{name}: options are a JSON object or true")
    for key, value in options.items():
        kind = known.get(key)
        if kind is None:
            raise FaultError(f"{name}: no option {key!r}; there are: {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise FaultError(f"{name}: {key} must be of type {kind.__name__}")
    if name == "poison" and not options.get("match"):
        raise FaultError("poison: needs match, the text that crashes the server")
    return options


def change_plan(chosen: Plan, hits: Hits, max_tokens: int) -> Plan:
    """How many tokens the request will take with these faults."""
    if "loop" in hits:
        return replace(chosen, tokens=max_tokens, finish="length")
    if "boilerplate" in hits:
        return replace(chosen, tokens=min(max_tokens, len(BOILERPLATE.split()) + 1), finish="stop")
    if "short" in hits:
        return cut(chosen, hits["short"].get("tokens", 8), "length")
    for name, finish in (("abort", "abort"), ("reset", chosen.finish)):
        if name in hits:
            return cut(chosen, int(chosen.tokens * hits[name].get("part", 0.5)), finish)
    return chosen


def change_answer(answer: Answer, hits: Hits) -> Answer:
    """What the client gets to read with these faults."""
    reasoning, content = answer.reasoning, answer.content
    if "loop" in hits:
        words = LOOP.split(" ")[:-1]
        looped = LOOP * (answer.completion_tokens // len(words) + 1)
        return replace(answer, reasoning=looped, content="", reasoning_tokens=answer.completion_tokens, raw=looped)
    if "boilerplate" in hits:
        return replace(answer, reasoning=None, content=BOILERPLATE, reasoning_tokens=0, raw=BOILERPLATE)
    if "corrupt" in hits:
        nth = max(2, hits["corrupt"].get("nth", 5))
        reasoning = _drop(reasoning, nth) if reasoning is not None else None
        content = _drop(content, nth)
    if "raw_tags" in hits and reasoning is not None:
        content, reasoning = f"<think>\n{reasoning}\n</think>{content}", None
    if "no_reasoning" in hits:
        reasoning = None
    if "empty" in hits:
        content = ""
    if "misplaced" in hits:
        reasoning, content = content, ""
    thought = answer.reasoning_tokens if reasoning is not None else 0
    raw = f"{reasoning}</think>{content}" if reasoning is not None else content
    return replace(answer, reasoning=reasoning, content=content, reasoning_tokens=thought, raw=raw)


def _drop(text: str, nth: int) -> str:
    return " ".join(word for i, word in enumerate(text.split(" "), 1) if i % nth)
