"""Starting one server of the pool, and saying plainly why it did not start."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import orjson
import psutil

from .config import Config
from .errors import UserError
from .files import read_json_or_none, write_bytes
from .layout import Layout
from .lease import read_ready
from .logs import get_logger
from .place import MARK_VARIABLE, place, prepare, server_mark
from .process import (
    Identity,
    is_alive,
    kill_all,
    marked,
    own_identity,
    port_holder,
    port_is_free,
    port_owners,
    stop,
    wait_until,
)
from .supervisor_state import read_status

log = get_logger(__name__)

_PACKAGE_ROOT = Path(__file__).resolve().parents[1]
# Where an engine's further ports (`Launch.ports`) listen, and the key that sets them.
ANY_HOST = "0.0.0.0"
OTHER_PORTS_KEY = "engine.sglang.nccl_port"
_GRACE = 15.0  # seconds, beyond the configured ones, for a supervisor to say how things ended


def start_server(config: Config, name: str, model: Path, model_digest: str) -> None:
    """Start server `name` under a detached supervisor; returns once it has answered a real request.

    Args:
        config: the run's configuration.
        name: which server of the pool.
        model: the file or folder that the engine is given.
        model_digest: content hash of the model.

    Raises:
        UserError: with the cause, if it does not start.
    """
    layout, where = config.layout, place(config, name)
    _end_predecessor(config, name)
    if config.engine.kind != "external":
        launch = prepare(config, where, model)
        _await_port(config, name, where.host, where.port)
        for port in launch.ports:
            _await_port(config, name, ANY_HOST, port, OTHER_PORTS_KEY)
    _write_spec(config, name, model, model_digest)
    with contextlib.suppress(FileNotFoundError):
        layout.ready(name).unlink()
    log.info("server %s: starting at %s", name, where.url)
    supervisor = _start_supervisor(layout, name)
    try:
        _await_ready(config, name, supervisor)
    except BaseException:
        supervisor.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            supervisor.wait(config.servers.stop_timeout + _GRACE)
        raise
    log.info("server %s: ready at %s", name, where.url)


def _end_predecessor(config: Config, name: str) -> None:
    """See to it that nothing of an earlier server in this slot is left on this machine."""
    layout, timeout = config.layout, config.servers.stop_timeout + _GRACE
    status, mark = read_status(layout, name), server_mark(config.layout, name)
    supervisor = status.identity("supervisor") if status else None
    if supervisor and is_alive(supervisor):
        log.info("server %s: waiting for its predecessor (pid %d) to stop", name, supervisor.pid)
        if not stop(supervisor, term_timeout=timeout):
            raise UserError(f"its old supervisor (pid {supervisor.pid}) cannot be stopped", where=f"server {name}")
    # A reaper that lives sees to its engine within its own deadline; what is left then has none.
    if wait_until(lambda: not marked(MARK_VARIABLE, mark), config.servers.stop_timeout + 2, interval=0.2):
        return
    leftovers = marked(MARK_VARIABLE, mark)
    log.warning("server %s: killing what an earlier one left: pids %s", name, [process.pid for process in leftovers])
    if stubborn := kill_all(leftovers, timeout=10):
        pids = ", ".join(str(process.pid) for process in stubborn)
        raise UserError(f"processes of an earlier server cannot be killed (pids {pids})", where=f"server {name}")


def _await_port(config: Config, name: str, host: str, port: int, key: str = "servers.port") -> None:
    """Wait for a port while a server of this run is stopping on it; refuse at once if it is anyone else's."""
    deadline = time.monotonic() + config.servers.stop_timeout + _GRACE
    while True:
        try:
            if port_is_free(host, port):
                return
        except OSError as error:
            raise UserError(f"cannot listen on {host!r}: {error.strerror}", where="servers.host") from None
        if not _is_ours(config.layout, port) or time.monotonic() > deadline:
            raise UserError(port_in_use(port, key), where=f"server {name}")
        time.sleep(0.2)


def port_in_use(port: int, key: str = "servers.port") -> str:
    """What is said of a port that somebody else has."""
    holder = port_holder(port)
    return f"port {port} is in use by {holder}; stop that process, or set {key} to a range that is free"


def _is_ours(layout: Layout, port: int) -> bool:
    """Whether the port is held by a server of this run."""
    own_servers = os.path.abspath(layout.ready("0").parent)
    for pid in port_owners(port):
        with contextlib.suppress(psutil.Error):
            mark = psutil.Process(pid).environ().get(MARK_VARIABLE, "")
            if os.path.dirname(mark) == own_servers:
                return True
    return False


def _write_spec(config: Config, name: str, model: Path, model_digest: str) -> None:
    layout = config.layout
    old, status = read_json_or_none(layout.server_spec(name)), read_status(layout, name)
    instance = old.get("instance", 0) if isinstance(old, dict) else 0
    spec = {
        "config": config.model_dump(mode="json"),
        "server": name,
        "model": os.path.abspath(model),
        "model_digest": model_digest,
        "launcher": own_identity().to_json(),
        "instance": max(instance, status.instance if status else 0),
    }
    write_bytes(layout.server_spec(name), orjson.dumps(spec, option=orjson.OPT_INDENT_2), mode=0o600)


def _start_supervisor(layout: Layout, name: str) -> subprocess.Popen[bytes]:
    """Start it in a session of its own, so that no signal to Snakemake's process group reaches it."""
    path = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    log_file = layout.supervisor_log(name)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", "shardmill.supervisor", str(layout.server_spec(name))],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )


def _await_ready(config: Config, name: str, supervisor: subprocess.Popen[bytes]) -> None:
    layout = config.layout
    # The supervisor keeps the deadline itself and says why; this one is for a supervisor that hangs.
    deadline = time.monotonic() + config.servers.start_timeout + config.servers.stop_timeout + 2 * _GRACE
    hint = f"its log: {layout.server_log(name)}"
    while time.monotonic() < deadline:
        ended = supervisor.poll()
        lease, status = read_ready(layout, name), read_status(layout, name)
        if lease and _is_of(lease.identity, supervisor) and ended is None:
            return
        if ended is not None:
            own = status and _is_of(status.identity("supervisor"), supervisor)
            if own and status and status.state == "failed":
                raise UserError(status.message, where=f"server {name}", hint=hint)
            hint = f"see {layout.supervisor_log(name)}"
            raise UserError(
                f"its supervisor ended before it was ready (code {ended})", where=f"server {name}", hint=hint
            )
        time.sleep(0.1)
    raise UserError("its supervisor does not answer", where=f"server {name}", hint=f"see {layout.supervisor_log(name)}")


def _is_of(identity: Identity | None, supervisor: subprocess.Popen[bytes]) -> bool:
    return identity is not None and identity.pid == supervisor.pid
