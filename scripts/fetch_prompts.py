"""Get the prompts from a hub dataset."""

from shardmill import job
from shardmill.prompts.hub import fetch_prompts

if __name__ == "__main__":
    fetch_prompts(job.enter(globals().get("snakemake")).config)
