"""Conversations: from the forms that data sets use to one list of OpenAI chat messages."""

from __future__ import annotations

from typing import Any, Literal

Reason = Literal[
    "invalid_utf8",
    "bad_json",
    "lone_surrogate",
    "too_deep",
    "not_an_object",
    "no_prompt",
    "empty_prompt",
    "bad_conversation",
    "unsupported_content",
    "bad_id",
    "bad_tools",
    "bad_sampling",
    "duplicate_id",
]

# ShareGPT's names, as its many descendants write them, beside OpenAI's own.
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
}

# What chat templates know of a message, beside role and content, and the type it must have. Other keys of a turn
# (labels, weights, time stamps) decide no answer and are left out.
EXTRAS: dict[str, type] = {"name": str, "reasoning_content": str, "tool_calls": list, "tool_call_id": str}

Message = dict[str, Any]


class Refused(Exception):
    """Why a record cannot be used: a typed reason and one line of detail."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason: Reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


def read_conversation(value: Any, name: str, turns: Literal["last", "all"], system: str | None) -> list[Message]:
    """The messages to send, from any recognised form.

    A string is one user turn; a list of strings is a list of user turns; a list of objects holds
    `role`/`content` (OpenAI) or `from`/`value` (ShareGPT) turns.

    With turns "last" the conversation ends at its last user or tool turn, and earlier assistant turns
    stay. With "all" it keeps its user turns in order and drops the assistant's, which are made again.
    The order of roles is otherwise left to the model's chat template, which knows what it accepts.

    Args:
        value: what the record holds.
        name: of the field it comes from, for messages.
        system: goes first where the conversation has no system turn.

    Raises:
        Refused: if it is no such form or holds nothing to answer.
    """
    if type(value) is str:
        if not value or value.isspace():
            raise Refused("empty_prompt", f"`{name}` is blank")
        messages = [{"role": "user", "content": value}]
    elif type(value) is list:
        if not value:
            raise Refused("empty_prompt", f"`{name}` holds no turns")
        messages = _cut([_read_turn(turn, f"{name}[{at}]") for at, turn in enumerate(value)], name, turns)
    else:
        raise Refused("bad_conversation", f"`{name}` holds {kind_of(value)}, expected text or a list of turns")
    if system is not None and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _read_turn(turn: Any, where: str) -> Message:
    if type(turn) is str:
        turn = {"role": "user", "content": turn}
    elif type(turn) is not dict:
        raise Refused("bad_conversation", f"{where} holds {kind_of(turn)}, expected an object")
    # A null key is an absent one: Parquet files hold every key of every turn.
    role_key, content_key = ("role", "content") if turn.get("role") is not None else ("from", "value")
    name = turn.get(role_key)
    if name is None:
        raise Refused("bad_conversation", f"{where} has neither `role` nor `from`")
    role = ROLES.get(name) if type(name) is str else None
    if role is None:
        raise Refused("bad_conversation", f"{where} has the unknown role {shown(name)}")
    message = {"role": role, "content": ""}
    for key, kind in EXTRAS.items():
        if (extra := turn.get(key)) is not None and extra != []:
            if type(extra) is not kind:
                raise Refused("bad_conversation", f"{where}.{key} holds {kind_of(extra)}")
            message[key] = extra
    if any(type(call) is not dict for call in message.get("tool_calls", ())):
        raise Refused("bad_conversation", f"{where}.tool_calls must hold objects")
    content = turn.get(content_key)
    if content is not None:
        message["content"] = _read_content(content, f"{where}.{content_key}")
    elif "tool_calls" not in message:
        raise Refused("bad_conversation", f"{where} has no `{content_key}`")
    if role == "user" and not message["content"].strip():
        raise Refused("empty_prompt", f"{where} is a blank user turn")
    return message


def _read_content(content: Any, where: str) -> str:
    """Text, or OpenAI's list of parts as long as all of them are text."""
    if type(content) is str:
        return content
    if type(content) is not list:
        raise Refused("bad_conversation", f"{where} holds {kind_of(content)}, expected text")
    texts = []
    for part in content:
        kind = part.get("type") if type(part) is dict else None
        if kind != "text":
            raise Refused("unsupported_content", f"{where} holds a part of type {shown(kind)}; only text can be sent")
        text = part.get("text")
        if type(text) is not str:
            raise Refused("bad_conversation", f"{where} holds a text part without text")
        texts.append(text)
    return "".join(texts)


def _cut(messages: list[Message], name: str, turns: Literal["last", "all"]) -> list[Message]:
    """Keep what is to be sent; see `read_conversation`."""
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise Refused("empty_prompt", f"`{name}` holds no user turn")
    _check_tool_turns(roles, name)
    if turns == "all":
        if "tool" in roles:
            raise Refused(
                "bad_conversation",
                f"`{name}` holds tool results, answers to calls that `turns: all` makes again; use `turns: last`",
            )
        return [message for message in messages if message["role"] != "assistant"]
    while messages[-1]["role"] not in ("user", "tool"):
        messages.pop()
    return messages


def _check_tool_turns(roles: list[str], name: str) -> None:
    """A tool result answers an assistant turn; there may be several in a row."""
    for at, role in enumerate(roles):
        if role == "tool" and (not at or roles[at - 1] not in ("assistant", "tool")):
            raise Refused("bad_conversation", f"{name}[{at}] is a tool turn that follows no assistant turn")


def kind_of(value: Any) -> str:
    """A JSON value's type in words."""
    if value is None:
        return "null"
    names: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object")


def shown(value: Any) -> str:
    """A JSON value for a message: short, on one line."""
    if type(value) in (dict, list):
        return kind_of(value)
    text = ascii(value) if type(value) is not str else repr(value[:60])
    return text if len(text) <= 60 else text[:57] + "..."
