# Completions: one job per shard, each over all servers of this machine.
# Needs: a prompt shard, the servers, a canary that lived. Makes: completions/, rejected/ and stats/ of each shard.


rule generate:
    """Answer one shard's prompts; what its journal already holds is not asked again."""
    input:
        index=get_index,
        means=get_means,
    output:
        completions=layout.completions("{shard}"),
        rejects=layout.rejects("{shard}"),
        stats=layout.stats("{shard}"),
    log:
        layout.log("completions", "{shard}.log"),
    benchmark:
        layout.log("benchmarks", "generate.{shard}.tsv")
    conda:
        "../envs/pipeline.yaml"
    params:
        prompts=lambda wildcards: plan.digests[wildcards.shard],
        answers=plan.answers,
    script:
        "../scripts/generate.py"
