"""Which training rows a completion makes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import orjson

from ..conversation import without_thoughts
from ..errors import UserError
from ..quality.verdicts import is_blank

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One training sample before it is written.

    Args:
        id: the completion's id.
        turn: number of its last supervised turn among the turns that the model answered, from 0.
        messages: the context and the supervised turns; ends in an assistant turn.
        targets: positions of the supervised turns in `messages`.
        finish_reasons: how each of them ended.
        usage_tokens: tokens that the engine counted for all of them; None where it did not.
        prompt_tokens: and for the prompt of the last one.
        token_ids: `{"prompt": [...] or None, "completion": [...]}` of the only target, as the engine returned them.
    """

    id: str
    turn: int
    messages: list[Message]
    tools: list[Any] | None
    targets: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    usage_tokens: int | None
    prompt_tokens: int | None
    token_ids: dict[str, Any] | None = None

    @property
    def has_thought(self) -> bool:
        """Whether each supervised turn holds a thought."""
        return not any(is_blank(self.messages[target].get("reasoning_content")) for target in self.targets)


def answered_turns(record: dict[str, Any]) -> list[int]:
    """Positions in `messages` of the turns that the model answered in this run.

    With `prompts.turns: last` that is the last one, and assistant turns before it came with the input; with
    `all` it is every assistant turn.

    Raises:
        UserError: if the record does not end in an answer.
    """
    positions = [at for at, message in enumerate(record["messages"]) if message["role"] == "assistant"]
    if not positions or positions[-1] != len(record["messages"]) - 1:
        raise UserError(f"completion {record['id']} does not end in an answer", hint="run `snakemake verify`")
    return positions[-len(record["turns"]) :] if record.get("turns") else positions[-1:]


def turn_row(record: dict[str, Any], targets: list[int], number: int) -> Row:
    """The row of one answered turn: the conversation as it was sent, and the answer."""
    at = targets[number]
    is_last = number == len(targets) - 1
    answer = record["turns"][number] if record.get("turns") else record
    messages = record["messages"]
    return Row(
        id=record["id"],
        turn=number,
        messages=[*without_thoughts(messages[:at]), messages[at]],
        tools=record.get("tools"),
        targets=(at,),
        finish_reasons=(answer["finish_reason"],),
        usage_tokens=answer["usage"].get("completion_tokens"),
        prompt_tokens=answer["usage"].get("prompt_tokens"),
        token_ids=record.get("token_ids") if is_last else None,
    )


def turn_rows(record: dict[str, Any]) -> list[Row]:
    """A row for each answered turn."""
    targets = answered_turns(record)
    return [turn_row(record, targets, number) for number in range(len(targets))]


def whole_row(record: dict[str, Any], loss_on: Literal["last", "all"]) -> Row:
    """The row of a whole conversation. With one supervised turn it is that turn's own."""
    targets = answered_turns(record)
    if loss_on == "last" or len(targets) == 1:
        return turn_row(record, targets, len(targets) - 1)
    answers = record["turns"]
    counts = [answer["usage"].get("completion_tokens") for answer in answers]
    return Row(
        id=record["id"],
        turn=len(targets) - 1,
        messages=record["messages"],
        tools=record.get("tools"),
        targets=tuple(targets),
        finish_reasons=tuple(answer["finish_reason"] for answer in answers),
        usage_tokens=None if None in counts else sum(counts),
        prompt_tokens=answers[-1]["usage"].get("prompt_tokens"),
    )


def conversation_lines(record: dict[str, Any], multi_turn: Literal["whole", "per_turn"]) -> list[bytes]:
    """The completion as JSON lines for SpecForge and DeepSpec: `id`, `status` and `conversations`.

    Every message has `role`, `content` and `reasoning_content` ("" where there is none), so that readers who
    infer a schema find one. What few conversations have stands only there: `tool_calls` and `tools`, as JSON
    text, which is how both readers take it, `name` and `tool_call_id`.
    """
    if multi_turn == "whole":
        return [_line(record["id"], record["messages"], record.get("tools"))]
    return [_line(f"{row.id}:{row.turn}", row.messages, row.tools) for row in turn_rows(record)]


def _line(name: str, messages: list[Message], tools: list[Any] | None) -> bytes:
    row: dict[str, Any] = {"id": name, "status": "success", "conversations": [_message(m) for m in messages]}
    if tools:
        row["tools"] = orjson.dumps(tools).decode()
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _message(message: Message) -> Message:
    found = {
        "role": message["role"],
        "content": message.get("content") or "",
        "reasoning_content": message.get("reasoning_content") or "",
    }
    if message.get("tool_calls"):
        found["tool_calls"] = orjson.dumps(message["tool_calls"]).decode()
    return found | {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
