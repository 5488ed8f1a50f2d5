"""A shard's answers: dispatch over all ready servers, the journal, failover, and the shard's files."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson
import requests

from . import contract
from .client import Call, Client
from .config import Config
from .conversation import Conversation, Terms, TurnRequest, without_thoughts
from .engines.base import Answer, Fault
from .engines.registry import engine_for
from .errors import UserError
from .files import read_json, write_json
from .journal import Journal
from .ledger import Ledger
from .logs import get_logger
from .owner import owner_is_alive
from .pool import ServerPool, ServerView
from .prompts.split import read_shard
from .quality.verdicts import Expectation, Policy, judge
from .shard_files import shard_entry, write_shard

log = get_logger(__name__)

TICK = 0.05
REFRESH_INTERVAL = 0.5
PROGRESS_INTERVAL = 1.0


class Interrupted(Exception):
    """The job was told to stop; everything finished is in the journal."""


@dataclass
class _InFlight:
    conversation: Conversation
    request: TurnRequest
    server: int
    instance: int
    call: Call
    sent_at: float


class ShardRun:
    """Answers all prompts of one shard.

    Args:
        config: the run's configuration.
        shard: the shard's name.
        model_digest: content hash of the model that the servers run.
    """

    def __init__(self, config: Config, shard: str, model_digest: str) -> None:
        self.config = config
        self.layout = config.layout
        self.shard = shard
        self.engine = engine_for(config)
        self.terms = terms(config, model_digest)
        self.stop = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._todo: deque[Conversation] = deque()
        self._in_flight: dict[int, _InFlight] = {}
        self._failure: BaseException | None = None
        self._sent = 0

    def run(self) -> dict[str, Any]:
        """Make the shard's completions, rejects and statistics; returns the statistics.

        Raises:
            UserError: if no server can be had, the disk fails, or too many answers are bad.
            Interrupted: if `stop` was set or the owning run died.
        """
        started = time.monotonic()
        entry = shard_entry(self.layout, self.shard)
        prompts = read_shard(self.layout, self.shard, entry)
        with Journal(self.layout.journal(self.shard)) as self._journal:
            conversations = [Conversation(prompt, self.terms) for prompt in prompts]
            for conversation in conversations:
                self._replay(conversation)
            self._todo.extend(c for c in conversations if c.outcome is None)
            self._done = len(conversations) - len(self._todo)
            if self._todo:
                self._dispatch(len(conversations))
            self._journal.sync()
            return write_shard(
                self.config,
                self.shard,
                conversations,
                self._journal,
                entry=entry,
                terms=self.terms,
                sent=self._sent,
                seconds=time.monotonic() - started,
            )

    def _replay(self, conversation: Conversation) -> None:
        """Bring a conversation to where the journal has it."""
        while (request := conversation.next_request()) is not None:
            if not conversation.replay(self._journal.entries(conversation.id, request.fingerprint)):
                return

    # Dispatch

    def _dispatch(self, total: int) -> None:
        """Send until every conversation has its outcome."""
        self._pool = ServerPool(self.config, self.engine)
        self._client = Client(connections=max(64, self._pool.capacity))
        self._ledger = Ledger(self.layout.ledger)
        executor = ThreadPoolExecutor(max_workers=4096, thread_name_prefix="request")
        try:
            self._ledger.join()
            self._loop(executor, total)
        finally:
            with self._lock:
                calls = [flight.call for flight in self._in_flight.values()]
            self.stop.set()
            for call in calls:
                call.abort()
            executor.shutdown(wait=True, cancel_futures=True)
            self._ledger.close()
            self._client.close()
            self.layout.progress(self.shard).unlink(missing_ok=True)

    def _loop(self, executor: ThreadPoolExecutor, total: int) -> None:
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
                self._write_progress(total)
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
                conversation = self._todo[0] if waiting else None
            self._ledger.set_waiting(waiting)
            if conversation is None:
                return
            server = self._ledger.claim(limits, prefer=conversation.server)
            if server is None:
                return
            request = conversation.next_request()
            assert request is not None
            flight = _InFlight(
                conversation, request, server, self._pool.servers[server].instance, Call(), time.monotonic()
            )
            with self._lock:
                self._todo.popleft()
                self._in_flight[id(flight)] = flight
                self._sent += 1
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
                where=f"shard {self.shard}",
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
                    "server %s no longer works on prompt %s; it is sent again", server.place.name, flight.conversation.id
                )
                flight.call.abort()

    def _write_progress(self, total: int) -> None:
        with self._lock:
            done, in_flight = self._done, len(self._in_flight)
        value = {"shard": self.shard, "prompts": total, "done": done, "in_flight": in_flight, "at": time.time()}
        write_json(self.layout.progress(self.shard), value, fsync=False, indent=False)

    # One request, in its own thread

    def _answer(self, flight: _InFlight) -> None:
        """Send one request, and journal, judge and apply what comes back."""
        conversation = flight.conversation
        try:
            entry = self._ask(flight)
            if entry is not None:
                self._journal.append(entry)
                conversation.apply(entry)
                if entry["kind"] == "answer":
                    self._settle_turn(conversation)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
        finally:
            self._ledger.release(flight.server)
            with self._lock:
                del self._in_flight[id(flight)]
                if conversation.outcome is None:
                    self._todo.appendleft(conversation)
                else:
                    self._done += 1
            self._wake.set()

    def _settle_turn(self, conversation: Conversation) -> None:
        """After an answer: a further turn may already be in the journal of an earlier run."""
        self._replay(conversation)

    def _ask(self, flight: _InFlight) -> dict[str, Any] | None:
        """The journal entry for what came back, or None if the prompt is simply to be sent again."""
        server = self._pool.servers[flight.server]
        request, conversation = flight.request, flight.conversation
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
        judgement = judge(result, self._expectation(request, body))
        return self._entry(flight, "answer", seconds, judgement.verdict, judgement.detail, _answer_dict(result))

    def _expectation(self, request: TurnRequest, body: dict[str, Any]) -> Expectation:
        return Expectation.of(self.config, max_tokens=body.get("max_tokens"), messages=request.messages)

    def _note_broken(self, flight: _InFlight, server: ServerView, error: Exception) -> dict[str, Any] | None:
        """No whole answer: the connection was refused, cut or reset. Only a crash counts against the prompt."""
        if self.stop.is_set():
            return None
        server.note_fault(time.monotonic())
        if not flight.call.sent or (flight.call.aborted and server.instance == flight.instance):
            return None
        if not self._crashed(flight, server):
            return None
        log.warning("server %s went down with prompt %s in flight (%s)", server.place.name, flight.conversation.id, error)
        seconds = time.monotonic() - flight.sent_at
        return self._entry(flight, "crash", seconds, "poison", type(error).__name__, None)

    def _crashed(self, flight: _InFlight, server: ServerView) -> bool:
        """Whether the engine that had the request died; its supervisor says so within a few seconds."""
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline and not self.stop.is_set():
            if server.instance > flight.instance or server.state != "ready":
                return True
            time.sleep(0.2)
        return False

    def _note_fault(
        self, flight: _InFlight, server: ServerView, fault: Fault, seconds: float
    ) -> dict[str, Any] | None:
        """A fault of the prompt's own is final; a server's is tried again, elsewhere if it can be."""
        conversation = flight.conversation
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
            "id": flight.conversation.id,
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


def terms(config: Config, model_digest: str) -> Terms:
    """What all requests of the run have in common."""
    return Terms(
        answers=contract.answer_fingerprint(config),
        model_digest=model_digest,
        seed=config.sampling.seed,
        all_turns=config.prompts.turns == "all",
        policy=Policy.of(config),
        poison_after=config.dispatch.poison_after,
    )


def model_digest(config: Config) -> str:
    """Content hash of the run's model, as its manifest has it."""
    return read_json(config.layout.model_manifest)["digest"]


def _answer_dict(answer: Answer) -> dict[str, Any]:
    return {key: value for key, value in vars(answer).items() if value is not None}
