# Prompts: the input file, cut into shards.
# Needs: prompts.path. Makes: prompts/index.json, prompts/shards/*.jsonl.zst, prompts/rejected.jsonl.
from shardmill.prompts.hub import is_remote, prompts_file

if is_remote(plan.config.prompts.path):

    checkpoint fetch_prompts:
        """Get the prompts from a hub dataset; how many shards they make is known after that."""
        output:
            prompts=layout.fetched_prompts,
            record=layout.fetched_record,
        log:
            layout.log("prompts", "fetched.log"),
        benchmark:
            layout.log("benchmarks", "fetch_prompts.tsv")
        localrule: True
        conda:
            "../envs/pipeline.yaml"
        params:
            source=plan.config.prompts.path,
        message:
            "Getting the prompts"
        script:
            "../scripts/fetch_prompts.py"


rule prepare_prompts:
    """Cut the input into shards of consecutive records, with digests, counts and typed rejects."""
    input:
        # A touched file is no new file: what counts is the digest among the params.
        prompts=ancient(prompts_file(plan.config)),
    output:
        index=layout.prompt_index,
    log:
        layout.log("prompts", "index.log"),
    benchmark:
        layout.log("benchmarks", "prepare_prompts.tsv")
    retries: 0
    localrule: True
    conda:
        "../envs/pipeline.yaml"
    threads: 4
    params:
        key=lambda wildcards: plan.prompts_key,
    message:
        "Cutting {input.prompts} into shards"
    script:
        "../scripts/prepare_prompts.py"
