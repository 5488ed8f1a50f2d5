"""One raw input record to one prompt, or to the reason why it is none. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from ..config import Prompts, Sampling
from ..files import canonical_json, sha256_hex
from .conversation import Reason, Refused, kind_of, read_conversation, shown

# In the order in which they are looked for where `prompts.field` is left out.
PROMPT_FIELDS = ("messages", "conversations", "turns", "prompt")

# Ids stand in every log line, journal and error message.
MAX_ID_LENGTH = 512

# orjson reads 1024 levels but writes only 254, and later stages wrap records in a few of their own.
MAX_DEPTH = 200

SAMPLING_KEYS = frozenset(Sampling.model_fields) - {"seed", "extra"}

_SURROGATE = re.compile(r"surrogate", re.IGNORECASE)


@dataclass(slots=True)
class PromptRecord:
    """A record that can be answered.

    Args:
        id: the record's own, or made from its content.
        line: its line (or Parquet row) number in the input, from 1.
        value: the normalised record as later stages read it: `id`, `line`, `messages`, where given
            `tools` and `sampling`, and `fields` with whatever else the record held.
        encoded: `value` as one JSON line, its newline included.
        id_is_made: whether the id was made from the content.
    """

    id: str
    line: int
    value: dict[str, Any]
    encoded: bytes
    id_is_made: bool


@dataclass(slots=True)
class Unusable:
    """A record that cannot be answered: its line number, a typed reason and one line of detail."""

    line: int
    reason: Reason
    detail: str


def read_record(raw: bytes, number: int, settings: Prompts) -> PromptRecord | Unusable:
    """Normalise one raw record.

    On purpose:
    - NUL (as the escape \\u0000) and U+2028 stay as they are: both are text that JSON and the engines'
      HTTP interfaces carry, and a prompt that was changed silently is worse than an odd one.
    - NaN, Infinity and numbers like 1e400 are no JSON: `bad_json`.
    - Whole numbers beyond 64 bits become floats, as orjson reads them; as an id they are refused.
    - Of a key that occurs twice the last one counts.

    Args:
        raw: the record's JSON without its line end.
        number: its line (or row) number, from 1.

    Returns:
        The prompt, or why it is none. Nothing is raised for any content.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return Unusable(number, *_not_json(raw, error))
    try:
        return _normalise(value, raw, number, settings)
    except Refused as refused:
        return Unusable(number, refused.reason, refused.detail)


def _normalise(value: Any, raw: bytes, number: int, settings: Prompts) -> PromptRecord:
    if type(value) is not dict:
        raise Refused("not_an_object", f"the line holds {kind_of(value)}, expected an object")
    # The count of brackets bounds the depth and costs next to nothing.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise Refused("too_deep", f"nested more than {MAX_DEPTH} levels deep")
    name = _prompt_field(value, settings.field)
    messages = read_conversation(value[name], name, settings.turns, settings.system)
    tools = _read_tools(value.get("tools"))
    sampling = _read_sampling(value.get("sampling"))
    record_id = _read_id(value.get(settings.id_field), settings.id_field)
    id_is_made = record_id is None
    if record_id is None:
        record_id = sha256_hex(canonical_json({"messages": messages, "tools": tools}))[:16]
    result: dict[str, Any] = {"id": record_id, "line": number, "messages": messages}
    if tools:
        result["tools"] = tools
    if sampling:
        result["sampling"] = sampling
    result["fields"] = _rest(value, name, settings.id_field)
    return PromptRecord(record_id, number, result, orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE), id_is_made)


def _rest(value: dict[str, Any], name: str, id_field: str) -> dict[str, Any]:
    """`value` without what the result holds elsewhere; it is changed in place, which is cheaper than a copy."""
    # A plain string is cheap to keep and what people join on; a conversation would only stand there twice.
    if type(value[name]) is not str:
        del value[name]
    if id_field == "id":
        value.pop("id", None)
    value.pop("tools", None)
    value.pop("sampling", None)
    return value


def _prompt_field(value: dict[str, Any], configured: str | None) -> str:
    """The field to read; a null field is an absent one, because Parquet has no other way to say so."""
    for name in (configured,) if configured is not None else PROMPT_FIELDS:
        if value.get(name) is not None:
            return name
    looked_for = f"`{configured}`" if configured is not None else ", ".join(f"`{name}`" for name in PROMPT_FIELDS)
    there = ", ".join(shown(key)[1:-1] for key in list(value)[:10]) or "none"
    raise Refused("no_prompt", f"no {looked_for} among its fields ({there})")


def _read_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    if type(tools) is not list:
        raise Refused("bad_tools", f"`tools` holds {kind_of(tools)}, expected a list of objects")
    for at, tool in enumerate(tools):
        if type(tool) is not dict:
            raise Refused("bad_tools", f"tools[{at}] holds {kind_of(tool)}, expected an object")
    return tools or None


def _read_sampling(sampling: Any) -> dict[str, Any] | None:
    if sampling is None:
        return None
    if type(sampling) is not dict:
        raise Refused("bad_sampling", f"`sampling` holds {kind_of(sampling)}, expected an object")
    given = {key: item for key, item in sampling.items() if item is not None}
    if unknown := given.keys() - SAMPLING_KEYS:
        known = ", ".join(sorted(SAMPLING_KEYS))
        raise Refused("bad_sampling", f"`sampling` holds {shown(min(unknown))}; a prompt may set {known}")
    try:
        Sampling.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise Refused("bad_sampling", f"sampling.{key}: {problem['msg']}, found {shown(problem['input'])}") from None
    return given or None


def _read_id(record_id: Any, name: str) -> str | None:
    """The id as text, or None where the record has none."""
    if record_id is None:
        return None
    if type(record_id) is int:
        return str(record_id)
    if type(record_id) is not str:
        raise Refused("bad_id", f"`{name}` holds {shown(record_id)}, expected text or a 64-bit whole number")
    if not record_id or record_id.isspace():
        raise Refused("bad_id", f"`{name}` is blank")
    if len(record_id) > MAX_ID_LENGTH:
        raise Refused("bad_id", f"`{name}` is {len(record_id)} characters long, at most {MAX_ID_LENGTH} are allowed")
    return record_id


def _not_json(raw: bytes, error: orjson.JSONDecodeError) -> tuple[Reason, str]:
    try:
        raw.decode()
    except UnicodeDecodeError as fault:
        return "invalid_utf8", f"byte {fault.start + 1} of the line is not UTF-8 (0x{raw[fault.start]:02x})"
    where = f"{error.msg} at character {error.pos + 1}"
    if _SURROGATE.search(error.msg):
        return "lone_surrogate", f"half of a UTF-16 surrogate pair, which is no text ({where})"
    if "depth limit" in error.msg:
        return "too_deep", where
    return "bad_json", where


def _depth(value: Any) -> int:
    """Levels of nesting, counted without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for item in level
            if type(item) in (dict, list)
            for child in (item.values() if type(item) is dict else item)
        ]
    return depth
