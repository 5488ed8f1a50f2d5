"""Getting answers: dispatch over all ready servers of this machine, the journal, and failover.

One main thread hands out places (the ledger says where there is room) and watches over what is in
flight; one thread per request sends it, and journals, judges and applies what comes back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson
import requests

from .client import Call, Client
from .config import Config
from .conversation import Conversation, TurnRequest, without_thoughts
from .engines.base import Answer, Fault
from .engines.registry import engine_for
from .errors import UserError
from .journal import Journal
from .ledger import Ledger
from .logs import get_logger
from .owner import owner_is_alive
from .pool import ServerPool, ServerView
from .quality.verdicts import Expectation, judge

log = get_logger(__name__)

TICK = 0.05
REFRESH_INTERVAL = 0.5
PROGRESS_INTERVAL = 1.0
# How long a supervisor may take to say that the engine behind a broken connection is gone.
CRASH_NOTICE = 3.0


class Interrupted(Exception):
    """The job was told to stop; everything finished is in the journal."""


@dataclass
class Task:
    """A conversation to bring to its outcome, and the journal that its entries go to."""

    conversation: Conversation
    journal: Journal


def replay(task: Task) -> None:
    """Bring a conversation to where its journal has it."""
    conversation = task.conversation
    while (request := conversation.next_request()) is not None:
        if not conversation.replay(task.journal.entries(conversation.id, request.fingerprint)):
            return


@dataclass
class _InFlight:
    task: Task
    request: TurnRequest
    server: int
    instance: int
    call: Call
    sent_at: float


class Answering:
    """Brings conversations to their outcomes.

    Args:
        config: the run's configuration.
        name: what is answered, for messages ("shard 00003").
        on_progress: called about once a second with (done, in flight).
        on_settled: called after each outcome, in a request's thread; may raise UserError to stop everything.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        on_settled: Callable[[Conversation], None] | None = None,
    ) -> None:
        self.config = config
        self.layout = config.layout
        self.name = name
        self.engine = engine_for(config)
        self.stop = threading.Event()
        self.sent = 0
        self._on_progress = on_progress
        self._on_settled = on_settled
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._todo: deque[Task] = deque()
        self._in_flight: dict[int, _InFlight] = {}
        self._done = 0
        self._failure: BaseException | None = None

    def run(self, tasks: Sequence[Task]) -> None:
        """Send until every conversation has its outcome; what the journals hold already is not sent.

        Raises:
            UserError: if no server can be had or a disk fails.
            Interrupted: if `stop` was set or the owning run died.
        """
        for task in tasks:
            replay(task)
        self._todo = deque(task for task in tasks if task.conversation.outcome is None)
        self._done = len(tasks) - len(self._todo)
        if not self._todo:
            return
        self._pool = ServerPool(self.config, self.engine)
        self._client = Client(connections=max(64, self._pool.capacity))
        self._ledger = Ledger(self.layout.ledger)
        executor = ThreadPoolExecutor(max_workers=4096, thread_name_prefix="request")
        try:
            self._ledger.join()
            self._loop(executor)
        finally:
            self.stop.set()
            with self._lock:
                calls = [flight.call for flight in self._in_flight.values()]
            for call in calls:
                call.abort()
            executor.shutdown(wait=True, cancel_futures=True)
            self._ledger.close()
            self._client.close()

    def _loop(self, executor: ThreadPoolExecutor) -> None:
        next_refresh = next_progress = 0.0
        without_server_since: float | None = None
        while True:
            now = time.monotonic()
            if now >= next_refresh:
                next_refresh = now + REFRESH_INTERVAL
                self._pool.refresh()
                self._check_alive()
                self._cut_lost(now)
                usable = any(self._pool.limits())
                without_server_since = None if usable else without_server_since or now
                self._check_servers(now, without_server_since)
            if now >= next_progress:
                next_progress = now + PROGRESS_INTERVAL
                self._report_progress()
            self._send_what_fits(executor)
            with self._lock:
                if self._failure:
                    raise self._failure
                if not self._todo and not self._in_flight:
                    return
            self._wake.wait(TICK)
            self._wake.clear()

    def _send_what_fits(self, executor: ThreadPoolExecutor) -> None:
        limits = self._pool.limits()
        while True:
            with self._lock:
                waiting = len(self._todo)
                task = self._todo[0] if waiting else None
            self._ledger.set_waiting(waiting)
            if task is None:
                return
            server = self._ledger.claim(limits, prefer=task.conversation.server)
            if server is None:
                return
            request = task.conversation.next_request()
            assert request is not None
            instance = self._pool.servers[server].instance
            flight = _InFlight(task, request, server, instance, Call(), time.monotonic())
            with self._lock:
                self._todo.remove(task)  # a retry may have been put before it in the meantime
                self._in_flight[id(flight)] = flight
                self.sent += 1
            executor.submit(self._answer, flight)

    def _check_alive(self) -> None:
        if self.stop.is_set():
            raise Interrupted("stopped")
        if not owner_is_alive(self.layout):
            raise Interrupted("the run that owns this job is gone")

    def _check_servers(self, now: float, without_server_since: float | None) -> None:
        if without_server_since is None:
            return
        states = {server.state for server in self._pool.servers}
        patience = self.config.dispatch.no_server_timeout
        if states <= {"failed", "absent", "stopped"}:
            patience = min(patience, 5.0)  # nothing is on its way back
        if now - without_server_since > patience:
            raise UserError(
                f"no server left to ask: {self._pool.explain()}",
                where=self.name,
                hint=f"see {self.layout.log('servers')}, then run the same command again; finished answers are kept",
            )

    def _cut_lost(self, now: float) -> None:
        """Cut the requests that will never be answered, so that their threads send them again elsewhere."""
        with self._lock:
            flights = list(self._in_flight.values())
        for flight in flights:
            server = self._pool.servers[flight.server]
            gone = server.instance > flight.instance  # the engine it was sent to is no more
            if gone or server.lost(flight.sent_at, now):
                log.warning(
                    "server %s no longer works on prompt %s; it is sent again",
                    server.place.name,
                    flight.task.conversation.id,
                )
                flight.call.abort()

    def _report_progress(self) -> None:
        if self._on_progress:
            with self._lock:
                done, in_flight = self._done, len(self._in_flight)
            self._on_progress(done, in_flight)

    # One request, in its own thread

    def _answer(self, flight: _InFlight) -> None:
        """Send one request, and journal, judge and apply what comes back."""
        task, conversation = flight.task, flight.task.conversation
        try:
            entry = self._ask(flight)
            if entry is not None:
                task.journal.append(entry)
                conversation.apply(entry)
                if entry["kind"] == "answer":
                    replay(task)  # the next turn may already be in the journal of an earlier run
            if conversation.outcome and self._on_settled:
                self._on_settled(conversation)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
        finally:
            self._ledger.release(flight.server)
            with self._lock:
                del self._in_flight[id(flight)]
                if conversation.outcome is None:
                    self._todo.appendleft(task)
                else:
                    self._done += 1
            self._wake.set()

    def _ask(self, flight: _InFlight) -> dict[str, Any] | None:
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

    def _note_broken(self, flight: _InFlight, server: ServerView, error: Exception) -> dict[str, Any] | None:
        """No whole answer: the connection was refused, cut or reset. Only a crash counts against the prompt."""
        if self.stop.is_set():
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

    def _crashed(self, flight: _InFlight, server: ServerView) -> bool:
        """Whether the engine that had the request died; its supervisor says so within a few seconds."""
        deadline = time.monotonic() + CRASH_NOTICE
        while time.monotonic() < deadline and not self.stop.is_set():
            if server.instance > flight.instance or server.state != "ready":
                return True
            time.sleep(0.2)
        return False

    def _note_fault(self, flight: _InFlight, server: ServerView, fault: Fault, seconds: float) -> dict[str, Any] | None:
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
        self, flight: _InFlight, kind: str, seconds: float, verdict: str, detail: str, answer: dict[str, Any] | None
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
