"""Make one pool's shards on this machine.

python scripts/run_pool.py --configfile my.yaml --pool 00000-00049 --cores 8
"""

from shardmill import job
from shardmill.logs import get_logger
from shardmill.pool_job import PoolJob

if __name__ == "__main__":
    snakemake = globals().get("snakemake")
    current = job.enter(snakemake, *(["pool"] if snakemake else ["pool", "cores"]))
    pool = current.wildcards.pool
    cores = snakemake.threads if snakemake else int(current.wildcards.cores)
    proof = PoolJob(current.config, pool, cores).run()
    get_logger("pool").info("pool %s: %d shards made and read back", pool, len(proof["shards"]))
