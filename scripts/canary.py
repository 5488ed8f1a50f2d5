"""Answer and judge a sample of the input before any shard is released."""

import sys

from shardmill import job
from shardmill.answering import Interrupted
from shardmill.canary import Canary
from shardmill.generate import model_digest
from shardmill.logs import get_logger

if __name__ == "__main__":
    config = job.enter(globals().get("snakemake")).config
    log = get_logger("canary")
    canary = Canary(config, model_digest(config))
    job.stop_on_signals(canary.answering.stop)
    try:
        report = canary.run()
    except Interrupted as reason:
        log.info("canary: %s", reason)
        sys.exit(1)
    log.info(
        "canary: %d of %d sample answers are good, %s tokens each on average",
        report["accepted"],
        report["prompts"],
        report["mean_completion_tokens"],
    )
