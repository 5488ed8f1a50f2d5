"""Build the engine's own environment, or find that it is whole."""

from shardmill import job
from shardmill.engine_env import build_environment

if __name__ == "__main__":
    build_environment(job.enter(globals().get("snakemake")).config)
