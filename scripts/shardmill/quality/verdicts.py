"""What an answer is worth: pure judgements, the policy that follows from them, and rates over many of them."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import orjson

from ..engines.base import Answer
from .loops import Loop, find_loop

Verdict = Literal[
    # Judged here, from the answer.
    "ok",
    "empty",
    "no_reasoning",
    "unexpected_reasoning",
    "unclosed_thought",
    "leaked_tags",
    "truncated",
    "looping",
    "prompt_mismatch",
    "too_short",
    # Faults: there is no answer to judge.
    "too_long",
    "template_error",
    "bad_request",
    "engine_error",
    "poison",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

# How models mark their thoughts: opening and closing tag.
THINK_TAGS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),  # Qwen, DeepSeek, GLM, MiniMax, Nemotron, SmolLM3
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss
    ("<|channel>thought", "<channel|>"),  # Gemma
)
# Tokens of chat templates that no answer should spell out.
TURN_MARKERS: tuple[str, ...] = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>")

# Ends that a model chose itself.
NATURAL_ENDS: frozenset[str] = frozenset({"stop", "tool_calls", "function_call"})

# Blank although of another category: combining joiner, Hangul fillers, Braille blank, variation selectors.
_BLANK = frozenset("\u034f\u115f\u1160\u2800\u3164\uffa0" + "".join(map(chr, range(0xFE00, 0xFE10))))
_BLANK_CATEGORIES = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
_CODE = re.compile(r"^[ \t]*(`{3,}|~{3,})(?s:.*?)(?:^[ \t]*\1|\Z)|(`+)[^`\n]+\2", re.MULTILINE)


@dataclass(frozen=True)
class Expectation:
    """What the answer to one prompt must be.

    Args:
        thinking: True: it must hold a thought; False: it must not; None: either will do.
        max_tokens: the limit that was asked for, or None where none was.
        prompt_tokens: length of the prompt as it was sent, or None where it is not known.
        min_supervised_tokens: fewer tokens than this are too few to train on.
        tool_calls_count: whether an answer of tool calls and no text is an answer.
        think_tags: opening and closing tags of thoughts, to look for where none belongs.
        prompt_text: all text of the conversation that was sent. A tag that it speaks of may stand in the
            answer, and a sentence that it asks to repeat may be repeated.
    """

    thinking: bool | None = None
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    min_supervised_tokens: int = 0
    tool_calls_count: bool = True
    think_tags: tuple[tuple[str, str], ...] = THINK_TAGS
    prompt_text: str = ""


@dataclass(frozen=True)
class Judgement:
    """A verdict, and in words what it rests on (empty for `ok`)."""

    verdict: Verdict
    detail: str = ""

    @property
    def is_ok(self) -> bool:
        return self.verdict == "ok"


def judge(answer: Answer, expect: Expectation) -> Judgement:
    """The verdict on one answer.

    An answer often fails in several ways at once: a thought cut off by `max_tokens` is also an empty
    answer and a truncated one. The checks stand in the order of causes, so that the verdict names what to
    mend: the prompt that reached the model, a loop, the thought that never closed, a thought where none
    belongs, tags that the server did not parse; then what is missing; then what is merely too short.
    """
    for check in (
        _prompt_mismatch,
        _looping,
        _unclosed_thought,
        _unexpected_reasoning,
        _leaked_tags,
        _empty,
        _no_reasoning,
        _truncated,
        _too_short,
    ):
        found = check(answer, expect)
        if found:
            return found
    return Judgement("ok")


def supervised_tokens(answer: Answer) -> int:
    """Tokens of the answer that a drafter would be trained on: thought, text and tool calls.

    What the engine counted (`usage.completion_tokens`), or else the number of token ids it returned. Where
    it gave neither, an ESTIMATE: one token per four UTF-8 bytes, rounded up, which is right within a factor
    of two for English, code and Chinese.
    """
    counted = answer.usage.get("completion_tokens")
    if counted is not None:
        return counted
    if answer.completion_token_ids is not None:
        return len(answer.completion_token_ids)
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in (answer.content, answer.reasoning_content or ""))
    if answer.tool_calls:
        size += len(orjson.dumps(answer.tool_calls))
    return math.ceil(size / 4)


def is_blank(text: str | None) -> bool:
    """Whether a reader would see nothing: None, white space, control and zero-width characters."""
    return all(c in _BLANK or unicodedata.category(c) in _BLANK_CATEGORIES for c in text or "")


def _has_answer(answer: Answer, expect: Expectation) -> bool:
    return not is_blank(answer.content) or bool(expect.tool_calls_count and answer.tool_calls)


def _prompt_mismatch(answer: Answer, expect: Expectation) -> Judgement | None:
    """Compares token counts: a server that cut the prompt's tail answers without complaint."""
    seen = answer.usage.get("prompt_tokens")
    if seen is None and answer.prompt_token_ids is not None:
        seen = len(answer.prompt_token_ids)
    if expect.prompt_tokens is None or seen is None or seen == expect.prompt_tokens:
        return None
    return Judgement("prompt_mismatch", f"the server read {seen} prompt tokens of {expect.prompt_tokens} sent")


