"""Answer one shard's prompts over all servers of this machine."""

import sys

from shardmill import job
from shardmill.answering import Interrupted
from shardmill.generate import ShardRun, model_digest
from shardmill.logs import get_logger
from shardmill.run_state import describe_shard

if __name__ == "__main__":
    current = job.enter(globals().get("snakemake"), "shard")
    config, shard = current.config, current.wildcards.shard
    log = get_logger("generate")
    run = ShardRun(config, shard, model_digest(config))
    job.stop_on_signals(run.answering.stop)
    try:
        stats = run.run()
    except Interrupted as reason:
        log.info("shard %s: %s; finished answers are kept, the same command goes on", shard, reason)
        sys.exit(1)
    log.info("%s", describe_shard(config, stats))
