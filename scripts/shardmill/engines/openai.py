"""Any server that speaks the OpenAI chat API; also what the adapters of the other engines share.

Field names beyond OpenAI's own (`top_k`, `min_p`, `repetition_penalty`, `chat_template_kwargs`) are the
ones that vLLM and SGLang know. A server that refuses one of them can be spared it by
`sampling.extra: {top_k: null}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import requests
from prometheus_client.parser import text_string_to_metric_families

from ..config import Config
from ..errors import UserError
from .base import Answer, BootReport, Fault, FaultKind, Launch, Load, ServerPlace

_MESSAGE_LENGTH = 600
_TOO_LONG = re.compile(
    r"context.?length|context size|context window|maximum.{0,20}(length|tokens)|too (long|many tokens)"
    r"|longer than the model|exceed.{0,40}token",
    re.IGNORECASE,
)
_TEMPLATE = re.compile(r"template|jinja", re.IGNORECASE)
_TROUBLE = re.compile(
    r"\b(error|exception|fatal|failed|failure|cannot|killed|assert\w*|abort\w*|out of memory|no such file)\b"
    r"|Error:|Exception:",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ExternalPlace(ServerPlace):
    """A server that runs somewhere already, known by its base URL."""

    base_url: str = ""

    @property
    def url(self) -> str:
        return self.base_url


class OpenAI:
    """Adapter for a server of unknown make: no load to read, and nothing to launch."""

    kind = "openai"
    proves_thinking = True

    def launch(self, config: Config, place: ServerPlace, model: Path) -> Launch:
        raise UserError("an external server is not started from here", where=f"server {place.name}")

    def load(self, place: ServerPlace, *, timeout: float) -> Load | None:
        """No figures; only whether it answers."""
        response = get(place, "/v1/models", timeout=timeout)
        return None if response is None or response.status_code >= 500 else Load(running=0, queued=0)

    def boot_report(self, config: Config, place: ServerPlace, model: Path | None, log_tail: str) -> BootReport:
        """Nothing is known of a server of unknown make."""
        return BootReport()

    def window(self, config: Config) -> int:
        return config.engine.external.window

    def request_body(
        self,
        config: Config,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        seed: int,
        overrides: dict[str, Any],
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": messages, "stream": False, "n": 1}
        if config.engine.kind == "external" and config.engine.external.model:
            body["model"] = config.engine.external.model
        values = config.sampling.model_dump(exclude={"extra", "seed"})
        values |= {key: value for key, value in overrides.items() if key in values}
        body |= self._sampling_fields(values)
        if config.thinking.enabled is not None:
            body["chat_template_kwargs"] = {config.thinking.template_key: config.thinking.enabled}
        if tools:
            body["tools"] = tools
        rest = {key: value for key, value in overrides.items() if key not in values}
        for key, value in (config.sampling.extra | rest).items():
            both_are_mappings = isinstance(value, dict) and isinstance(body.get(key), dict)
            body[key] = body[key] | value if both_are_mappings else value
        body["seed"] = seed
        return {key: value for key, value in body.items() if value is not None}

    def _sampling_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """Sampling settings (all but `seed` and `extra`, by our names) as the engine knows them."""
        return values

    def read_answer(self, status: int, body: bytes) -> Answer | Fault:
        if status != 200:
            return read_fault(status, body)
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            return Fault("malformed_answer", f"not JSON ({error}): {_shown(body)}")
        try:
            return read_completion(value)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            return Fault("malformed_answer", f"no completion ({type(error).__name__}: {error}): {_shown(body)}")

    def telling_lines(self, log_tail: str) -> list[str]:
        return pick_lines(log_tail, lambda line: bool(_TROUBLE.search(line)))


def get(place: ServerPlace, path: str, *, timeout: float) -> requests.Response | None:
    """GET from a server, with its key; None if no whole answer came in time."""
    headers = {"Authorization": f"Bearer {place.api_key}"} if place.api_key else {}
    with requests.Session() as session:
        # Proxy settings of the environment are for the outside world, never for a server of the pool.
        session.trust_env = False
        try:
            return session.get(place.url + path, headers=headers, timeout=timeout, allow_redirects=False)
        except requests.RequestException:
            return None


def post_chat(place: ServerPlace, body: dict[str, Any], *, timeout: float) -> tuple[int, bytes]:
    """POST one chat completion request; returns status and body.

    Raises:
        requests.RequestException: if no whole answer came in time.
    """
    headers = {"Content-Type": "application/json"}
    if place.api_key:
        headers["Authorization"] = f"Bearer {place.api_key}"
    with requests.Session() as session:
        session.trust_env = False
        url = f"{place.url}/v1/chat/completions"
        response = session.post(url, data=orjson.dumps(body), headers=headers, timeout=timeout, allow_redirects=False)
        return response.status_code, response.content


def get_json(place: ServerPlace, path: str, *, timeout: float) -> Any | None:
    """GET a JSON value; None if the server does not answer with one."""
    response = get(place, path, timeout=timeout)
    if response is None or response.status_code != 200:
        return None
    try:
        return orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return None


def get_metrics(place: ServerPlace, *, timeout: float) -> dict[str, float] | None:
    """The server's Prometheus samples by name, summed over labels; None if it does not answer with any."""
    response = get(place, "/metrics", timeout=timeout)
    if response is None or response.status_code != 200:
        return None
    totals: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    except ValueError:
        return None
    return totals


