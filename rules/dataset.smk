# Dataset: all shards in one file, with the proof.
# Needs: every shard's files. Makes: dataset/completions.jsonl.zst, dataset/rejected.jsonl.zst, dataset/manifest.json.


rule merge:
    """One zstd frame in input order, read back, and a manifest whose counts add up to the input."""
    input:
        index=layout.prompt_index,
        shards=get_completions,
    output:
        dataset=layout.dataset,
        rejects=layout.dataset_rejects,
        manifest=report(
            layout.manifest,
            caption="captions/manifest.rst",
            category="Proof",
        ),
    log:
        layout.log("dataset", "completions.log"),
    benchmark:
        layout.log("benchmarks", "merge.tsv")
    retries: 0
    localrule: True
    conda:
        "../envs/pipeline.yaml"
    threads: workflow.resource_settings.cores or 1  # plans and reports name no cores
    params:
        level=plan.config.output.zstd_level,
    message:
        "Merging the dataset"
    script:
        "../scripts/merge.py"
