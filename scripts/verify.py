"""Prove the finished dataset again, from its files alone."""

from shardmill import job
from shardmill.logs import get_logger
from shardmill.verify import verify

if __name__ == "__main__":
    config = job.enter(globals().get("snakemake")).config
    manifest = verify(config.layout.dataset.parent)
    counts = manifest["counts"]
    get_logger("verify").info(
        "verified: %d completions and %d rejects are the %d records of the input",
        counts["accepted"],
        counts["rejected"] + counts["unusable"],
        counts["input"],
    )
