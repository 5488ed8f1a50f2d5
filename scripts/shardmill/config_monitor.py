"""The configuration's section about samples, alarms and cost."""

from __future__ import annotations

from pydantic import Field

from .config_section import Section


class Alarms(Section):
    """When the monitor, the log and the report raise an alarm."""

    slow_below: float = Field(
        0.9, gt=0, lt=1, description="A server is slow below this share of its peers' median tokens per second."
    )
    slow_minutes: int = Field(
        6,
        ge=2,
        le=120,
        description="Minutes that are judged together. Shorter windows mean nothing: 20 s ones vary 1.8 times.",
    )
    acceptance_below: float = Field(
        0.85, gt=0, lt=1, description="Acceptance length over ten minutes, as a share of what it was before."
    )
    stall_seconds: float = Field(
        120,
        gt=0,
        description="Seconds without a new token while requests wait. `servers.stall_after` is when it is restarted.",
    )
    rejects_factor: float = Field(
        2.0, gt=1, description="Rejects of a quarter of an hour, as a multiple of the rate before."
    )
    eta_slip: float = Field(
        0.15,
        gt=0,
        description="How much later the end may move within an hour, as a share of the time that was left.",
    )
    disk_free_gb: float = Field(
        2.0, ge=0, description="Least free space for results in GB, beside what the rest will need."
    )


class Monitor(Section):
    """Samples of the servers and jobs, alarms, and what the node costs."""

    interval: float = Field(10, ge=1, le=60, description="Seconds between two samples.")
    retention_days: float = Field(7, gt=0, description="Days that samples of servers are kept.")
    alarms: Alarms = Field(default_factory=Alarms)
    report: bool = Field(True, description="Make `report.html` at the end of each run.")
    price_per_hour: float | None = Field(
        None, ge=0, description="Price of all servers together for an hour, for the report."
    )
    currency: str = Field("USD", min_length=1, max_length=8, description="Unit of `price_per_hour`.")
