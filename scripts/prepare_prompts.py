"""Cut the input into prompt shards, with an index of what each holds."""

from shardmill import job
from shardmill.prompts.split import split
from shardmill.rehome import rehome, remove_strays

if __name__ == "__main__":
    config = job.enter(globals().get("snakemake")).config
    index = split(config)
    rehome(config.layout, index)
    remove_strays(config.layout, index)
