# Servers: one inference server per GPU set.
# Needs: a model that can be read, and the engine's environment where that is built here.
# Makes: that environment, on local disk; servers/*.ready, each a lease: its removal stops the server.


if plan.engine_environment:

    rule engine_environment:
        """Build SGLang's own environment, from exact pins."""
        output:
            record=plan.engine_environment,
        log:
            layout.log("servers", "engine_environment.log"),
        benchmark:
            layout.log("benchmarks", "engine_environment.tsv")
        retries: 0
        conda:
            "../envs/pipeline.yaml"
        message:
            "Building SGLang's environment"
        script:
            "../scripts/build_environment.py"


rule serve:
    """Start a server under its supervisor; done once it has answered a real request."""
    input:
        model=ancient(plan.model_files),
        environment=ancient(plan.engine_environment or []),
    output:
        # Snakemake removes it when the last shard that needs it is done; then the server stops.
        ready=temp(layout.ready("{server}")),
    log:
        layout.log("servers", "{server}.log"),
    benchmark:
        layout.log("benchmarks", "serve.{server}.tsv")
    retries: 0
    conda:
        "../envs/pipeline.yaml"
    message:
        "Starting server {wildcards.server}"
    script:
        "../scripts/serve.py"


rule show_servers:
    """Print what each server would be started with, and start nothing: snakemake show_servers."""
    log:
        layout.log("servers", "show_servers.log"),
    retries: 0
    localrule: True
    conda:
        "../envs/pipeline.yaml"
    message:
        "What the servers would be started with"
    script:
        "../scripts/show_servers.py"
