"""What the stand-in answers: a pure function of prompt, seed, thinking mode and length settings.

The server renders answers with it and a checker derives the same answers again from a dataset, so that an answer that
was cut, mixed up or attached to the wrong prompt is found by comparison. One word stands for one token.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import orjson

THINK_END, BLANK, EOS = 151668, 271, 151645  # ids of `</think>`, "\n\n" and `<|im_end|>` in the Qwen3 vocabulary
LOOP = "Wait, I should check that once more. "
BOILERPLATE = "Sure, how can I help?"
_WORDS = re.findall(
    r"\w+",
    """
    a about after again all and answer any are as at back before below between both bring by can carry check
    clear count day door draw each early even every few field find first five follow four from garden give green
    half hand have here high hold home hour how if in into keep kind large last late lead left length light line
    list little long look low make many map measure more morning most move near never next nine no north not now
    number of old on one only open or order other out over page part past place plain point pump quarter
    question read reason remain right river road rope round row same second see seven shore short show side six
    slow small so some sort south square stand start stay step still stone sum table take tank ten than that the
    then there therefore these they think third this three through time to together train tree twice two under
    up until use valley very wait walk wall water way week well were what when where which while white whole why
    wind with without word work write year yet
    """,
)
_BASE = 8192  # words; answers are slices of one long text, so a long answer costs one copy
_NORMAL = NormalDist()


def _base_text() -> tuple[str, list[int], list[int]]:
    """The long text, twice over; where each word starts; and an id for each word."""
    chance = random.Random("stand-in")
    words: list[str] = []
    while len(words) < _BASE:
        sentence = chance.choices(_WORDS, k=chance.randint(6, 14))
        words += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + "."]
    words = words[:_BASE] * 2
    starts = [0]
    for word in words:
        starts.append(starts[-1] + len(word) + 1)
    ids = {word: 1000 + i for i, word in enumerate(sorted(set(words)))}
    return " ".join(words), starts, [ids[word] for word in words]


_TEXT, _STARTS, _IDS = _base_text()


@dataclass(frozen=True)
class Lengths:
    """Log-normal answer lengths in tokens: `mean` and `sigma` (of the logarithm), cut at `cap`.

    `thought` is the share of an answer that is its thought; without thinking an answer is shorter by that share.
    """

    mean: float = 600.0
    sigma: float = 0.6
    cap: int = 16384
    thought: float = 0.6


@dataclass(frozen=True)
class Plan:
    """One answer before it is written: part lengths in words, and how many tokens of it are produced."""

    key: bytes
    thinking: bool
    thought: int
    answer: int
    tokens: int
    finish: str


@dataclass(frozen=True)
class Answer:
    """One answer as text. `reasoning` is None when nothing was thought; `content` starts with the blank line."""

    reasoning: str | None
    content: str
    finish: str
    completion_tokens: int
    reasoning_tokens: int
    token_ids: list[int]
    raw: str


def text_of(content: Any) -> str:
    """The text of a message's content, which is a string or a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def prompt_tokens(messages: list[dict[str, Any]], tools: Any = None) -> int:
    """Length of a prompt in tokens: a quarter of its bytes, and what a chat template adds."""
    size = sum(4 + (len(text_of(message.get("content")).encode("utf-8", "replace")) + 3) // 4 for message in messages)
    return 3 + size + (len(orjson.dumps(tools)) // 4 if tools else 0)


def prompt_token_ids(count: int) -> list[int]:
    """Ids for a prompt of `count` tokens (not an encoding of its text: the stand-in has no tokenizer)."""
    return (_IDS * (count // len(_IDS) + 1))[:count]


def key_of(messages: list[dict[str, Any]], seed: int | None, thinking: bool) -> bytes:
    """16 bytes that decide an answer. Only what the model would see counts, so extra fields of a message do not."""
    seen = [[message.get("role"), text_of(message.get("content"))] for message in messages]
    return hashlib.blake2b(orjson.dumps([seen, seed, thinking]), digest_size=16).digest()


def plan(key: bytes, thinking: bool, lengths: Lengths, max_tokens: int, *, ignore_eos: bool = False) -> Plan:
    """Lengths of the answer with this key, cut at `max_tokens`; with `ignore_eos` it is drawn out to `max_tokens`."""
    chance = (int.from_bytes(key[:6], "big") + 0.5) / 2**48
    drawn = math.exp(math.log(lengths.mean) - lengths.sigma**2 / 2 + lengths.sigma * _NORMAL.inv_cdf(chance))
    words = max(4, min(round(drawn), lengths.cap))
    thought = max(1, round(words * lengths.thought))
    answer = max(1, words - thought)
    if not thinking:
        thought = 0
    if ignore_eos:
        answer = max_tokens
    full = answer + 1 + (thought + 2 if thinking else 0)  # the end mark, and `</think>` with its blank line
    return Plan(key, thinking, thought, answer, min(full, max_tokens), "stop" if full <= max_tokens else "length")


def _words(key: bytes, part: int, count: int) -> str:
    """`count` words of part 0 (thought) or 1 (answer); the first one is unique to the key."""
    if count <= 0:
        return ""
    offset = int.from_bytes(key[6 + 2 * part : 8 + 2 * part], "big") % _BASE
    tag = ("t" if part == 0 else "a") + key.hex()[:16]
    whole, rest = divmod(count - 1, _BASE)
    pieces = [tag, *[_TEXT[_STARTS[offset] : _STARTS[offset + _BASE] - 1]] * whole]
    if rest:
        pieces.append(_TEXT[_STARTS[offset] : _STARTS[offset + rest] - 1])
    return " ".join(pieces)


def _word_ids(key: bytes, part: int, count: int) -> list[int]:
    offset = int.from_bytes(key[6 + 2 * part : 8 + 2 * part], "big") % _BASE
    whole, rest = divmod(max(0, count - 1), _BASE)
    tag = [2000 + key[part]] if count > 0 else []
    return tag + _IDS[offset : offset + _BASE] * whole + _IDS[offset : offset + rest]


def render(chosen: Plan, *, with_ids: bool = False) -> Answer:
    """Write the first `chosen.tokens` tokens of the planned answer."""
    left = chosen.tokens
    thought = min(left, chosen.thought)
    closed = chosen.thinking and left > chosen.thought
    marks = min(2, left - chosen.thought) if closed else 0
    answer = min(left - thought - marks, chosen.answer)
    ended = left - thought - marks - answer > 0
    reasoning = _words(chosen.key, 0, thought) if thought else None
    content = ("\n\n" if marks == 2 else "") + _words(chosen.key, 1, answer)
    ids: list[int] = []
    if with_ids:
        ids = _word_ids(chosen.key, 0, thought) + [THINK_END, BLANK][:marks]
        ids += _word_ids(chosen.key, 1, answer) + ([EOS] if ended else [])
    raw = (reasoning or "") + ("</think>" if closed else "") + content
    return Answer(reasoning, content, chosen.finish, chosen.tokens, thought + closed, ids, raw)


def expected(
    messages: list[dict[str, Any]],
    *,
    seed: int | None,
    thinking: bool = True,
    max_tokens: int = 10**9,
    lengths: Lengths | None = None,
) -> Answer:
    """The answer a healthy stand-in gives to this request, for checkers."""
    chosen = plan(key_of(messages, seed, thinking), thinking, lengths or Lengths(), max_tokens)
    return render(chosen, with_ids=True)


def cut(chosen: Plan, tokens: int, finish: str) -> Plan:
    """The same answer, ended after `tokens` tokens for the reason `finish`."""
    return replace(chosen, tokens=max(0, min(tokens, chosen.tokens)), finish=finish)
