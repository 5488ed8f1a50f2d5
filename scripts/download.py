"""Get the model, verify every file, and bind the run to its content."""

from shardmill import contract, job
from shardmill.model.download import download

if __name__ == "__main__":
    config = job.enter(globals().get("snakemake")).config
    manifest = download(config)
    contract.lock_model(config, manifest["digest"])
