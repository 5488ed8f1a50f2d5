"""Merge the shards into the dataset and prove it."""

from shardmill import job
from shardmill.logs import get_logger
from shardmill.merge import merge

if __name__ == "__main__":
    config = job.enter(globals().get("snakemake")).config
    counts = merge(config)["counts"]
    get_logger("merge").info("merged %d completions of %d shards", counts["accepted"], counts["shards"])
