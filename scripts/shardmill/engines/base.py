"""What an inference engine is to Shardmill: a small adapter, with no state and no process of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ..config import Config


@dataclass(frozen=True)
class Launch:
    """How to start one server: a command that never passes a shell, and additions to its environment.

    Secrets go into `environment` or `files`, never into `command`, where every user of the machine
    can read them.

    Args:
        files: what to write before the start, by path, for its owner's eyes alone; removed once the server is ready.
        ports: further ports that must be free.
    """

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServerPlace:
    """Where one server of the pool runs.

    Args:
        name: its number in the pool, "0" to "N-1".
        gpus: values for CUDA_VISIBLE_DEVICES, empty on a machine without GPUs.
        api_key: the key that requests must carry, or None.
    """

    name: str
    host: str
    port: int
    gpus: tuple[str, ...] = ()
    api_key: str | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class Load:
    """What a server says of itself at one moment. Counters only ever grow while it lives.

    Args:
        running: requests being decoded.
        queued: requests that wait inside the server.
        prompt_tokens, completion_tokens: totals since its start; None where the engine counts none.
        capacity: requests that can run at once; None where the engine does not say.
        details: further figures for samples and reports (acceptance length, token usage, ...).
    """

    running: int
    queued: int
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    capacity: int | None = None
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One completion as the engine gave it.

    `finish_reason` is `stop`, `length`, `tool_calls` or whatever else the engine says.
    `usage` holds prompt_tokens, completion_tokens and, where known, reasoning_tokens.
    """

    content: str
    reasoning_content: str | None
    tool_calls: list[dict[str, Any]] | None
    finish_reason: str
    usage: dict[str, int]
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None


@dataclass(frozen=True)
class BootReport:
    """What a server that has begun to answer says of itself, and what of that is not as configured.

    Args:
        facts: for the readiness file and the manifest, so never a secret.
        errors: why it must not be used, in words.
        warnings: what is less than asked for, but may be used.
        capacity: requests that can run at once; None where it does not say.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    capacity: int | None = None


FaultKind = Literal[
    # About the prompt itself; final.
    "too_long",
    "template_error",
    "bad_request",
    # About the server; the prompt is sent again.
    "queue_full",
    "server_error",
    "aborted",
    "malformed_answer",
    "unauthorized",
]
FINAL_FAULTS: frozenset[str] = frozenset({"too_long", "template_error", "bad_request"})


@dataclass(frozen=True)
class Fault:
    """Why a request got no completion."""

    kind: FaultKind
    message: str

    @property
    def is_final(self) -> bool:
        """Whether sending the same prompt again can change nothing."""
        return self.kind in FINAL_FAULTS


class Engine(Protocol):
    """The adapter. All of it is pure but `load` and `boot_report`, which make HTTP requests with a deadline, and
    `launch`, which may ask the installed engine what it is.

    `proves_thinking`: whether a server must prove the thinking contract by a whole answer before it becomes ready.
    """

    kind: str
    proves_thinking: bool

    def launch(self, config: Config, place: ServerPlace, model: Path) -> Launch:
        """The command that starts one server of `model`.

        Raises:
            UserError: if the settings cannot work with the installed engine.
        """
        ...

    def load(self, place: ServerPlace, *, timeout: float) -> Load | None:
        """The server's load, or None while it does not answer."""
        ...

    def boot_report(self, config: Config, place: ServerPlace, model: Path | None, log_tail: str) -> BootReport:
        """What a server that has just begun to answer is, compared with what was asked for.

        Args:
            model: what it was launched with; None of an external server.
            log_tail: the end of its log; empty of an external server.
        """
        ...

    def window(self, config: Config) -> int:
        """Requests to keep at one server where `Load.capacity` is None."""
        ...

    def request_body(
        self,
        config: Config,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        seed: int,
        overrides: dict[str, Any],
    ) -> dict[str, Any]:
        """Body of POST /v1/chat/completions for one turn; `overrides` are the prompt's own sampling settings."""
        ...

    def read_answer(self, status: int, body: bytes) -> Answer | Fault:
        """What an HTTP response means."""
        ...

    def telling_lines(self, log_tail: str) -> list[str]:
        """The lines of a dead server's log that say why it died, at most a handful."""
        ...
