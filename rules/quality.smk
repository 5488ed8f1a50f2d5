# Quality: what stands between a wrong setting and two days of GPU time.
# Needs: the servers and the prompt shards. Makes: quality/canary.json.


rule canary:
    """Answer and judge a sample before any shard is released; its answers are kept for their shards."""
    input:
        index=ancient(layout.prompt_index),
        servers=[layout.ready(name) for name in plan.config.server_names],
    output:
        report=layout.canary,
    log:
        layout.log("quality", "canary.log"),
    benchmark:
        layout.log("benchmarks", "canary.tsv")
    retries: 0
    conda:
        "../envs/pipeline.yaml"
    params:
        answers=plan.answers,
        engine=plan.engine_key,
    message:
        "Answering a sample"
    script:
        "../scripts/canary.py"


rule verify:
    """Prove a finished dataset again, from its files alone: snakemake verify."""
    log:
        layout.log("quality", "verify.log"),
    retries: 0
    conda:
        "../envs/pipeline.yaml"
    message:
        "Proving the dataset"
    script:
        "../scripts/verify.py"
