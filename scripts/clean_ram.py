"""Free the RAM disk: remove this model's staged copy."""

from shardmill import job
from shardmill.logs import get_logger
from shardmill.model.staging import clean

if __name__ == "__main__":
    config = job.enter(globals().get("snakemake")).config
    removed = clean(config)
    get_logger("model").info("%s", "\n".join(removed) if removed else "nothing is staged")
