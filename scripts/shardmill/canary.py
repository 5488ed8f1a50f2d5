"""The canary: a sample of the input, answered and judged before any shard is released.

A wrong setting ruins every answer alike, so a few dozen answers show it in a minute; found after the
run, it costs the run. The canary's answers go into the shards' journals: none is generated twice.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .answering import Answering, Task
from .config import Config
from .conversation import Conversation, Terms
from .errors import UserError
from .files import read_json, read_json_or_none, write_json
from .generate import make_terms
from .journal import Journal
from .layout import Layout
from .pool_plan import holds
from .prompts.shards import read_shard
from .quality.verdicts import RateGate, rate_table
from .training.tokenizer import count_prompt_tokens, load_tokenizer, template_arguments

# A canary never takes more than this share of the input, nor fewer than this many prompts.
MOST_OF_INPUT = 10
FEWEST = 4
# Engines differ by a token or so in how they begin a prompt; what matters is text that is missing or added.
PROMPT_SLACK = 2
PROMPT_SLACK_SHARE = 0.01


def sample_positions(total: int, wanted: int) -> list[int]:
    """Positions of the sample among `total` prompts: evenly spread, never more than a tenth of a larger input."""
    count = min(total, wanted, max(FEWEST, total // MOST_OF_INPUT))
    return [i * total // count for i in range(count)] if count else []


class Canary:
    """Answers and judges the sample.

    Args:
        config: the run's configuration.
        model_digest: content hash of the model that the servers run.
    """

    def __init__(self, config: Config, model_digest: str) -> None:
        self.config = config
        self.layout = config.layout
        self.terms = make_terms(config, model_digest)
        self.answering = Answering(config, "canary")

    def run(self) -> dict[str, Any]:
        """Write and return the report.

        Raises:
            UserError: with a table of what is wrong, if the run should not go on.
            Interrupted: if it was stopped.
        """
        started = time.monotonic()
        only, entries = self.config.pools.only, read_json(self.layout.prompt_index)["shards"]
        # A pool's sample is of its own shards: the journals of others are not its to write.
        entries = [entry for entry in entries if not only or holds(only, entry["name"])]
        positions = sample_positions(sum(e["prompts"] for e in entries), self.config.quality.canary.prompts)
        with contextlib.ExitStack() as stack:
            tasks = self._tasks(stack, entries, positions)
            self.answering.run(tasks)
            conversations = [task.conversation for task in tasks]
            report = _report(self.config, conversations, sent=self.answering.sent, seconds=time.monotonic() - started)
            report["prompt_tokens"] = prompt_check = check_prompt_tokens(self.config, conversations)
            judge_sample(self.config, conversations, report)
            judge_prompts(self.config, prompt_check)
        write_json(self.layout.canary, report)
        return report

    def _tasks(
        self, stack: contextlib.ExitStack, entries: list[dict[str, Any]], positions: Sequence[int]
    ) -> list[Task]:
        """The sampled prompts, each with the journal of its shard."""
        tasks: list[Task] = []
        wanted = iter(positions)
        position = next(wanted, None)
        first = 0
        for entry in entries:
            here: list[int] = []
            while position is not None and position < first + entry["prompts"]:
                here.append(position - first)
                position = next(wanted, None)
            if here:
                tasks += _shard_tasks(stack, self.layout, entry, here, self.terms)
            first += entry["prompts"]
        return tasks


def _shard_tasks(
    stack: contextlib.ExitStack, layout: Layout, entry: dict[str, Any], positions: Sequence[int], terms: Terms
) -> list[Task]:
    prompts = read_shard(layout, entry["name"], entry)
    journal = stack.enter_context(Journal(layout.journal(entry["name"])))
    return [Task(Conversation(prompts[position], terms), journal) for position in positions]


def first_verdicts(conversations: Sequence[Conversation]) -> Counter[str]:
    """Verdicts of the first answers: retries hide a fault that costs as much as it did."""
    return Counter(str(c.attempts[0]["verdict"]) if c.attempts else str(c.verdict) for c in conversations)


def judge_sample(config: Config, conversations: Sequence[Conversation], report: dict[str, Any]) -> None:
    """Stop the run if its sample is bad.

    Raises:
        UserError: with the table, and in words what it means.
    """
    canary = config.quality.canary
    actions = config.quality.actions
    counts = first_verdicts(conversations)
    bad = {v: n for v, n in counts.items() if v != "ok" and getattr(actions, v, "reject") != "accept"}
    gate = RateGate(canary.max_bad_rate, min_samples=1)
    total = len(conversations)
    if not gate.fails(sum(bad.values()), total):
        return
    examples: dict[str, list[tuple[str, str]]] = {}
    for conversation in conversations:
        verdict = str(conversation.attempts[0]["verdict"]) if conversation.attempts else str(conversation.verdict)
        if verdict in bad:
            detail = conversation.attempts[0].get("detail") if conversation.attempts else conversation.detail
            examples.setdefault(verdict, []).append((conversation.id, detail or conversation.detail))
    table = rate_table(counts, limits=dict.fromkeys(bad, canary.max_bad_rate), examples=examples)
    worst = max(bad, key=lambda verdict: bad[verdict])
    raise UserError(
        f"{sum(bad.values())} of {total} sample answers are bad, so the run was stopped before it cost anything.\n"
        f"{table}\n{MEANING.get(worst, 'See the examples above.')}\n",
        where="canary",
        hint="mend the cause and run the same command again (`quality.canary.skip: true` runs without this check)",
    )


def check_prompt_tokens(config: Config, conversations: Sequence[Conversation]) -> dict[str, Any]:
    """The servers' count of each first prompt against a local one with the model's own tokenizer and template.

    A prompt that is cut off, or put into another template, on its way shows here and nowhere else. Without
    tokenizer files (a single GGUF), or before there is an answer, nothing is checked and the report says so.
    """
    tokenizer = _tokenizer(config)
    arguments = template_arguments(config) if tokenizer is not None else {}
    checked, differing = 0, []
    for conversation in conversations:
        if not conversation.answers or tokenizer is None:
            continue
        answered = conversation.answers[0]
        here = count_prompt_tokens(tokenizer, conversation.first_messages, conversation.prompt.get("tools"), arguments)
        there = answered["usage"].get("prompt_tokens")
        if here is None or there is None:
            continue
        checked += 1
        if abs(here - there) > max(PROMPT_SLACK, here * PROMPT_SLACK_SHARE):
            differing.append({"id": conversation.id, "server": there, "local": here})
    return {"checked": checked, "differing": len(differing), "examples": differing[:3]}


def judge_prompts(config: Config, check: dict[str, Any]) -> None:
    """Stop the run if the servers read other prompts than were sent.

    Raises:
        UserError: with both counts of some prompts.
    """
    gate = RateGate(config.quality.canary.max_bad_rate, min_samples=1)
    if not check["checked"] or not gate.fails(check["differing"], check["checked"]):
        return
    examples = ", ".join(f"{e['id']}: {e['server']} against {e['local']}" for e in check["examples"])
    raise UserError(
        f"the servers read {check['differing']} of {check['checked']} sample prompts with another number of tokens "
        f"than the model's own tokenizer and chat template make of them ({examples})",
        where="canary",
        hint="see that servers and model folder have one chat template, and that nothing cuts prompts off",
    )


def _tokenizer(config: Config) -> Any | None:
    """The model's tokenizer, or None where its files hold none."""
    manifest = read_json_or_none(config.layout.model_manifest)
    if not manifest or str(manifest["entry"]).endswith(".gguf"):
        return None
    return load_tokenizer(
        Path(manifest["folder"]),
        chat_template=config.model.chat_template,
        trust_remote_code=config.model.trust_remote_code,
    )


