# Pools: one job per pool of shards, each the same pipeline once more on the machine that it gets.
# Needs: the prompt shards and the model on a disk that all machines share. Makes: pools/<pool>.json, a proof of its shards.
# What belongs to the run and not to a pool is a local rule: on a cluster it is made where Snakemake runs.


rule pool:
    """Make the shards of one pool; what its proof names is there and whole."""
    input:
        # Only for a pool with work: a new index must not reach the finished ones.
        means=get_pool_means,
    output:
        proof=layout.pool_proof("{pool}"),
    log:
        layout.log("pools", "{pool}.log"),
    benchmark:
        layout.log("benchmarks", "pool.{pool}.tsv")
    conda:
        "../envs/pipeline.yaml"
    # Shards answered at once; --set-threads pool=N, or a profile, says otherwise.
    threads: 7
    message:
        "Making pool {wildcards.pool}"
    script:
        "../scripts/run_pool.py"
