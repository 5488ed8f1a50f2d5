"""Whether a server is still wanted: by its readiness file, by its run, by the job that is starting it."""

from __future__ import annotations

import time

from .layout import Layout
from .lease import read_ready
from .logs import get_logger
from .owner import owner_is_alive
from .process import Identity, is_alive

log = get_logger(__name__)


class End(Exception):
    """The server is not wanted any more; the text says why."""


class Superseded(End):
    """Another supervisor has this slot: its files are not to be touched."""


class Tenancy:
    """What keeps one server alive.

    Args:
        layout: of the run.
        server: its name.
        me: its supervisor.
        linger: seconds that it outlives the run's owner.
        launcher: the job that started the supervisor and waits for the readiness file.
    """

    def __init__(self, layout: Layout, server: str, me: Identity, linger: float, launcher: Identity | None) -> None:
        self._layout, self._server, self._me = layout, server, me
        self._linger, self._launcher = linger, launcher
        self._ownerless_since: float | None = None

    def check(self, *, published: bool) -> None:
        """See whether the server is still wanted.

        Args:
            published: whether its readiness file was written.

        Raises:
            End: if it is not.
        """
        if published:
            self._check_lease()
        elif self._launcher and not is_alive(self._launcher):
            raise End("the job that wanted it is gone")
        self._check_owner()

    def _check_lease(self) -> None:
        try:
            self._layout.ready(self._server).stat()
        except FileNotFoundError:
            raise End("its readiness file is gone") from None
        except OSError:
            return  # a file system in trouble says nothing about the file
        lease = read_ready(self._layout, self._server)
        if lease and lease.identity and lease.identity != self._me:
            raise Superseded(f"pid {lease.identity.pid} has taken its place")

    def _check_owner(self) -> None:
        now = time.monotonic()
        if owner_is_alive(self._layout):
            if self._ownerless_since is not None:
                log.info("server %s: the run has an owner again", self._server)
            self._ownerless_since = None
            return
        if self._ownerless_since is None:
            self._ownerless_since = now
            log.info("server %s: the run has no owner; stopping in %g s", self._server, self._linger)
        if now - self._ownerless_since >= self._linger:
            raise End(f"the run has had no owner for {self._linger:g} s")
