"""What a supervisor tells the world about its server: the status file, rewritten about once a second."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from .files import read_json_or_none, write_bytes
from .layout import Layout
from .process import Identity

State = Literal["starting", "ready", "restarting", "draining", "failed", "stopped"]


@dataclass
class ServerStatus:
    """The status file of one server (`layout.server_status`), as JSON with these keys.

    Args:
        server: its name in the pool.
        state: only a `ready` server may be sent requests.
        url: its base URL.
        model: name that requests should carry as `model`; None if any will do.
        capacity: requests that can run at once; None where the engine does not say (then the engine's window counts).
        running, queued: requests inside the engine, from all clients.
        completion_tokens, prompt_tokens: totals since the engine's start; None where it counts none.
        details: further figures of `Load.details`.
        instance: number of this start of the engine; grows by one at every start and never repeats within a run.
        restarts: restarts by this supervisor so far.
        at: when this was written, seconds since the epoch.
        answered_at: when the engine last said its load, seconds since the epoch; None before the first time.
        last_progress_at: when tokens or requests last moved, or the server was last seen idle.
        pids: identities (`Identity.to_json`) of `supervisor`, `reaper` and `engine`, None where there is none.
        message: what is wrong, in a line or a few; empty if nothing is.
    """

    server: str
    state: State
    url: str
    model: str | None = None
    capacity: int | None = None
    running: int = 0
    queued: int = 0
    completion_tokens: float | None = None
    prompt_tokens: float | None = None
    details: dict[str, float] = field(default_factory=dict)
    instance: int = 0
    restarts: int = 0
    at: float = 0.0
    answered_at: float | None = None
    last_progress_at: float | None = None
    pids: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    message: str = ""

    def identity(self, role: Literal["supervisor", "reaper", "engine"]) -> Identity | None:
        """Identity of one of the server's processes."""
        return Identity.from_json(self.pids.get(role))

    def age(self) -> float:
        """Seconds since it was written; a clock that jumped back gives 0."""
        return max(0.0, time.time() - self.at)


_NAMES = {f.name for f in dataclasses.fields(ServerStatus)}


def read_status(layout: Layout, server: str) -> ServerStatus | None:
    """The server's status as last written, or None if there is none."""
    value = read_json_or_none(layout.server_status(server))
    if not isinstance(value, dict):
        return None
    try:
        return ServerStatus(**{key: value[key] for key in value.keys() & _NAMES})
    except TypeError:
        return None


def write_status(layout: Layout, status: ServerStatus) -> None:
    """Write the status atomically. Not fsynced: after a power loss it is worthless anyway.

    Raises:
        OSError: if the disk is full or gone.
    """
    status.at = time.time()
    write_bytes(layout.server_status(status.server), orjson.dumps(status, option=orjson.OPT_INDENT_2), fsync=False)
