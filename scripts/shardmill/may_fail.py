"""Servers that did not start, where the user allows some (`servers.may_fail`).

Snakemake waits for every readiness file. So a server that may be missing gets one as well, marked as failed: it is no
lease, no supervisor stands behind it, and the server's status says `failed`, so that no request is ever sent there.
Planning clears the file, and so the next start tries the server again.
"""

from __future__ import annotations

from .config import Config
from .errors import UserError
from .files import read_json_or_none, write_json
from .layout import Layout
from .logs import get_logger
from .place import place
from .supervisor_state import ServerStatus, read_status, write_status

log = get_logger(__name__)


def failure(layout: Layout, server: str) -> str | None:
    """Why a server with a readiness file did not start; None if it did."""
    value = read_json_or_none(layout.ready(server))
    return str(value["failed"]) if isinstance(value, dict) and "failed" in value else None


def go_on_without(config: Config, server: str, error: UserError) -> None:
    """Mark a server that did not start, and go on with the others.

    Raises:
        UserError: the given one, if no more servers may fail, or if it is the last.
    """
    layout, allowed = config.layout, min(config.servers.may_fail, config.server_count - 1)
    if not allowed:
        raise error
    status = read_status(layout, server)
    if status is None or status.state != "failed":
        url, instance = place(config, server).url, status.instance if status else 0
        write_status(layout, ServerStatus(server, "failed", url, instance=instance, message=str(error)))
    write_json(layout.ready(server), {"server": server, "failed": str(error)})
    failed = [name for name in config.server_names if failure(layout, name)]
    if len(failed) > allowed:
        layout.ready(server).unlink(missing_ok=True)
        hint = (
            f"{len(failed)} servers failed (servers {', '.join(failed)}); servers.may_fail is {config.servers.may_fail}"
        )
        raise UserError(error.what, where=error.where, hint=f"{error.hint}; {hint}" if error.hint else hint)
    log.warning("server %s did not start; going on with the others (servers.may_fail): %s", server, error)
