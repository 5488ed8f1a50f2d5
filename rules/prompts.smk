# Prompts: the input file, cut into shards.
# Needs: prompts.path. Makes: prompts/index.json, prompts/shards/*.jsonl.zst, prompts/rejected.jsonl.


rule prepare_prompts:
    """Cut the input into shards of consecutive records, with digests, counts and typed rejects."""
    input:
        # A touched file is no new file: what counts is the digest among the params.
        prompts=ancient(plan.config.prompts.path),
    output:
        index=layout.prompt_index,
    log:
        layout.log("prompts", "index.log"),
    benchmark:
        layout.log("benchmarks", "prepare_prompts.tsv")
    localrule: True
    conda:
        "../envs/pipeline.yaml"
    params:
        key=plan.prompts_key,
    message:
        "Cutting {input.prompts} into shards"
    script:
        "../scripts/prepare_prompts.py"
