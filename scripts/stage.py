"""Copy the model to the RAM disk and verify the copy."""

from shardmill import job
from shardmill.model.staging import stage

if __name__ == "__main__":
    stage(job.enter(globals().get("snakemake")).config)
