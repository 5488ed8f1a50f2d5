"""The configuration's section about what a run will take."""

from __future__ import annotations

from pydantic import Field

from .config_section import Section


class Economics(Section):
    """What `snakemake plan` goes by, until `snakemake calibrate` or the run itself has measured it."""

    gpu: str | None = Field(
        None, description="Kind of the node's GPUs, as `snakemake plan` lists them (`B200`), for its rate and price."
    )
    tokens_per_second: float | None = Field(
        None, gt=0, description="Tokens per second of one full server; left out: measured, or the GPU's."
    )
    tokens_per_answer: float | None = Field(
        None, gt=0, description="Mean length of an answer, the thought included; left out: measured, or a usual one."
    )
    calibration_seconds: float = Field(
        30, gt=0, description="Seconds that `snakemake calibrate` measures each number of requests in flight."
    )
