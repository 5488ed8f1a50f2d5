"""Settings of runs over several machines."""

from __future__ import annotations

from pydantic import Field

from .config_section import Section


class Pools(Section):
    """Several machines: the shards are cut into pools, each one job on one machine. See docs/many-machines.md."""

    shards: int = Field(0, ge=0, description="Shards per pool; 0: one machine makes them all, and there are no pools.")
    only: str | None = Field(
        None,
        pattern=r"^\d{5,}-\d{5,}$",
        description="Make only this pool's shards, and no dataset. Set for each pool by the pipeline itself.",
    )
    minutes: float | None = Field(
        None, gt=0, description="Longest time of a pool's job, where no Slurm is there to say when it ends."
    )
    wind_down: float = Field(
        1800,
        ge=0,
        description="Seconds before a job's end from which on its pool begins no more shards, at most half of the "
        "job's time; the shards that run are finished. About the time that a shard takes.",
    )
    margin: float = Field(
        120,
        ge=0,
        description="Seconds before a job's end at which the shards that still run are stopped; their finished "
        "answers are kept. Then the rest is handed back, and the job queues again.",
    )
