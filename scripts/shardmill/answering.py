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
from typing import Any

from .asking import Asker, Flight, Task
from .client import Call, Client
from .config import Config
from .conversation import Conversation, TurnRequest
from .disk import no_room
from .engines.registry import engine_for
from .errors import UserError
from .ledger import Ledger
from .logs import get_logger
from .owner import owner_is_alive
from .pool import ServerPool

__all__ = ["Answering", "Interrupted", "Task", "replay"]

log = get_logger(__name__)

# Places that other jobs give back are noticed at the next look only; the queue at each server bridges that.
TICK = 0.02
IDLE_TICK = 0.1
REFRESH_INTERVAL = 0.5
PROGRESS_INTERVAL = 1.0


class Interrupted(Exception):
    """The job was told to stop; everything finished is in the journal."""


def replay(task: Task) -> None:
    """Bring a conversation to where its journal has it."""
    conversation = task.conversation
    while (request := conversation.next_request()) is not None:
        if not conversation.replay(task.journal.entries(conversation.id, request.fingerprint)):
            return


class Answering:
    """Brings conversations to their outcomes.

    Args:
        config: the run's configuration.
        name: what is answered, for messages ("shard 00003").
        on_progress: called about once a second with (done, in flight).
        on_settled: called after each outcome, in a request's thread; may raise UserError to stop everything.
        on_request: called when a request has ended, in its thread, with its server and its journal entry; None
            instead of the entry if its prompt is to be sent again.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        on_settled: Callable[[Conversation], None] | None = None,
        on_request: Callable[[str, dict[str, Any] | None], None] | None = None,
    ) -> None:
        self.config = config
        self.layout = config.layout
        self.name = name
        self.engine = engine_for(config)
        self.stop = threading.Event()
        self.sent = 0
        self.hedged = 0  # of those, second copies
        self._on_progress = on_progress
        self._on_settled = on_settled
        self._on_request = on_request
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._todo: deque[Task] = deque()
        self._in_flight: dict[int, Flight] = {}
        self._done = 0
        self._failure: BaseException | None = None
        self._no_more: UserError | None = None  # why nothing more is sent; what is in flight is waited for

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
        self._asker = Asker(self.config, self.engine, self._pool, self._client, self.stop.is_set)
        self._ledger = Ledger(self.layout.ledger)
        executor = ThreadPoolExecutor(max_workers=4096, thread_name_prefix="request")
        try:
            self._ledger.join(total=len(tasks))
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
                self._pool.refresh(self._ledger.in_flight)
                self._check_alive()
                self._no_more = self._no_more or no_room(self.config)
                self._cut_lost()
                usable = any(self._pool.limits())
                without_server_since = None if usable else without_server_since or now
                self._check_servers(now, without_server_since)
                if self.config.dispatch.hedge_last:
                    self._hedge(executor)
            if now >= next_progress:
                next_progress = now + PROGRESS_INTERVAL
                self._report_progress()
            self._send_what_fits(executor)
            with self._lock:
                if self._failure:
                    raise self._failure
                if self._no_more and not self._in_flight:
                    raise self._no_more
                if not self._todo and not self._in_flight:
                    return
                waiting = bool(self._todo)
            self._wake.wait(TICK if waiting else IDLE_TICK)
            self._wake.clear()

    def _send_what_fits(self, executor: ThreadPoolExecutor) -> None:
        limits = self._pool.limits()
        while True:
            with self._lock:
                waiting = len(self._todo)
                task, suspects = self._next_task()
            self._ledger.set_waiting(waiting)
            if task is None or self._no_more:
                return
            request = task.conversation.next_request()
            assert request is not None
            # A further turn finds its history in its server's prefix cache; another attempt had better go elsewhere.
            prefer = task.conversation.server if request.attempt == 1 else None
            open_to = [0 if at in suspects else limit for at, limit in enumerate(limits)] if suspects else limits
            server = self._ledger.claim(open_to, prefer=prefer)
            if server is None:
                return
            with self._lock:
                self._todo.remove(task)  # a retry may have been put before it in the meantime
                flight = self._depart(task, request, server)
            executor.submit(self._answer, flight)

    def _next_task(self) -> tuple[Task | None, frozenset[int]]:
        """What to send next, and the servers that must not have it; with the lock held.

        A prompt that was in flight at a crash goes to servers that have no other such prompt of this job, and after
        the ones that were not. Else the fellows of a poisonous prompt would be sent along with it, crash after
        crash, and be set aside with it.
        """
        for task in self._todo:
            if not task.conversation.crashes:
                return task, frozenset()
        if not self._todo:
            return None, frozenset()
        suspects = (flight.server for flight in self._in_flight.values() if flight.task.conversation.crashes)
        return self._todo[0], frozenset(suspects)

    def _depart(self, task: Task, request: TurnRequest, server: int) -> Flight:
        """Enter a request among those in flight; with the lock held."""
        view = self._pool.servers[server]
        flight = Flight(task, request, server, view.instance, Call(), time.monotonic(), view.pace)
        self._in_flight[id(flight)] = flight
        self.sent += 1
        return flight

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

    def _cut_lost(self) -> None:
        """Cut the requests that will never be answered, so that their threads send them again elsewhere."""
        with self._lock:
            flights = list(self._in_flight.values())
        for flight in flights:
            server = self._pool.servers[flight.server]
            gone = server.instance > flight.instance  # the engine it was sent to is no more
            lost = gone or server.lost(flight.sent_at, flight.pace, self._most_tokens(flight))
            if lost and not flight.call.has_news():
                log.warning(
                    "server %s no longer works on prompt %s; it is sent again",
                    server.place.name,
                    flight.task.conversation.id,
                )
                flight.call.abort()

    def _most_tokens(self, flight: Flight) -> int:
        own = flight.request.overrides.get("max_tokens")
        return own if isinstance(own, int) else self.config.sampling.max_tokens

    def _hedge(self, executor: ThreadPoolExecutor) -> None:
        """When fewer requests than slots remain: send each to a second server as well."""
        with self._lock:
            alone = [] if self._todo else [flight for flight in self._in_flight.values() if _is_alone(flight)]
        slots = self._pool.slots()
        if not alone or not self._ledger.nobody_waits():
            return
        if sum(map(self._ledger.in_flight, range(len(slots)))) >= sum(slots):
            return
        for flight in sorted(alone, key=lambda flight: flight.sent_at):
            elsewhere = [0 if at == flight.server else count for at, count in enumerate(slots)]
            server = self._ledger.claim(elsewhere)
            if server is None:
                continue
            with self._lock:
                arrived = id(flight) not in self._in_flight or not _is_alone(flight)
                if not arrived:
                    copy = self._depart(flight.task, flight.request, server)
                    copy.twin, flight.twin = flight, copy
                    self.hedged += 1
            if arrived:
                self._ledger.release(server)
            else:
                executor.submit(self._answer, copy)

    def _report_progress(self) -> None:
        if self._on_progress:
            with self._lock:
                done, in_flight = self._done, len(self._in_flight)
            self._on_progress(done, in_flight)

    # One request, in its own thread

    def _answer(self, flight: Flight | None) -> None:
        """Send one request and take in what comes back; then the conversation's next turn, at the same server."""
        while flight is not None:
            flight = self._answer_turn(flight)

    def _answer_turn(self, flight: Flight) -> Flight | None:
        """One turn; returns the flight of the next one, if it keeps the place."""
        task, conversation = flight.task, flight.task.conversation
        onward = False
        try:
            entry = self._asker.ask(flight)
            if self._on_request and not (flight.beaten or self.stop.is_set()):
                self._on_request(self._pool.servers[flight.server].place.name, entry)
            if entry is not None and self._wins(flight, entry):
                task.journal.append(entry)
                conversation.apply(entry)
                if entry["kind"] == "answer":
                    replay(task)  # the next turn may already be in the journal of an earlier run
                    onward = self._may_go_on(flight)
                if conversation.outcome and self._on_settled:
                    self._on_settled(conversation)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
        return self._arrive(flight, onward)

    def _wins(self, flight: Flight, entry: dict[str, object]) -> bool:
        """Whether this entry counts; the twin of a request, if it has one, is cut off then."""
        with self._lock:
            twin = flight.twin
            if flight.beaten or (twin and entry["kind"] == "crash"):
                return False
            flight.settled = True
            if twin:
                twin.beaten, twin.twin, flight.twin = True, None, None
        if twin:
            twin.call.abort()
        return True

    def _may_go_on(self, flight: Flight) -> bool:
        """Whether the conversation's next turn keeps its place: its history is in that server's prefix cache."""
        request = flight.task.conversation.next_request()
        over = self.stop.is_set() or self._failure or self._no_more
        if request is None or request.turn == flight.request.turn or over:
            return False
        limit, server = self._pool.limits()[flight.server], self._pool.servers[flight.server]
        return server.instance == flight.instance and self._ledger.in_flight(flight.server) <= limit

    def _arrive(self, flight: Flight, onward: bool) -> Flight | None:
        """Take a request out of those in flight, and send its conversation on, back to the queue, or home."""
        conversation = flight.task.conversation
        request = conversation.next_request() if onward else None
        if request is None:
            self._ledger.release(flight.server)
        with self._lock:
            del self._in_flight[id(flight)]
            if request is not None:
                return self._depart(flight.task, request, flight.server)
            if flight.twin:  # which goes on alone
                flight.twin.twin = None
            elif not flight.beaten:
                if conversation.outcome is None:
                    # Crashed ones wait at the end: the search for the next task shall not pass them each time.
                    (self._todo.append if conversation.crashes else self._todo.appendleft)(flight.task)
                else:
                    self._done += 1
        self._wake.set()
        return None


def _is_alone(flight: Flight) -> bool:
    """Whether a second copy of this request would be of use."""
    return flight.twin is None and not flight.beaten and not flight.settled
