"""One request: sent, its answer judged, or its failure understood; the outcome is a journal entry."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
import requests

from .client import Call, Client
from .config import Config
from .conversation import Conversation, TurnRequest, without_thoughts
from .engines.base import Answer, Engine, Fault
from .errors import UserError
from .journal import Journal
from .logs import get_logger
from .pool import ServerPool, ServerView
from .quality.verdicts import Expectation, judge

log = get_logger(__name__)

# How long a supervisor may take to say that the engine behind a broken connection is gone.
CRASH_NOTICE = 3.0
# States that only the death of an engine leads to; one that is draining or away was not killed by a prompt.
CRASHED = frozenset({"restarting", "failed"})


@dataclass(eq=False)
class Task:
    """A conversation to bring to its outcome, and the journal that its entries go to."""

    conversation: Conversation
    journal: Journal


@dataclass(eq=False)
class Flight:
    """One request on its way.

    Args:
        server: position of its server in the pool; `instance`: that engine's start number.
        pace: the server's `ServerView.pace` when it was sent.
        twin: the same request at another server, while it is under way (hedging).
        beaten: whether the twin's answer came first.
        settled: whether its own answer counts.
    """

    task: Task
    request: TurnRequest
    server: int
    instance: int
    call: Call
    sent_at: float
    pace: float
    twin: Flight | None = None
    beaten: bool = False
    settled: bool = False


class Asker:
    """Sends requests for one job.

    Args:
        stopped: whether the job is ending, so that failures mean nothing any more.
    """

    def __init__(
        self, config: Config, engine: Engine, pool: ServerPool, client: Client, stopped: Callable[[], bool]
    ) -> None:
        self.config, self.engine = config, engine
        self._pool, self._client, self._stopped = pool, client, stopped

    def ask(self, flight: Flight) -> dict[str, Any] | None:
        """The journal entry for what came back, or None if the prompt is simply to be sent again."""
        server = self._pool.servers[flight.server]
        request, conversation = flight.request, flight.task.conversation
        body = self.engine.request_body(
            self.config, without_thoughts(request.messages), request.tools, request.seed, request.overrides
        )
        try:
            status, raw = self._client.post(
                f"{server.place.url}/v1/chat/completions",
                orjson.dumps(body),
                api_key=server.place.api_key,
                call=flight.call,
            )
        except requests.RequestException as error:
            return self._note_broken(flight, server, error)
        seconds = time.monotonic() - flight.sent_at
        result = self.engine.read_answer(status, raw)
        if isinstance(result, Fault):
            return self._note_fault(flight, server, result, seconds)
        server.note_success()
        conversation.server = flight.server
        conversation.faults = 0
        judgement = judge(result, expectation(self.config, request, body))
        return self._entry(flight, "answer", seconds, judgement.verdict, judgement.detail, _answer_dict(result))

    def _note_broken(self, flight: Flight, server: ServerView, error: Exception) -> dict[str, Any] | None:
        """No whole answer: the connection was refused, cut or reset. Only a crash counts against the prompt."""
        if self._stopped() or flight.beaten:
            return None
        server.note_fault(time.monotonic())
        if not flight.call.sent or (flight.call.aborted and server.instance == flight.instance):
            return None
        if not self._crashed(flight, server):
            return None
        log.warning(
            "server %s went down with prompt %s in flight (%s)", server.place.name, flight.task.conversation.id, error
        )
        seconds = time.monotonic() - flight.sent_at
        return self._entry(flight, "crash", seconds, "poison", type(error).__name__, None)

    def _crashed(self, flight: Flight, server: ServerView) -> bool:
        """Whether the engine that had the request died; its supervisor says so within a few seconds."""
        deadline = time.monotonic() + CRASH_NOTICE
        while time.monotonic() < deadline and not self._stopped():
            if server.instance > flight.instance or server.state in CRASHED:
                return True
            time.sleep(0.2)
        return False

    def _note_fault(self, flight: Flight, server: ServerView, fault: Fault, seconds: float) -> dict[str, Any] | None:
        """A fault of the prompt's own is final; a server's is tried again, elsewhere if it can be."""
        conversation = flight.task.conversation
        if fault.is_final:
            server.note_success()
            return self._entry(flight, "fault", seconds, fault.kind, fault.message, None)
        if fault.kind == "unauthorized":
            raise UserError(
                f"refused the api key: {fault.message}",
                where=f"server {server.place.name}",
                hint="see to the key, then run the same command again",
            )
        was_well = server.note_fault(time.monotonic())
        log.warning("server %s on prompt %s: %s: %s", server.place.name, conversation.id, fault.kind, fault.message)
        if was_well and fault.kind != "queue_full":
            conversation.faults += 1
        if conversation.faults >= self.config.dispatch.attempts_per_fault:
            detail = f"{conversation.faults} faults, the last: {fault.kind}: {fault.message}"
            return self._entry(flight, "fault", seconds, "engine_error", detail, None)
        return None

    def _entry(
        self, flight: Flight, kind: str, seconds: float, verdict: str, detail: str, answer: dict[str, Any] | None
    ) -> dict[str, Any]:
        request = flight.request
        entry: dict[str, Any] = {
            "id": flight.task.conversation.id,
            "kind": kind,
            "turn": request.turn,
            "attempt": request.attempt,
            "fingerprint": request.fingerprint,
            "seed": request.seed,
            "verdict": verdict,
            "detail": detail,
            "server": self._pool.servers[flight.server].place.name,
            "seconds": round(seconds, 3),
            "at": round(time.time(), 3),
        }
        if request.overrides:
            entry["overrides"] = request.overrides
        if answer is not None:
            entry["answer"] = answer
        return entry


def expectation(config: Config, request: TurnRequest, body: dict[str, Any]) -> Expectation:
    """What the answer to a request must be, under the run's settings."""
    texts = [message["content"] for message in request.messages if isinstance(message.get("content"), str)]
    return Expectation(
        thinking=config.thinking.enabled,
        max_tokens=body.get("max_tokens"),
        min_supervised_tokens=config.quality.min_supervised_tokens,
        tool_calls_count=config.quality.tool_calls_count,
        prompt_text="\n".join(texts),
    )


def _answer_dict(answer: Answer) -> dict[str, Any]:
    return {key: value for key, value in vars(answer).items() if value is not None}
