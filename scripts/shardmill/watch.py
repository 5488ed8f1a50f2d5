"""Whether an engine still works, judged by what moves.

Health endpoints lie both ways: they answer while no token comes, and fail while a long prompt is being
read. What counts is progress: tokens or requests must move while there is work.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from .engines.base import Load, ServerPlace
from .errors import UserError
from .layout import Layout
from .ledger import Ledger

REFUSED_SECONDS = 60.0  # with its port refusing connections, an engine whose process lives counts as dead
EXTERNAL_SECONDS = 10.0  # without an answer, an external server counts as away


class LedgerCount:
    """How many requests this machine's jobs have in flight at one server, by the shared ledger; 0 if there is none."""

    def __init__(self, layout: Layout, server: str) -> None:
        self._path, self._server = layout.ledger, int(server)
        self._ledger: Ledger | None = None
        self._inode = 0

    def __call__(self) -> int:
        try:
            inode = self._path.stat().st_ino
            if self._ledger is None or inode != self._inode:
                # A run takes its ledger with it when it ends; the next one makes another.
                if self._ledger is not None:
                    self._ledger.close()
                self._ledger, self._inode = None, inode
                self._ledger = Ledger(self._path)
            return self._ledger.in_flight(self._server)
        except (OSError, UserError):
            return 0


class Watch:
    """Follows one engine. Every figure of its load counts as progress when it changes, so figures that
    move by themselves do not belong in `Load.details`.

    Args:
        stall_after: seconds without progress, while requests wait, that make it hung.
    """

    def __init__(self, stall_after: float) -> None:
        self._stall_after = stall_after
        self.restart()

    def restart(self) -> None:
        """A new engine."""
        self._figures: Any = None
        self._busy = ""
        self._moved_at = time.monotonic()
        self._silent_since: float | None = None
        self._refused_since: float | None = None
        self._tokens: float | None = None
        self._was_refused = self._is_new = False

    def note(self, load: Load | None, place: ServerPlace, outstanding: int) -> bool:
        """Take in a look at the engine; says whether it made progress, or has nothing to do.

        Args:
            load: what it said, or None if it did not answer.
            outstanding: requests that clients wait for by their own account.
        """
        now = time.monotonic()
        if load is None:
            self._silent_since = now if self._silent_since is None else self._silent_since
            refused = _refuses(place)
            self._refused_since = (self._refused_since or now) if refused else None
            self._was_refused |= refused
            self._busy = "it does not answer"
            return False
        self._silent_since = self._refused_since = None
        fell = None not in (load.completion_tokens, self._tokens) and load.completion_tokens < self._tokens
        self._is_new |= self._was_refused or fell
        self._tokens, self._was_refused = load.completion_tokens, False
        figures = (load.running, load.queued, load.prompt_tokens, load.completion_tokens, sorted(load.details.items()))
        working = load.running + load.queued
        moved = figures != self._figures or (working == 0 and outstanding == 0)
        self._figures = figures
        self._busy = f"{working} requests are in it" if working else f"{outstanding} requests wait for it"
        if moved:
            self._moved_at = now
        return moved

    def trouble(self) -> str | None:
        """Why the engine must be restarted, or None."""
        now = time.monotonic()
        if now - self._moved_at > self._stall_after:
            return f"the engine hangs: no token for {self._stall_after:g} s (servers.stall_after) while {self._busy}"
        if self._refused_since is not None and now - self._refused_since > REFUSED_SECONDS:
            return f"the engine lives, but its port has refused connections for {REFUSED_SECONDS:.0f} s"
        return None

    def away(self) -> str:
        """Why an external server cannot be used now, or an empty text."""
        if self._refused_since is not None:
            return "it refuses connections"
        if self._silent_since is not None and time.monotonic() - self._silent_since > EXTERNAL_SECONDS:
            return f"it has not answered for {EXTERNAL_SECONDS:.0f} s"
        return ""

    def is_new_engine(self) -> bool:
        """Whether another engine answers than before: its port was closed in between, or its counts began anew."""
        found, self._is_new = self._is_new, False
        return found


def _refuses(place: ServerPlace) -> bool:
    """Whether nobody listens there. A port that is merely slow to accept does not refuse."""
    try:
        socket.create_connection((place.host, place.port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
