"""The model's own tokenizer and chat template, through transformers (no torch), from local files only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from ..config import Config
from ..conversation import without_thoughts
from ..errors import UserError

Message = dict[str, Any]


class TemplateRefused(Exception):
    """The chat template cannot render a conversation; says why."""


def load_tokenizer(folder: Path, *, chat_template: str | None = None, trust_remote_code: bool = False) -> Any | None:
    """The fast tokenizer of a model folder, or None where the folder has none (a GGUF file alone).

    Args:
        folder: where the model lies; nothing is looked up elsewhere.
        chat_template: file with a template to use in place of the model's own (`model.chat_template`).
        trust_remote_code: let the model's own code make the tokenizer.

    Raises:
        UserError: if there is one that cannot be loaded.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    # transformers says at import that torch is missing, which here is as it should be.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            os.path.abspath(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever a damaged or unknown file makes transformers raise
        raise UserError(
            f"its tokenizer cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())[:300]})",
            where=str(folder),
            hint="see to its tokenizer files",
        ) from error
    if not tokenizer.is_fast:
        raise UserError("has no tokenizer.json, and its tokenizer cannot be made one", where=str(folder))
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot be read ({error})", where=f"model.chat_template {chat_template}") from None
    return tokenizer


def template_arguments(config: Config) -> dict[str, Any]:
    """What is given to the chat template beside messages and tools: what every request of the run gives it."""
    given = config.sampling.extra.get("chat_template_kwargs")
    arguments = dict(given) if isinstance(given, dict) else {}
    if config.thinking.enabled is not None:
        arguments[config.thinking.template_key] = config.thinking.enabled
    return arguments


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[Any] | None,
    arguments: dict[str, Any],
    *,
    add_generation_prompt: bool,
) -> str:
    """The conversation as the chat template writes it.

    Raises:
        TemplateRefused: if the template does not take it, or there is none.
    """
    from jinja2.exceptions import TemplateError

    try:
        return tokenizer.apply_chat_template(
            [_with_parsed_arguments(message) for message in messages],
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **arguments,
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise TemplateRefused(f"{type(error).__name__}: {error}") from None


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of rendered text. The template writes all special tokens itself; none is added."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def count_prompt_tokens(
    tokenizer: Any | None, messages: Sequence[Message], tools: list[Any] | None, arguments: dict[str, Any]
) -> int | None:
    """Tokens of a prompt as a server must count them (`usage.prompt_tokens`).

    Args:
        tokenizer: as `load_tokenizer` gives it; None where the model folder has none.
        messages: the conversation to answer. Thoughts of earlier turns are left out, as they are in requests.
        arguments: see `template_arguments`.

    Returns:
        The count; None without a tokenizer, and for what its template refuses.
    """
    if tokenizer is None:
        return None
    try:
        text = render(tokenizer, without_thoughts(list(messages)), tools, arguments, add_generation_prompt=True)
    except TemplateRefused:
        return None
    return len(encode(tokenizer, text))


def _with_parsed_arguments(message: Message) -> Message:
    """Arguments of tool calls as objects: what servers give to templates, though the API's form is text."""
    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [_parsed_call(call) for call in message["tool_calls"]]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call