def _looping(answer: Answer, expect: Expectation) -> Judgement | None:
    """A loop that the model ended itself is none if it is what was asked for.

    That is: the prompt holds the sentence, or the content counts from one number to another.
    """
    cut = answer.finish_reason not in NATURAL_ENDS
    for place, text in (("thought", answer.reasoning_content), ("content", answer.content)):
        loop = find_loop(text or "")
        if loop is None or (not cut and _was_asked_for(loop, place, expect)):
            continue
        return Judgement("looping", f"the {place} repeats {loop}")
    return None


def _was_asked_for(loop: Loop, place: str, expect: Expectation) -> bool:
    unit = loop.unit.strip(" \n\t.,;:!?\"'")
    return (loop.kind == "counter" and place == "content") or (bool(unit) and unit in expect.prompt_text)


def _unclosed_thought(answer: Answer, expect: Expectation) -> Judgement | None:
    """The thought may lie in `reasoning_content`, or whole in `content` where the server's parser needs its end."""
    if expect.thinking is False:
        return None
    if answer.finish_reason == "length" and not _has_answer(answer, expect) and not is_blank(answer.reasoning_content):
        return Judgement("unclosed_thought", f"cut off inside the thought{_tokens_said(answer, expect)}")
    opened = _opening_tag(answer, expect)
    if opened and opened[1] not in answer.content:
        return Judgement("unclosed_thought", f"the content opens with {opened[0]} and never closes it")
    closed = any(closing in answer.content for _, closing in expect.think_tags)
    if (
        expect.thinking
        and answer.finish_reason == "length"
        and is_blank(answer.reasoning_content)
        and not is_blank(answer.content)
        and not closed
    ):
        return Judgement(
            "unclosed_thought",
            f"cut off before the thought closed, all of it in the content{_tokens_said(answer, expect)}",
        )
    return None


def _unexpected_reasoning(answer: Answer, expect: Expectation) -> Judgement | None:
    if expect.thinking is not False:
        return None
    if not is_blank(answer.reasoning_content):
        where = "" if _has_answer(answer, expect) else ", and nothing in the content"
        return Judgement("unexpected_reasoning", f"thinking is off, yet reasoning_content holds text{where}")
    opened = _opening_tag(answer, expect)
    if opened and opened[1] not in answer.content:
        return Judgement("unexpected_reasoning", f"thinking is off, yet the content opens with {opened[0]}")
    return None


def _opening_tag(answer: Answer, expect: Expectation) -> tuple[str, str] | None:
    """The tags of a thought that the content opens with.

    None if the prompt speaks of the tag and no thought is missing: then it asked for such an answer.
    """
    start = answer.content.lstrip()
    opened = next((pair for pair in expect.think_tags if start.startswith(pair[0])), None)
    if opened and opened[0] in expect.prompt_text and not (expect.thinking and is_blank(answer.reasoning_content)):
        return None
    return opened