MEANING = {
    "no_reasoning": "Most likely the model's thinking mode is off on the servers: see `thinking` in the "
    "configuration, the chat template, and the server's reasoning parser.",
    "unexpected_reasoning": "The model thinks although `thinking.enabled` is false: its template does not know "
    "`thinking.template_key`, or it always thinks.",
    "empty": "The answers hold no text. A dataset of these would train nothing.",
    "too_short": "The answers hold too few tokens to train on: boilerplate, as when a thinking model is not "
    "allowed to think.",
    "truncated": "The answers are cut off: raise `sampling.max_tokens`, or the server's context length.",
    "unclosed_thought": "The thoughts are cut off before they end: raise `sampling.max_tokens`, or the server's "
    "context length.",
    "leaked_tags": "Think tags stand in the answers: the server does not separate thoughts. See its reasoning parser.",
    "looping": "The answers repeat themselves without end: see the sampling settings, which may be greedy or missing.",
    "prompt_mismatch": "The server read other prompts than were sent: cut off, or another chat template.",
    "too_long": "The prompts do not fit the servers' context length.",
    "engine_error": "The servers fail on these prompts: see their logs.",
}


def _report(config: Config, conversations: Sequence[Conversation], *, sent: int, seconds: float) -> dict[str, Any]:
    answers = [answer for conversation in conversations for answer in conversation.answers]
    tokens = [answer["usage"].get("completion_tokens", 0) for answer in answers]
    thoughts = [answer["usage"].get("reasoning_tokens", 0) for answer in answers]
    return {
        "prompts": len(conversations),
        "accepted": sum(c.outcome == "accepted" for c in conversations),
        "first_verdicts": dict(first_verdicts(conversations)),
        "ids": [conversation.id for conversation in conversations],
        "completion_tokens": sum(tokens),
        "mean_completion_tokens": round(sum(tokens) / len(tokens), 1) if tokens else None,
        "mean_reasoning_tokens": round(sum(thoughts) / len(thoughts), 1) if thoughts else None,
        "servers": dict(Counter(answer["server"] for answer in answers)),
        "requests_sent": sent,
        "seconds": round(seconds, 3),
        "thinking": config.thinking.model_dump(),
        "finished_at": round(time.time(), 3),
    }
