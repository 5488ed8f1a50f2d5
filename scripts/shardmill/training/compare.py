"""The engine's token ids against the model's own template: do they say the same?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .masking import Template, Unmaskable, common_length, prompt_text, render_row
from .rows import Row
from .tokenizer import encode

_CONTEXT_TOKENS = 6
_CONTEXT_CHARACTERS = 24


@dataclass(frozen=True)
class Difference:
    """`text` shows the first one, None where there is none that matters; `is_blank`: only white space differs."""

    text: str | None = None
    is_blank: bool = False


def difference(template: Template, row: Row, prompt: Sequence[int], completion: Sequence[int]) -> Difference:
    """Compare a row of one turn with its rendering.

    Prompts must agree token by token: servers make them with this very tokenizer. A model may write the same
    answer in other tokens than a tokenizer would, so answers are compared as text, and white space between
    thought and answer, which parsers of servers cut off, is let pass.

    Raises:
        Unmaskable: if the template cannot render it.
    """
    expected = encode(template.tokenizer, prompt_text(template, row))
    if list(prompt) != expected:
        return Difference(_first_of_ids(template, prompt, expected))
    return _of_answers(template, row, completion)


def _of_answers(template: Template, row: Row, completion: Sequence[int]) -> Difference:
    end, found = template.end_of_turn(completion, 0, len(completion))
    said = template.decode(completion[: end - found])
    try:
        rendering = render_row(template, row)
    except Unmaskable as error:
        return Difference(f"answer: {error.reason}: {error.detail}")
    if rendering.prefix_changed:
        return Difference("answer: its rendering does not begin with the prompt")
    written = rendering.answer
    if not rendering.cut[0]:
        ids = encode(template.tokenizer, written)
        end, found = template.end_of_turn(ids, 0, len(ids))
        written = template.decode(ids[: end - found])
    if said == written:
        return Difference()
    if "".join(said.split()) == "".join(written.split()):
        return Difference(is_blank=True)
    return Difference(_first_of_texts(said, written))


def _first_of_ids(template: Template, found: Sequence[int], expected: Sequence[int]) -> str:
    at = common_length(found, expected)
    around = slice(max(0, at - 2), at + _CONTEXT_TOKENS)
    return (
        f"prompt, token {at} of {len(found)} (template: {len(expected)}): the engine had "
        f"{template.decode(found[around])!r}, the template gives {template.decode(expected[around])!r}"
    )


def _first_of_texts(found: str, expected: str) -> str:
    """Where two texts part, white space apart."""
    i = j = 0
    while True:
        while i < len(found) and found[i].isspace():
            i += 1
        while j < len(expected) and expected[j].isspace():
            j += 1
        if i >= len(found) or j >= len(expected) or found[i] != expected[j]:
            break
        i, j = i + 1, j + 1
    before = _CONTEXT_CHARACTERS // 2
    return (
        f"answer, character {i}: the engine said {found[max(0, i - before) : i + _CONTEXT_CHARACTERS]!r}, "
        f"the template gives {expected[max(0, j - before) : j + _CONTEXT_CHARACTERS]!r}"
    )