def _leaked_tags(answer: Answer, expect: Expectation) -> Judgement | None:
    """Tags of thoughts and turns where the server should have taken them out.

    A tag at the very start of the content is what an unparsed thought looks like, and so is a closing tag
    with no thought beside it when thinking is on; neither is excused by code around it. Elsewhere a tag may
    be the subject: inside code (a fence or backticks), or when the prompt itself speaks of it.
    """
    opened = _opening_tag(answer, expect)
    if opened:
        return Judgement("leaked_tags", f"the content opens with {opened[0]}")
    if expect.thinking and is_blank(answer.reasoning_content):
        for opening, closing in expect.think_tags:
            head, found, _ = answer.content.partition(closing)
            if found and opening not in head:
                return Judgement("leaked_tags", f"the content holds the thought and its {closing}")
    markers = [*(tag for pair in expect.think_tags for tag in pair), *TURN_MARKERS]
    for place, text in (("content", answer.content), ("thought", answer.reasoning_content or "")):
        present = [marker for marker in markers if marker in text and marker not in expect.prompt_text]
        prose = _CODE.sub("", text) if present else ""
        for marker in present:
            if marker in prose:
                return Judgement("leaked_tags", f"the {place} holds {marker}")
    return None


def _empty(answer: Answer, expect: Expectation) -> Judgement | None:
    if _has_answer(answer, expect):
        return None
    if not is_blank(answer.reasoning_content):
        return Judgement("empty", f"a thought of {len(answer.reasoning_content or '')} characters and no answer")
    if answer.content:
        return Judgement("empty", f"nothing but {len(answer.content)} blank characters")
    return Judgement("empty", f"no text; finish_reason {answer.finish_reason!r}")


def _no_reasoning(answer: Answer, expect: Expectation) -> Judgement | None:
    if expect.thinking and is_blank(answer.reasoning_content):
        return Judgement("no_reasoning", "thinking is on, yet there is no thought")
    return None


def _truncated(answer: Answer, expect: Expectation) -> Judgement | None:
    if answer.finish_reason in NATURAL_ENDS:
        return None
    if answer.finish_reason == "length":
        return Judgement("truncated", f"cut off{_tokens_said(answer, expect)}")
    return Judgement("truncated", f"ended by finish_reason {answer.finish_reason!r}")


def _tokens_said(answer: Answer, expect: Expectation) -> str:
    """How many tokens it got, and whether those were fewer than asked: servers cap max_tokens silently."""
    got = answer.usage.get("completion_tokens")
    if got is None:
        return ""
    if expect.max_tokens is not None and got < expect.max_tokens:
        return f" after {got} tokens although {expect.max_tokens} were asked for: the server capped max_tokens"
    return f" after {got} tokens"


def _too_short(answer: Answer, expect: Expectation) -> Judgement | None:
    tokens = supervised_tokens(answer)
    if tokens < expect.min_supervised_tokens:
        return Judgement("too_short", f"{tokens} supervised tokens, fewer than {expect.min_supervised_tokens}")
    return None


Action = Literal["accept", "retry", "reject"]


@dataclass(frozen=True)
class Policy:
    """What is done about a verdict.

    Args:
        actions: what each verdict calls for; one that is not named is rejected, `ok` is always accepted.
        retries: new attempts that a prompt may get, after its first.
        temperatures: for the second attempt, the third, ...; the last one holds for all further attempts.
            Empty: every attempt uses the prompt's own.
    """

    actions: Mapping[str, Action]
    retries: int = 2
    temperatures: tuple[float, ...] = ()

    @classmethod
    def from_config(cls, quality: Any) -> Policy:
        """The policy of the configuration's `quality` section."""
        actions = {verdict: getattr(quality.actions, verdict, "reject") for verdict in VERDICTS}
        return cls(actions=actions, retries=quality.retries, temperatures=tuple(quality.retry_temperatures))

    def action(self, verdict: Verdict, attempts_so_far: int) -> Action:
        """What to do after `attempts_so_far` attempts, the judged one included (so at least 1)."""
        wanted = "accept" if verdict == "ok" else self.actions.get(verdict, "reject")
        return "reject" if wanted == "retry" and attempts_so_far > self.retries else wanted

    def attempt_overrides(self, attempt: int) -> dict[str, float]:
        """Sampling settings that attempt 1, 2, ... changes; none for the first."""
        if attempt < 2 or not self.temperatures:
            return {}
        return {"temperature": self.temperatures[min(attempt - 2, len(self.temperatures) - 1)]}


