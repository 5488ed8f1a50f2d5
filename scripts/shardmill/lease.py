"""The readiness file: what it says, and whether it may be believed.

A readiness file is a lease, not a flag. It counts only while the supervisor that wrote it lives, on
this boot, serving what the configuration would launch now, and the server answers on its port.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import Config
from .engines.openai import get
from .errors import UserError
from .files import read_json_or_none, write_json
from .layout import Layout
from .place import launch_digest, place
from .process import Identity, boot_id, is_alive, own_identity

ANSWER_TIMEOUT = 2.0  # seconds a server gets to answer anything at all


@dataclass(frozen=True)
class Lease:
    """Content of a readiness file.

    Args:
        server: its name in the pool.
        url: base URL of the server.
        supervisor: identity of the process that wrote this (`Identity.to_json`).
        launch_digest: hash of what was launched, see `shardmill.place.launch_digest`.
        model: path (or, of an external server, name) of what it serves.
        model_digest: digest of the model's files.
        served_model: name that requests should carry as `model`; None if any will do.
        capacity: requests that can run at once; None where the engine does not say.
        instance: number of the engine's start, as in the status file.
        engine: kind and version of the engine.
        facts: what the server said of itself at its start, and what one request measured.
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
    facts: dict[str, Any] = field(default_factory=dict)
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


def stale_reason(
    layout: Layout, config: Config, server: str, *, model: Path | None = None, model_digest: str | None = None
) -> str | None:
    """Why a readiness file that exists is not to be believed; None if it may be, or if there is none.

    Args:
        layout: of the run.
        config: what would be launched now.
        server: which server.
        model, model_digest: what it would be given; left out: what the lease says it was given.
    """
    if not layout.ready(server).exists():
        return None
    if server not in config.server_names:
        return "the pool has no such server any more"
    lease = read_ready(layout, server)
    if lease is None or lease.identity is None:
        value = read_json_or_none(layout.ready(server))
        is_mark = isinstance(value, dict) and "failed" in value  # see `shardmill.may_fail`
        return "the server did not start last time" if is_mark else "it is damaged"
    if reason := _death(lease.identity):
        return reason
    try:
        where = place(config, server)
        served = Path(lease.model) if model is None else model
        digest = launch_digest(config, where, served, lease.model_digest if model_digest is None else model_digest)
    except UserError as error:
        return f"it cannot be compared with the configuration ({error})"
    if digest != lease.launch_digest:
        return "the server runs with other settings than the configuration's"
    if get(where, "/v1/models", timeout=ANSWER_TIMEOUT) is None:
        return f"{lease.url} does not answer"
    return None


def _death(supervisor: Identity) -> str | None:
    """Why a supervisor is known to be dead."""
    if not supervisor.is_local:
        return f"its supervisor ran on another host ({supervisor.host})"
    if supervisor.boot_id != boot_id():
        return "the machine has been rebooted since"
    return None if is_alive(supervisor) else f"its supervisor (pid {supervisor.pid}) is dead"


def clear_stale(config: Config, *, model: Path | None = None, model_digest: str | None = None) -> list[str]:
    """Remove the readiness files of this run that are not to be believed; returns one line for each.

    A supervisor that lives sees its file gone and stops its server by itself.
    """
    layout = config.layout
    servers = sorted(path.name.removesuffix(".ready") for path in layout.ready("0").parent.glob("*.ready"))
    if not servers:
        return []

    def reason_of(server: str) -> str | None:
        return stale_reason(layout, config, server, model=model, model_digest=model_digest)

    with ThreadPoolExecutor(max_workers=min(16, len(servers))) as pool:
        reasons = list(pool.map(reason_of, servers))
    lines = []
    for server, reason in zip(servers, reasons, strict=True):
        if reason:
            layout.ready(server).unlink(missing_ok=True)
            lines.append(f"server {server}: cleared a stale readiness file: {reason}")
    return lines
