# Planning: what a run will take, before it is paid for, and what the node can do.
# Needs: the prompts file (plan); servers and prompt shards (calibrate). Makes: calibration.json.


rule plan:
    """Say what the run will take: tokens, hours, money, disk and memory; here and on other nodes: snakemake plan."""
    log:
        layout.log("planning", "plan.log"),
    retries: 0
    localrule: True
    conda:
        "../envs/pipeline.yaml"
    message:
        "Planning"
    script:
        "../scripts/plan.py"


rule calibrate:
    """Measure throughput against requests in flight on the run's own prompts: snakemake calibrate."""
    input:
        index=ancient(layout.prompt_index),
        servers=[layout.ready(name) for name in plan.config.server_names],
    log:
        layout.log("planning", "calibrate.log"),
    retries: 0
    conda:
        "../envs/pipeline.yaml"
    message:
        "Calibrating"
    script:
        "../scripts/calibrate.py"
