"""Answer one shard's prompts over all servers of this machine."""

import signal
import sys

from shardmill import job
from shardmill.answering import Interrupted
from shardmill.generate import ShardRun, model_digest
from shardmill.logs import get_logger

if __name__ == "__main__":
    current = job.enter(globals().get("snakemake"), "shard")
    config, shard = current.config, current.wildcards.shard
    log = get_logger("generate")
    run = ShardRun(config, shard, model_digest(config))
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: run.answering.stop.set())
    try:
        stats = run.run()
    except Interrupted as reason:
        log.info("shard %s: stopped (%s); finished answers are kept, the same command goes on", shard, reason)
        sys.exit(1)
    tokens = stats["usage"].get("completion_tokens", 0)
    log.info(
        "shard %s: %d answers, %d rejects, %.1f s, %.0f tok/s",
        shard,
        stats["accepted"],
        stats["rejected"],
        stats["seconds"],
        tokens / max(stats["seconds"], 0.001),
    )
