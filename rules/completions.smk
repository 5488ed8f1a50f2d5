# Completions: one job per shard, each over all servers of this machine.
# Needs: a prompt shard, the servers, a canary that lived. Makes: completions/ (and rejected/, stats/) of each shard.


rule generate:
    """Answer one shard's prompts; what its journal already holds is not asked again."""
    input:
        index=get_index,
        means=get_means,
    output:
        # Its rejects and statistics lie beside it; declared as well, they would double the time of a plan.
        completions=layout.completions("{shard}"),
    log:
        layout.log("completions", "{shard}.log"),
    benchmark:
        layout.log("benchmarks", "generate.{shard}.tsv")
    retries: 0
    conda:
        "../envs/pipeline.yaml"
    params:
        prompts=lambda wildcards: plan.digests[wildcards.shard],
        answers=plan.answers,
    script:
        "../scripts/generate.py"
