"""The servers of this machine as a shard job sees them: readiness files, status files, and room."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config import Config
from .engines.base import Engine, ServerPlace
from .files import read_json_or_none
from .place import place

# A supervisor writes its status about once a second; one this old has nobody behind it.
STATUS_LIFETIME = 30.0
# How long a server's own word must have been that it has no such request, until one counts as lost. Its figures may be
# a few seconds old, and stand still while it reads a long prompt.
LOST_AFTER = 20.0
# A request that runs gets a token whenever its neighbours do. One that would have its last token so many times over
# is not running: the margin is for the time it waited, and for neighbours that speculation makes faster.
OVERDUE_TIMES = 2.0


@dataclass
class ServerView:
    """What a job knows of one server. Times are monotonic seconds of this process."""

    place: ServerPlace
    state: str = "absent"
    message: str = ""
    capacity: int | None = None
    running: int = 0
    queued: int = 0
    instance: int = 0
    changed_at: float = 0.0
    figures_at: float = 0.0  # when it last said something new of itself
    idle_since: float | None = None
    missing_since: float | None = None  # since when it has shown fewer requests than were sent to it
    pace: float = 0.0  # tokens that a request running since this job's start would have got
    cool_until: float = 0.0
    faults_in_a_row: int = 0
    _last: Any = None
    _tokens: float | None = None
    _answered: tuple[Any, ...] = (None, None)

    def update(self, status: dict[str, Any] | None, now: float, outstanding: int = 0) -> None:
        """Take in the status file's content; a file that stays the same for long is no sign of life.

        Args:
            outstanding: requests that all jobs of this machine have in flight there.
        """
        if status is None:
            self.state, self._last = "absent", None
            return
        stamp = (status.get("at"), status.get("instance"), status.get("state"))
        if stamp != self._last:
            self._last, self.changed_at = stamp, now
        elif now - self.changed_at > STATUS_LIFETIME:
            self.state, self.message = "silent", f"its supervisor wrote nothing for {STATUS_LIFETIME:.0f} s"
            return
        self.state = status["state"]
        self.message = status.get("message") or ""
        self.capacity = status.get("capacity")
        self.instance = status.get("instance") or 0
        # A supervisor goes on writing while its server says nothing; then the figures are the old ones.
        answered = (status.get("answered_at"), self.instance)
        if answered[0] is None or answered != self._answered:
            self._take_figures(status, now, outstanding, is_new=answered[1:] != self._answered[1:])
            self._answered = answered

    def _take_figures(self, status: dict[str, Any], now: float, outstanding: int, *, is_new: bool) -> None:
        """Take in what the server said of itself just now; `is_new`: by an engine that was not there before."""
        self.figures_at = now
        self.running, self.queued = status.get("running") or 0, status.get("queued") or 0
        tokens = status.get("completion_tokens")
        if self._tokens is not None and tokens is not None and not is_new:
            self.pace += max(0.0, tokens - self._tokens) / max(1, self.running)
        self._tokens = tokens
        # An engine that counts nothing always shows nothing running.
        speaks = self.state == "ready" and tokens is not None
        shown = self.running + self.queued
        self.idle_since = _since(self.idle_since, speaks and shown == 0, now)
        self.missing_since = _since(self.missing_since, speaks and shown < outstanding, now)

    def usable(self, now: float) -> bool:
        return self.state == "ready" and now >= self.cool_until

    def note_success(self) -> None:
        self.faults_in_a_row = 0

    def note_fault(self, now: float) -> bool:
        """Count a fault and rest the server a little; says whether it had been well until then."""
        was_well = self.faults_in_a_row == 0
        self.faults_in_a_row += 1
        self.cool_until = now + min(30.0, 0.25 * 2 ** min(self.faults_in_a_row, 7))
        return was_well

    def lost(self, sent_at: float, sent_pace: float, most_tokens: int) -> bool:
        """Whether a request sent then can no longer be answered.

        Either the server has said ever since, for long, that it is idle; or it shows fewer requests than it was sent,
        and this one would have had its longest answer long ago.

        Args:
            sent_pace: `pace` when it was sent.
            most_tokens: of its answer.
        """
        said = self.figures_at
        if self.idle_since is not None and said - max(self.idle_since, sent_at) > LOST_AFTER:
            return True
        overdue = self.pace - sent_pace > OVERDUE_TIMES * most_tokens
        return overdue and self.missing_since is not None and said - self.missing_since > LOST_AFTER


def _since(before: float | None, holds: bool, now: float) -> float | None:
    """Since when a condition has held, given since when it held before."""
    return (now if before is None else before) if holds else None


class ServerPool:
    """All servers of the pool, refreshed from their status files.

    Args:
        config: the run's configuration.
        engine: its engine, for the window of servers that show no capacity.
    """

    def __init__(self, config: Config, engine: Engine) -> None:
        self._config = config
        self._layout = config.layout
        self._default_window = engine.window(config)
        self.servers = [ServerView(place(config, name)) for name in config.server_names]
        self.refresh()

    def refresh(self, outstanding: Callable[[int], int] = lambda position: 0) -> None:
        """Read the status files again.

        Args:
            outstanding: requests in flight at the server of that position, from all jobs of this machine.
        """
        now = time.monotonic()
        for position, server in enumerate(self.servers):
            status = read_json_or_none(self._layout.server_status(server.place.name))
            is_whole = isinstance(status, dict) and "state" in status
            server.update(status if is_whole else None, now, outstanding(position))

    def limits(self) -> list[int]:
        """For each server the most requests it should hold: what it runs, and a short queue behind; 0: not usable."""
        now = time.monotonic()
        return [self._limit(server) if server.usable(now) else 0 for server in self.servers]

    def slots(self) -> list[int]:
        """For each server the requests that it can run at once; 0: not usable."""
        now = time.monotonic()
        return [self._window(server) if server.usable(now) else 0 for server in self.servers]

    def _window(self, server: ServerView) -> int:
        return server.capacity or self._default_window

    def _limit(self, server: ServerView) -> int:
        window, queue = self._window(server), self._config.dispatch.queue
        return window + (max(2, window // 8) if queue is None else queue)

    @property
    def capacity(self) -> int:
        """Requests that all servers together can hold."""
        return sum(self._limit(server) for server in self.servers)

    def explain(self) -> str:
        """Why no server can be used, server by server."""
        return ", ".join(
            f"server {server.place.name} is {server.state}" + (f" ({server.message})" if server.message else "")
            for server in self.servers
        )
