"""Which tokens of a rendered conversation the model itself would have made: the loss mask, found without token ids.

The prompt is rendered as the server saw it (`add_generation_prompt`), the conversation with its answer is
rendered whole, and what the second has beyond the first is the answer. Nothing is taken on trust: the one
must begin with the other, the thought, the text and the calls of the answer must stand in what remains, and
the tokens of the prompt must be the first tokens of the whole. What fails is said by `Unmaskable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..quality.verdicts import THINK_TAGS, is_blank
from .rows import Message, Row
from .tokenizer import TemplateRefused, encode, render

_PROBE = "Quixotry"  # a word that no template holds
_INLINE = "inline"


class Unmaskable(Exception):
    """Why the answer's tokens cannot be told: a typed reason and one line of detail."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


@dataclass(frozen=True, slots=True)
class Rendering:
    """A row as text.

    Args:
        text: the whole, up to the end of the last supervised turn (or to where its answer was cut off).
        spans: (start, end) of each supervised turn in `text`, what the template writes after it included.
        cut: for each of them, whether the answer was cut off, so that the model made no end of it.
        prefix_changed: whether the whole does not begin with the prompt as it was sent.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    cut: tuple[bool, ...]
    prefix_changed: bool = False

    @property
    def answer(self) -> str:
        """The last supervised turn."""
        return self.text[self.spans[-1][0] :]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row as tokens: `spans` are (start, end) of the supervised ones."""

    ids: list[int]
    spans: tuple[tuple[int, int], ...]
    has_end_token: bool = True

    @property
    def supervised(self) -> int:
        return sum(end - start for start, end in self.spans)

    def mask(self) -> bytearray:
        """1 for each supervised token, else 0."""
        mask = bytearray(len(self.ids))
        for start, end in self.spans:
            mask[start:end] = b"\1" * (end - start)
        return mask

    def truncated(self, length: int) -> TokenRow:
        """Its first `length` tokens."""
        spans = tuple((start, min(end, length)) for start, end in self.spans if start < length)
        return TokenRow(self.ids[:length], spans, False)


