"""What an alarm is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["warning", "error"]


@dataclass(frozen=True)
class Alarm:
    """Something that a person should know.

    Args:
        kind: slow, idle, acceptance, down, failed, stall, silent, rejects, eta, disk or memory.
        server: whom it is about; empty for the run.
        until: None while it lasts.
    """

    kind: str
    server: str
    since: float
    until: float | None
    level: Level
    text: str

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.server}"
