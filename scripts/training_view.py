"""Write the training view of the merged dataset: its formats, the report and the dataset card."""

from shardmill import job
from shardmill.logs import get_logger
from shardmill.training.view import make_view

if __name__ == "__main__":
    config = job.enter(globals().get("snakemake")).config
    report = make_view(config)
    get_logger("training").info(
        "training view: %d samples of %d completions, %s supervised tokens in the median",
        report["samples"],
        report["completions"],
        report["supervised_tokens"]["median"],
    )