def served_model(place: ServerPlace, *, timeout: float) -> str | None:
    """Name of the first model that the server lists."""
    listed = get_json(place, "/v1/models", timeout=timeout)
    try:
        return str(listed["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        return None


def read_completion(value: Any) -> Answer | Fault:
    """The completion in the decoded body of a 200 response.

    Raises:
        KeyError, TypeError, IndexError, ValueError, AttributeError: if there is none.
    """
    if "error" in value and "choices" not in value:
        return Fault("server_error", _message(value))
    choice = value["choices"][0]
    message, finish_reason = choice["message"], choice["finish_reason"]
    if finish_reason == "abort":
        return Fault("aborted", "the server aborted the request")
    content = message.get("content")
    thought = message.get("reasoning_content")
    thought = message.get("reasoning") if thought is None else thought
    for name, text in (("content", content), ("reasoning_content", thought)):
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name} is a {type(text).__name__}")
    if not isinstance(finish_reason, str):
        raise TypeError(f"finish_reason is {finish_reason!r}")
    tool_calls = message.get("tool_calls")
    if tool_calls and not (isinstance(tool_calls, list) and all(isinstance(call, dict) for call in tool_calls)):
        raise TypeError(f"tool_calls is a {type(tool_calls).__name__}")
    return Answer(
        content=content or "",
        reasoning_content=thought,
        tool_calls=tool_calls or None,
        finish_reason=finish_reason,
        usage=read_usage(value["usage"]),
    )


def read_usage(usage: dict[str, Any]) -> dict[str, int]:
    """prompt_tokens, completion_tokens and, where given, reasoning_tokens."""
    found = {key: _count(usage[key]) for key in ("prompt_tokens", "completion_tokens")}
    reasoning = usage.get("reasoning_tokens")
    if reasoning is None:
        reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return found if reasoning is None else found | {"reasoning_tokens": _count(reasoning)}


def _count(value: Any) -> int:
    """A number of tokens; what is none must not get into a journal, where integers have 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 53:
        raise ValueError(f"{value!r} is no number of tokens")
    return int(value)


def read_fault(status: int, body: bytes) -> Fault:
    """What a response other than 200 means, as far as its status and its message tell."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    message = f"{status}: {_message(value) if value is not None else _shown(body)}"
    return Fault(_fault_kind(status, message), message)


def _fault_kind(status: int, message: str) -> FaultKind:
    if status in (401, 403):
        return "unauthorized"
    if status in (429, 503):
        return "queue_full"
    if status in (400, 413, 422):
        if _TOO_LONG.search(message) or status == 413:
            return "too_long"
        return "template_error" if _TEMPLATE.search(message) else "bad_request"
    # A wrong path or model name (404) and the like are the server's, or the configuration's, not the prompt's.
    return "server_error"


def _message(value: Any) -> str:
    """The message in an error body: `{"error": {"message": ...}}`, `{"message": ...}`, `{"detail": ...}`."""
    error = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return _shown(error if isinstance(error, str) else orjson.dumps(error))


def _shown(text: str | bytes) -> str:
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    text = " ".join(text.split())
    return text if len(text) <= _MESSAGE_LENGTH else text[: _MESSAGE_LENGTH - 3] + "..."


def pick_lines(log_tail: str, is_telling: Callable[[str], bool], *, most: int = 5) -> list[str]:
    """The telling lines of a log, each once: the first, for the cause, and the last; the log's end if none tells."""
    lines = [line.strip()[:300] for line in log_tail.splitlines() if line.strip()]
    telling = list(dict.fromkeys(line for line in lines if is_telling(line)))
    if not telling:
        return lines[-2:]
    return telling if len(telling) <= most else [telling[0], *telling[1 - most :]]