class Template:
    """A tokenizer with the run's template arguments, and what there is to know of its template.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        arguments: see `template_arguments`.
    """

    def __init__(self, tokenizer: Any, arguments: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.arguments = arguments
        self._is_space: dict[int, bool] = {}
        added = tokenizer.added_tokens_decoder
        self._end_ids = {number for number, token in added.items() if token.special} | set(tokenizer.all_special_ids)

    def render(self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """The messages as text, with `prompt` up to where the model goes on.

        Raises:
            Unmaskable: if the template refuses them.
        """
        try:
            messages = [self._with_thought_in_place(message) for message in messages]
            return render(self.tokenizer, messages, tools, self.arguments, add_generation_prompt=prompt)
        except TemplateRefused as error:
            raise Unmaskable("template_refused", str(error)) from None

    @cached_property
    def thought_field(self) -> str | None:
        """Where the template looks for a thought: a field's name, "inline" (tags in the content), or None."""
        for field in ("reasoning_content", "reasoning", "thinking"):
            if self._shows_thought({field: _PROBE, "content": "x"}):
                return field
        return _INLINE if self._shows_thought({"content": self._inlined(_PROBE, "x")}) else None

    @cached_property
    def end_token(self) -> int | None:
        """The token that ends an answer; None where the template writes none."""
        text = self._try_render({"content": _PROBE})
        ids = encode(self.tokenizer, text) if text else []
        end, has_end_token = self.end_of_turn(ids, 0, len(ids))
        return ids[end - 1] if has_end_token else None

    def end_of_turn(self, ids: Sequence[int], start: int, end: int) -> tuple[int, bool]:
        """Where a turn's own tokens end, blank ones after it left out, and whether that is an end token."""
        while end > start and self._is_blank(ids[end - 1]):
            end -= 1
        return end, end > start and ids[end - 1] in self._end_ids

    def is_end_token(self, number: int) -> bool:
        return number in self._end_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def _is_blank(self, number: int) -> bool:
        if number not in self._is_space:
            text = self.decode([number])
            self._is_space[number] = number not in self._end_ids and text.isspace()
        return self._is_space[number]

    def _shows_thought(self, answer: Message) -> bool:
        return _PROBE in (self._try_render(answer) or "")

    def _try_render(self, answer: Message) -> str | None:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", **answer}]
        try:
            return render(self.tokenizer, messages, None, self.arguments, add_generation_prompt=False)
        except TemplateRefused:
            return None

    def _with_thought_in_place(self, message: Message) -> Message:
        """The message with its thought where the template looks for it."""
        thought = message.get("reasoning_content")
        if not thought or self.thought_field in ("reasoning_content", None):
            return message
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        if self.thought_field == _INLINE:
            return rest | {"content": self._inlined(thought, message.get("content") or "")}
        return rest | {self.thought_field: thought}

    @cached_property
    def _tags(self) -> tuple[str, str]:
        known = self.tokenizer.get_vocab()
        return next((pair for pair in THINK_TAGS if pair[0] in known and pair[1] in known), THINK_TAGS[0])

    def _inlined(self, thought: str, content: str) -> str:
        opening, closing = self._tags
        return f"{opening}\n{thought.strip()}\n{closing}\n\n{content}"


def render_row(template: Template, row: Row) -> Rendering:
    """The row as text, with the spans of its supervised turns.

    Raises:
        Unmaskable: if a supervised turn does not stand in the template's rendering as it was answered.
    """
    return _render_one(template, row) if len(row.targets) == 1 else _render_many(template, row)


def _render_one(template: Template, row: Row) -> Rendering:
    at = row.targets[0]
    history, answer = row.messages[:at], row.messages[at]
    prompt = template.render(history, row.tools, prompt=True)
    whole = template.render([*history, answer], row.tools)
    start, changed = len(prompt), not whole.startswith(prompt)
    if changed:
        # Where an answer's rendering lacks what the prompt opens (such as `<think>`), the two still share
        # all that was said before; what they do not share is the answer.
        start = common_length(prompt, whole)
        if not whole.startswith(said := template.render(history, row.tools)) or start < len(said):
            raise Unmaskable("history_changed", "the answer changes how the turns before it are rendered")
    _check_answer(whole[start:], answer)
    is_cut = row.finish_reasons[0] == "length"
    end = start + _end_of_cut(whole[start:], answer) if is_cut else len(whole)
    return Rendering(whole[:end], ((start, end),), (is_cut,), changed)


def _render_many(template: Template, row: Row) -> Rendering:
    whole = template.render(row.messages, row.tools)
    spans, cut = [], []
    for target, finish in zip(row.targets, row.finish_reasons, strict=True):
        prompt = template.render(row.messages[:target], row.tools, prompt=True)
        until = template.render(row.messages[: target + 1], row.tools)
        if not until.startswith(prompt) or not whole.startswith(until):
            raise Unmaskable("history_changed", "later turns change how an earlier one is rendered")
        start, end = len(prompt), len(until)
        _check_answer(whole[start:end], row.messages[target])
        cut.append(finish == "length")
        if cut[-1]:
            end = start + _end_of_cut(whole[start:end], row.messages[target])
        spans.append((start, end))
    return Rendering(whole[: spans[-1][1]], tuple(spans), tuple(cut))


def _check_answer(text: str, answer: Message) -> None:
    """All that the model said must stand in the rendering of its turn, or training on it would teach another."""
    for reason, part in (("thought_lost", answer.get("reasoning_content")), ("content_changed", answer.get("content"))):
        if part and (said := part.strip()) not in text:
            raise Unmaskable(reason, f"not in the template's rendering: {said[:60]!r}")
    for call in answer.get("tool_calls") or ():
        name = (call.get("function") or {}).get("name")
        if name and name not in text:
            raise Unmaskable("tool_call_lost", f"not in the template's rendering: a call of {name[:60]!r}")


def _end_of_cut(text: str, answer: Message) -> int:
    """Where an answer stops that was cut off by the token limit: the template's closing words were not the model's."""
    if answer.get("tool_calls"):
        return len(text)
    for part in (answer.get("content"), answer.get("reasoning_content")):
        if part and not is_blank(part):
            said = part.strip()
            return text.rfind(said) + len(said)
    return len(text)


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many of their first characters or tokens two sequences have in common."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def prompt_text(template: Template, row: Row) -> str:
    """The prompt of a row of one turn as the server saw it.

    Raises:
        Unmaskable: if the template refuses it.
    """
    return template.render(row.messages[: row.targets[0]], row.tools, prompt=True)


def texts_to_encode(rendering: Rendering) -> list[str]:
    """The texts whose tokens `tokens_of` needs: the whole, then what comes before each of its borders."""
    text, last = rendering.text, len(rendering.text)
    borders = [border for span in rendering.spans for border in span if border != last]
    return [text, *(text[:border] for border in borders)]


def tokens_of(template: Template, rendering: Rendering, encoded: Sequence[list[int]]) -> TokenRow:
    """The row as tokens, its mask ending with each turn's end token.

    Args:
        encoded: token ids of `texts_to_encode(rendering)`.

    Raises:
        Unmaskable: if the borders of the turns are no borders of tokens.
    """
    ids, *prefixes = encoded
    if any(ids[: len(prefix)] != prefix for prefix in prefixes):
        return _split_at_border(template, rendering)
    borders = {len(rendering.text): len(ids)}
    inner = (border for span in rendering.spans for border in span if border != len(rendering.text))
    borders |= {border: len(prefix) for border, prefix in zip(inner, prefixes, strict=True)}
    return _ended(template, rendering, ids, [(borders[start], borders[end]) for start, end in rendering.spans])


def _split_at_border(template: Template, rendering: Rendering) -> TokenRow:
    """Prompt and answer as tokens of their own, as a server has them, where one token would span both."""
    if len(rendering.spans) > 1:
        raise Unmaskable("history_changed", "a token spans the border between two turns")
    start = rendering.spans[0][0]
    before = encode(template.tokenizer, rendering.text[:start])
    after = encode(template.tokenizer, rendering.text[start:])
    if template.decode([*before, *after]) != template.decode(encode(template.tokenizer, rendering.text)):
        raise Unmaskable("no_border", "prompt and answer give other text when they are tokenized apart")
    return _ended(template, rendering, [*before, *after], [(len(before), len(before) + len(after))])


def _ended(template: Template, rendering: Rendering, ids: list[int], spans: Sequence[tuple[int, int]]) -> TokenRow:
    """Cut off what the template writes after each turn's end."""
    ended, has_end_token = [], True
    for (start, end), is_cut in zip(spans, rendering.cut, strict=True):
        if is_cut:
            ended.append((start, end))
        else:
            real_end, found = template.end_of_turn(ids, start, end)
            has_end_token = has_end_token and found
            ended.append((start, real_end))
    return TokenRow(ids[: ended[-1][1]], tuple(ended), has_end_token)
