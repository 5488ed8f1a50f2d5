"""The supervisor: the detached process that owns one server.

    python -m shardmill.supervisor SPEC.json

It starts the engine, waits until that has answered a real request, publishes the readiness file, and
then looks once a second: it publishes the server's load, restarts an engine that died or hangs, and
stops it when the readiness file is gone (the lease is over), when the run has had no owner for
`servers.linger` seconds, or on SIGTERM. The engine never outlives it (`shardmill.reaper`).

A deadline or an interval here is always of the monotonic clock: the wall clock may jump.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from . import logs
from .boot import BootCheck, make_lease, remove_secrets, write_secrets
from .config import Config
from .engine_process import EngineProcess, clean_environment
from .engines.base import Launch
from .engines.openai import served_model
from .engines.registry import engine_for
from .errors import UserError
from .files import read_json, write_bytes
from .launch import ANY_HOST, OTHER_PORTS_KEY, port_in_use
from .lease import read_ready, write_ready
from .model.staging import use_lock
from .monitor.samples import Sampler
from .place import place, prepare
from .process import Identity, own_identity, port_is_free, port_owners, wait_until
from .readiness import Probe
from .reaper import become_subreaper
from .supervisor_state import ServerStatus, read_status, write_status
from .tenancy import End, Superseded, Tenancy
from .watch import LedgerCount, Watch

log = logs.get_logger(__name__)

TICK = 1.0  # seconds between looks
LOAD_TIMEOUT = 2.0  # seconds a server gets to say its load
VERIFY_TIMEOUT = 30.0  # seconds a server gets to say its settings
HEALTHY_SECONDS = 600.0  # of good service after which earlier restarts are forgiven
LONGEST_PAUSE = 60.0  # seconds between restarts


class _Down(Exception):
    """The engine is dead or as good as dead; `quote` tells whether its log may say why."""

    def __init__(self, cause: str, *, quote: bool = True) -> None:
        self.quote = quote
        super().__init__(cause)


class Supervisor:
    """One server, from its start to its end.

    Args:
        spec_path: the specification that `shardmill.launch.start_server` wrote.
        outstanding: how many requests this machine's jobs have in flight at the server by their own account; what
            lets a server be found out that shows nothing running while requests get no answer.
    """

    def __init__(self, spec_path: Path, outstanding: Callable[[], int] = lambda: 0) -> None:
        self._spec_path = spec_path
        self._spec = read_json(spec_path)
        self.config = Config.model_validate(self._spec["config"])
        self.name = str(self._spec["server"])
        self._layout, self._servers = self.config.layout, self.config.servers
        self._engine = engine_for(self.config)
        self._place = place(self.config, self.name)
        self._outstanding = outstanding
        self._external = self.config.engine.kind == "external"
        self._me = own_identity()
        launcher = Identity.from_json(self._spec.get("launcher"))
        self._tenancy = Tenancy(self._layout, self.name, self._me, self._servers.linger, launcher)
        self._process: EngineProcess | None = None
        self._launch: Launch | None = None
        self._boot: BootCheck | None = None
        self._published = False
        self._told_to_stop = threading.Event()
        self._sampler = Sampler(self.config, self.name, self._place.gpus)
        self._recent_restarts = 0
        self._watch = Watch(self._servers.stall_after)
        self._status_failed = False
        self.status = ServerStatus(self.name, "starting", self._place.url, instance=int(self._spec.get("instance", 0)))

    # The life of the server

    def run(self) -> int:
        """Supervise until the end; returns the exit code."""
        signal.signal(signal.SIGTERM, lambda number, frame: self._told_to_stop.set())
        signal.signal(signal.SIGINT, lambda number, frame: self._told_to_stop.set())
        become_subreaper()
        log.info("server %s: supervisor pid %d", self.name, os.getpid())
        try:
            self._serve()
        except End as end:
            log.info("server %s: stopping: %s", self.name, end)
            self._shut_down(touch_files=not isinstance(end, Superseded))
            return 0
        except _Down as down:
            return self._fail(str(down))
        except Exception as error:
            log.exception("server %s: a bug in the supervisor", self.name)
            return self._fail(f"unexpected {type(error).__name__} in the supervisor: {error}")
        return 0

    def _serve(self) -> None:
        """Start and restart the engine.

        Raises:
            End: when the server is not wanted any more.
            _Down: when it cannot be made to serve.
        """
        while True:
            try:
                self._start_engine()
                self._await_answer()
                self._look_over()
                self._publish()
                self._watch_engine()
            except _Down as down:
                cause = self._end_engine(str(down), quote=down.quote)
                if not self._published or self._external:
                    raise _Down(cause) from None
                self._pause_before_restart(cause)

    def _start_engine(self) -> None:
        """Start the engine; of an external one, only begin to look.

        Raises:
            _Down: if its port is taken, or it cannot be started.
        """
        self.status.instance += 1
        self.status.running = self.status.queued = 0
        self.status.completion_tokens = self.status.prompt_tokens = None
        self._save_instance()
        self._write_status()
        if self._external:
            self.status.model = self.config.engine.external.model
            return
        secrets = (self._place.api_key,) if self._place.api_key else ()
        log_file = self._layout.server_log(self.name)
        try:
            if not self._await_port(self._place.host, self._place.port):
                raise _Down(port_in_use(self._place.port), quote=False)
            launch = self._launch = prepare(self.config, self._place, Path(self._spec["model"]))
            if taken := [port for port in launch.ports if not self._await_port(ANY_HOST, port)]:
                raise _Down(port_in_use(taken[0], OTHER_PORTS_KEY), quote=False)
            environment = clean_environment() | launch.environment
            write_secrets(launch)
            self._process = EngineProcess(launch.command, environment, log_file, self._servers.stop_timeout, secrets)
        except UserError as error:
            raise _Down(str(error), quote=False) from None
        except OSError as error:
            raise _Down(f"the engine cannot be started: {error}", quote=False) from None
        log.info("server %s: engine start %d", self.name, self.status.instance)

    def _await_port(self, host: str, port: int) -> bool:
        """Whether a port is free; after a restart the kernel may take a moment to let go of it."""
        return wait_until(lambda: port_is_free(host, port), 5 if self._published else 0, interval=0.2)

    def _await_answer(self) -> None:
        """Wait until the engine has answered a real request.

        Raises:
            _Down: if it ends, refuses, does not answer in time, or runs with other settings than it was given.
            End: when the server is not wanted any more.
        """
        timeout = self._servers.start_timeout
        deadline = time.monotonic() + timeout
        if self._external and self.status.model is None:
            self.status.model = served_model(self._place, timeout=LOAD_TIMEOUT)
        probe = Probe(self.config, self._engine, self._place, self.status.model, timeout)
        try:
            while not probe.answered:
                if self._process and self._process.has_ended():
                    raise _Down(f"{self._process.how_it_ended()} while starting")
                if probe.refusal:
                    raise _Down(f"it refuses a plain request: {probe.refusal}", quote=False)
                if time.monotonic() > deadline:
                    raise _Down(f"no answer within {timeout:g} s (servers.start_timeout): {probe.last_fault}")
                self._tick(0.2)
        finally:
            probe.stop()
        self._check_who_answered()
        verify = getattr(self._engine, "verify", None)
        if verify and (problem := verify(self.config, self._place, timeout=VERIFY_TIMEOUT)):
            raise _Down(problem, quote=False)

    def _check_who_answered(self) -> None:
        """That the answer came from this engine, not from a stranger who took the port first."""
        if self._process is None:
            return
        holders = set(port_owners(self._place.port))
        if holders and not holders & self._process.pids():
            raise _Down(port_in_use(self._place.port), quote=False)

    def _look_over(self) -> None:
        """See that what answers is what was asked for, and that it thinks as the run needs it to.

        Raises:
            _Down: if it is not, or ends.
            End: when the server is not wanted any more.
        """
        log_tail, model = (self._process.log.tail, Path(self._spec["model"])) if self._process else (str, None)
        check = self._boot = BootCheck(
            self.config,
            self._engine,
            self._place,
            model=model,
            served_model=self.status.model,
            log_tail=log_tail,
            deadline=time.monotonic() + self._servers.start_timeout,
        )
        try:
            while not check.done:
                if self._process and self._process.has_ended():
                    raise _Down(f"{self._process.how_it_ended()} while it was looked over")
                self._tick(0.2)
        finally:
            check.stop()
        if check.problem:
            raise _Down(check.problem, quote=False)
        remove_secrets(self._launch)

    def _publish(self) -> None:
        """Say `ready`, and write the readiness file unless this was a restart."""
        self._take_load()
        self._watch.restart()
        self.status.state, self.status.message = "ready", ""
        self._write_status()
        if not self._published:
            self._write_ready()
            self._published = True
        log.info("server %s: ready (start %d)", self.name, self.status.instance)

    def _write_ready(self) -> None:
        facts = self._boot.facts if self._boot else {}
        lease = make_lease(self.config, self._engine, self._place, self._spec, self.status, facts)
        deadline = time.monotonic() + 60
        while True:
            try:
                return write_ready(self._layout, lease)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise _Down(f"cannot write {self._layout.ready(self.name)}: {error.strerror}") from None
                self._tick(TICK)

    def _watch_engine(self) -> None:
        """Look after a ready server.

        Raises:
            _Down: when the engine is dead or hangs.
            End: when it is not wanted any more.
        """
        healthy_since = time.monotonic()
        while True:
            self._tick(TICK)
            if self._process and self._process.has_ended():
                raise _Down(self._process.how_it_ended())
            self._take_load()
            if self._external:
                self._judge_external()
            elif trouble := self._watch.trouble():
                raise _Down(trouble)
            if time.monotonic() - healthy_since > HEALTHY_SECONDS:
                self._recent_restarts = 0

    def _take_load(self) -> None:
        """Read the server's load into the status."""
        load = self._engine.load(self._place, timeout=LOAD_TIMEOUT)
        moved = self._watch.note(load, self._place, self._outstanding())
        status, now = self.status, time.time()
        if load is not None:
            status.running, status.queued = load.running, load.queued
            status.capacity = load.capacity or (self._boot.report.capacity if self._boot else None)
            status.completion_tokens, status.prompt_tokens = load.completion_tokens, load.prompt_tokens
            status.details, status.answered_at = dict(load.details), now
        if moved:
            status.last_progress_at = now

    def _judge_external(self) -> None:
        """An external server is never restarted; while it is away it is only not used."""
        was_ready = self.status.state == "ready"
        away, is_new = self._watch.away(), self._watch.is_new_engine()
        if away and was_ready:
            log.warning("server %s: %s", self.name, away)
        if not away and not was_ready:
            log.info("server %s: answers again", self.name)
        if is_new:
            # What was in flight is lost. One that was only slow to answer still works on it.
            self.status.instance += 1
        self.status.state, self.status.message = ("restarting", away) if away else ("ready", "")

    # The end of an engine, and of the server

    def _end_engine(self, cause: str, *, quote: bool = False) -> str:
        """Stop what is left of the engine; returns the cause, if wanted with the telling lines of its log."""
        self.status.state, self.status.message = ("restarting" if self._published else "starting"), cause
        self._write_status()
        process, self._process = self._process, None
        remove_secrets(self._launch)
        if process is None:
            return cause
        if not process.stop(self._write_status_now_and_then()):
            log.error("server %s: some processes of its engine cannot be killed", self.name)
        lines = self._engine.telling_lines(process.log.tail()) if quote else []
        return f"{cause}; its log says: {' | '.join(lines)}" if lines else cause

    def _pause_before_restart(self, cause: str) -> None:
        """Wait 1, 2, 4, ... seconds before the next start.

        Raises:
            _Down: if it has been restarted too often.
        """
        if self._recent_restarts >= self._servers.max_restarts:
            raise _Down(f"given up after {self._recent_restarts} restarts: {cause}")
        pause = min(LONGEST_PAUSE, 2.0**self._recent_restarts)
        self._recent_restarts += 1
        self.status.restarts += 1
        log.warning("server %s: %s; restart %d in %.0f s", self.name, cause, self.status.restarts, pause)
        self.status.state, self.status.message = "restarting", cause
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            self._tick(min(left, TICK))

    def _fail(self, message: str) -> int:
        """Give the server up: no engine, no readiness file, and a status that says why."""
        log.error("server %s: failed: %s", self.name, message)
        self._end_engine(message)
        self._remove_ready()
        self.status.state, self.status.message = "failed", message
        self._write_status()
        return 1

    def _shut_down(self, *, touch_files: bool) -> None:
        if touch_files:
            # First, so that nobody takes up a lease that is ending.
            self._remove_ready()
        # A superseded one leaves the status file to its successor.
        self.status.state = "draining"
        if touch_files:
            self._write_status()
        tick = self._write_status_now_and_then() if touch_files else (lambda: None)
        if self._process and not self._process.stop(tick):
            log.error("server %s: some processes of its engine cannot be killed", self.name)
        remove_secrets(self._launch)
        status = read_status(self._layout, self.name)
        if status and status.identity("supervisor") == self._me:
            with contextlib.suppress(OSError):
                self._layout.server_status(self.name).unlink()
        log.info("server %s: stopped", self.name)

    def _remove_ready(self) -> None:
        lease = read_ready(self._layout, self.name)
        if lease and lease.identity == self._me:
            with contextlib.suppress(OSError):
                self._layout.ready(self.name).unlink()

    # Once a second

    def _tick(self, seconds: float) -> None:
        """Write the status, wait, and see whether the server is still wanted.

        Raises:
            End: if it is not.
        """
        self._write_status()
        self._told_to_stop.wait(seconds)
        if self._told_to_stop.is_set():
            raise End("told to")
        self._tenancy.check(published=self._published)

    def _write_status(self) -> None:
        """Write the status file; a disk that is full, or gone, must not end the server."""
        process = self._process
        self.status.pids = {
            "supervisor": self._me.to_json(),
            "reaper": _json_of(process.reaper_identity if process else None),
            "engine": _json_of(process.engine_identity if process else None),
        }
        try:
            write_status(self._layout, self.status)
        except OSError as error:
            if not self._status_failed:
                log.error("server %s: cannot write its status: %s", self.name, error)
            self._status_failed = True
        else:
            self._status_failed = False
        self._sampler.note(self.status)

    def _write_status_now_and_then(self) -> Callable[[], None]:
        """For waits that poll quickly."""
        due = 0.0

        def tick() -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + TICK
                self._write_status()

        return tick

    def _save_instance(self) -> None:
        """Remember the number of this start beyond the life of the status file."""
        self._spec["instance"] = self.status.instance
        with contextlib.suppress(OSError):
            write_bytes(self._spec_path, orjson.dumps(self._spec, option=orjson.OPT_INDENT_2), mode=0o600)


def _json_of(identity: Identity | None) -> dict[str, Any] | None:
    return identity.to_json() if identity else None


def main(arguments: list[str]) -> int:
    spec_path = Path(arguments[0])
    spec = read_json(spec_path)
    config = Config.model_validate(spec["config"])
    logs.configure(config.layout.supervisor_log(spec["server"]), console=False)
    # While it lives, nobody frees or remakes the staged model under its engine.
    with contextlib.nullcontext() if config.engine.kind == "external" else use_lock(config):
        return Supervisor(spec_path, LedgerCount(config.layout, str(spec["server"]))).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
