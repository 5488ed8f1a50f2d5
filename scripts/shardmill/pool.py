"""The servers of this machine as a shard job sees them: readiness files, status files, and room."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from .config import Config
from .engines.base import Engine, ServerPlace
from .files import read_json_or_none
from .place import place

# A supervisor writes its status about once a second; one this old has nobody behind it.
STATUS_LIFETIME = 30.0
# How long a server must have been idle, by its own word, until a request to it counts as lost.
LOST_AFTER = 10.0


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
    idle_since: float | None = None
    cool_until: float = 0.0
    faults_in_a_row: int = 0
    _last: Any = None

    def update(self, status: dict[str, Any] | None, now: float) -> None:
        """Take in the status file's content; a file that stays the same for long is no sign of life."""
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
        self.running, self.queued = status.get("running") or 0, status.get("queued") or 0
        self.instance = status.get("instance") or 0
        if self.state == "ready" and self.running + self.queued == 0:
            self.idle_since = self.idle_since if self.idle_since is not None else now
        else:
            self.idle_since = None

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

    def lost(self, sent_at: float, now: float) -> bool:
        """Whether a request sent then can no longer be answered: the server has been idle ever since, for long."""
        if self.idle_since is None or self.state != "ready":
            return False
        return now - max(self.idle_since, sent_at) > LOST_AFTER


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

    def refresh(self) -> None:
        """Read the status files again."""
        now = time.monotonic()
        for server in self.servers:
            server.update(read_json_or_none(self._layout.server_status(server.place.name)), now)

    def limits(self) -> list[int]:
        """For each server the most requests it should hold: what it runs, and a short queue behind; 0: not usable."""
        now = time.monotonic()
        return [self._limit(server) if server.usable(now) else 0 for server in self.servers]

    def _limit(self, server: ServerView) -> int:
        window = server.capacity or self._default_window
        queue = self._config.dispatch.queue
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
