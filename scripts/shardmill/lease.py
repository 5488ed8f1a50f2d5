"""The readiness file: what it says, and whether it may be believed.

A readiness file is a lease, not a flag. It counts only while the supervisor that wrote it lives, on
this boot, serving what the configuration would launch now, and the server answers on its port.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from .files import read_json_or_none, write_json
from .layout import Layout
from .process import Identity, own_identity


@dataclass(frozen=True)
class Lease:
    """Content of a readiness file.

    Args:
        server: its name in the pool.
        url: base URL of the server.
        supervisor: identity of the process that wrote this (`Identity.to_json`).
        launch_digest: hash of what was launched, see `shardmill.launch.launch_digest`.
        model: path (or, of an external server, name) of what it serves.
        model_digest: digest of the model's files.
        served_model: name that requests should carry as `model`; None if any will do.
        capacity: requests that can run at once; None where the engine does not say.
        instance: number of the engine's start, as in the status file.
        engine: kind and version of the engine.
        ready_at: seconds since the epoch.
    """

    server: str
    url: str
    supervisor: dict[str, Any]
    launch_digest: str
    model: str = ""
    model_digest: str = ""
    served_model: str | None = None
    capacity: int | None = None
    instance: int = 0
    engine: dict[str, str] = field(default_factory=dict)
    ready_at: float = 0.0

    @property
    def identity(self) -> Identity | None:
        """The supervisor's."""
        return Identity.from_json(self.supervisor)


_NAMES = {f.name for f in dataclasses.fields(Lease)}


def write_ready(layout: Layout, lease: Lease) -> None:
    """Publish a server. Atomic and fsynced."""
    stamped = dataclasses.replace(lease, supervisor=own_identity().to_json(), ready_at=time.time())
    write_json(layout.ready(lease.server), dataclasses.asdict(stamped))


def read_ready(layout: Layout, server: str) -> Lease | None:
    """The lease, believable or not; None if there is none, or it is damaged."""
    value = read_json_or_none(layout.ready(server))
    if not isinstance(value, dict):
        return None
    try:
        return Lease(**{key: value[key] for key in value.keys() & _NAMES})
    except TypeError:
        return None
