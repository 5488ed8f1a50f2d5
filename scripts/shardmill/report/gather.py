"""What the report shows, from the run's files: samples, statistics, proof, and a few examples of answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ..config import Config
from ..contract import Contract
from ..errors import UserError
from ..files import read_json_or_none
from ..monitor import alarms as rules
from ..monitor.alarm import Alarm
from ..monitor.history import MINUTE, History
from ..monitor.observer import Observer
from ..monitor.progress import Progress
from ..redaction import without_credentials
from .examples import Example, find_examples


@dataclass
class RunData:
    """Everything that the page and its plots are made of."""

    config: Config
    at: float
    snapshot: dict[str, Any]
    progress: Progress
    history: History
    alarms: list[Alarm]
    examples: dict[str, list[Example]]
    manifest: dict[str, Any] | None
    model: dict[str, Any] | None
    servers_info: dict[str, dict[str, Any]]
    answers: dict[str, Any] | None
    index: dict[str, Any]
    hours: float = 0.0
    server_hours: float = 0.0
    sessions: list[tuple[float, float]] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return self.snapshot["state"] == "finished"

    @property
    def tokens_made(self) -> float:
        """Completion tokens by the servers' own counters."""
        return sum(server.completion_tokens for server in self.history.servers.values())


def gather(config: Config) -> RunData:
    """Read all of a run's files that the report needs."""
    layout = config.layout
    observer = Observer(config, since=0.0, keep=None)
    snapshot = observer.snapshot()
    history = observer.history
    manifest = read_json_or_none(layout.manifest) if snapshot["state"] == "finished" else None
    infos = {name: read_json_or_none(layout.server_info(name)) for name in config.server_names}
    sessions = _sessions(history)
    return RunData(
        config=config,
        at=time.time(),
        snapshot=snapshot,
        progress=observer.progress,
        history=history,
        alarms=rules.scan(history, config),
        examples=find_examples(config, observer.finished()),
        manifest=manifest,
        model=read_json_or_none(layout.model_manifest),
        servers_info={name: info for name, info in infos.items() if isinstance(info, dict)},
        answers=_answers(config),
        index=observer.prompt_index,
        hours=sum(end - begin for begin, end in sessions) / 3600,
        server_hours=sum(server.covered for server in history.servers.values()) / 3600,
        sessions=sessions,
    )


def _answers(config: Config) -> dict[str, Any] | None:
    try:
        contract = Contract.read(config.layout)
    except UserError:
        return None
    return contract.answers if contract else None


def _sessions(history: History) -> list[tuple[float, float]]:
    """The stretches of time in which any server was there; minutes without one, up to five, do not part them."""
    numbers = sorted({number for server in history.servers.values() for number in server.minutes})
    found: list[list[int]] = []
    for number in numbers:
        if found and number - found[-1][1] <= 5:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [(begin * MINUTE, (end + 1) * MINUTE) for begin, end in found]


def without_passwords(value: Any) -> Any:
    """A setting as it may be shown: what stands before the @ of a URL is left out."""
    if isinstance(value, dict):
        return {key: without_passwords(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_passwords(part) for part in value]
    return without_credentials(value) if isinstance(value, str) else value