def wilson_lower_bound(hits: int, total: int, z: float = 1.959964) -> float:
    """Lower end of the Wilson score interval of a rate; z = 1.96 gives the two-sided 95 % interval.

    (p + z^2/2n - z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), for p = hits/n. Unlike the normal
    approximation it holds for small n and for rates near 0 and 1.
    E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    Journal of the American Statistical Association 22 (1927), 209-212.
    """
    if total == 0:
        return 0.0
    rate, square = hits / total, z * z
    spread = z * math.sqrt(rate * (1 - rate) / total + square / (4 * total * total))
    return max(0.0, (rate + square / (2 * total) - spread) / (1 + square / total))


@dataclass(frozen=True)
class RateGate:
    """Whether a rate of rejects is surely too high.

    It is judged from `min_samples` on, and fails when even the lower end of the rate's 95 % interval lies
    above `limit`: with a limit of 5 %, one bad answer among the first three says nothing, 30 of 40 do.
    """

    limit: float
    min_samples: int = 20

    def fails(self, rejected: int, total: int) -> bool:
        return total >= self.min_samples and wilson_lower_bound(rejected, total) > self.limit

    def describe(self, rejected: int, total: int) -> str:
        """The figures behind the decision, in one clause."""
        bound = wilson_lower_bound(rejected, total)
        rate = rejected / total if total else 0.0
        return f"{rejected} of {total} ({rate:.1%}, surely above {bound:.1%}; limit {self.limit:.1%})"


def visible(text: str, width: int = 48) -> str:
    """`text` on one line: what cannot be seen as an escape, the middle of what is too long left out."""
    if len(text) > 4 * width:
        text = text[: 2 * width] + "\ufffd" + text[-2 * width :]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(shown) <= width:
        return shown
    head = (width - 3) * 2 // 3
    return f"{shown[:head]}...{shown[head + 3 - width :]}"


def rate_table(
    counts: Mapping[str, int],
    limits: Mapping[str, float] | None = None,
    examples: Mapping[str, Iterable[tuple[str, str]]] | None = None,
) -> str:
    """A plain-text table of verdicts: count, rate, limit, and up to three examples of each.

    Args:
        counts: answers per verdict.
        limits: highest allowed rate per verdict, 0 to 1, where there is one. A verdict above it is marked `!`.
        examples: (prompt id, excerpt of the answer) per verdict.
    """
    limits, examples = limits or {}, examples or {}
    total = sum(counts.values())
    order = {verdict: position for position, verdict in enumerate(VERDICTS)}
    shown = sorted((v for v in counts if counts[v]), key=lambda v: (order.get(v, len(order)), v))
    width = max([len("verdict"), *map(len, shown)])
    lines = [f"{'verdict':<{width}}  {'count':>8}  {'rate':>6}  {'limit':>6}"]
    for verdict in shown:
        rate, limit = counts[verdict] / total, limits.get(verdict)
        row = f"{verdict:<{width}}  {counts[verdict]:>8,}  {rate:>6.1%}  {'-' if limit is None else f'{limit:.1%}':>6}"
        lines.append(row + ("  !" if limit is not None and rate > limit else ""))
        for name, excerpt in list(examples.get(verdict, ()))[:3]:
            lines.append(f"    {visible(name, 24)}: {visible(excerpt)}")
    lines.append(f"{'total':<{width}}  {total:>8,}")
    return "\n".join(lines)
