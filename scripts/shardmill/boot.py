"""From the first answer to readiness: what a server is, whether it is what was asked for, and its lease."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .config import Config
from .engines.base import BootReport, Engine, Launch, ServerPlace
from .files import write_bytes
from .lease import Lease
from .logs import get_logger
from .place import launch_digest
from .supervisor_state import ServerStatus
from .thinking_contract import Proof, is_wanted, prove

log = get_logger(__name__)


class BootCheck:
    """Looks a server over that has begun to answer, in a thread of its own.

    Args:
        model: what it was launched with; None of an external server.
        served_model: the `model` field of requests, where the server wants one.
        log_tail: gives the end of its log.
        deadline: monotonic time by which it must have proven itself.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        place: ServerPlace,
        *,
        model: Path | None,
        served_model: str | None,
        log_tail: Callable[[], str],
        deadline: float,
    ) -> None:
        self.done = False
        self.problem = ""
        self.report = BootReport()
        self._config, self._engine, self._place = config, engine, place
        self._model, self._served_model, self._log_tail, self._deadline = model, served_model, log_tail, deadline
        self._proof = Proof()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="boot-check", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def facts(self) -> dict[str, Any]:
        """What is worth keeping of it; no secrets."""
        warnings = [*self.report.warnings, *self._proof.warnings]
        facts = dict(self.report.facts)
        if self._proof.facts:
            facts["one_request_alone"] = self._proof.facts
        return facts | ({"warnings": warnings} if warnings else {})

    def _run(self) -> None:
        try:
            self._check()
        except Exception as error:
            log.exception("server %s: a bug in the boot check", self._place.name)
            self.problem = f"unexpected {type(error).__name__} in the boot check: {error}"
        finally:
            self.done = True

    def _check(self) -> None:
        name = self._place.name
        self.report = self._engine.boot_report(self._config, self._place, self._model, self._log_tail())
        for warning in self.report.warnings:
            log.warning("server %s: %s", name, warning)
        if self.report.errors:
            self.problem = "; ".join(self.report.errors)
        elif is_wanted(self._config, self._engine):
            self._proof = prove(
                self._config,
                self._engine,
                self._place,
                self._served_model,
                context=self.report.facts.get("context_length"),
                deadline=self._deadline,
                stopped=self._stopped,
            )
            self.problem = self._proof.problem
            for warning in self._proof.warnings:
                log.warning("server %s: %s", name, warning)


def make_lease(
    config: Config,
    engine: Engine,
    place: ServerPlace,
    spec: dict[str, Any],
    status: ServerStatus,
    facts: dict[str, Any],
) -> Lease:
    """The content of a server's readiness file.

    Args:
        spec: the specification that `shardmill.launch.start_server` wrote.
        status: of the server as it is now.
        facts: of its boot.
    """
    model, digest, external = Path(spec["model"]), spec["model_digest"], config.engine.kind == "external"
    version = getattr(engine, "version", None)
    return Lease(
        server=place.name,
        url=place.url,
        supervisor={},
        launch_digest=launch_digest(config, place, model, digest),
        model=status.model or "" if external else str(model),
        model_digest=digest,
        served_model=status.model,
        capacity=status.capacity,
        instance=status.instance,
        engine={"kind": engine.kind, "version": version(place) if version and not external else ""},
        facts=facts,
    )


def write_secrets(launch: Launch) -> None:
    """Write the files that the engine reads at its start, for its owner's eyes alone.

    Raises:
        OSError: if one cannot be written.
    """
    for path, text in launch.files.items():
        write_bytes(path, text.encode(), mode=0o600)


def remove_secrets(launch: Launch | None) -> None:
    """Remove them again."""
    for path in launch.files if launch else ():
        Path(path).unlink(missing_ok=True)
