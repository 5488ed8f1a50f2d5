# Servers: one inference server per GPU set.
# Needs: a model that can be read. Makes: servers/*.ready, each a lease: its removal stops the server.


rule serve:
    """Start a server under its supervisor; done once it has answered a real request."""
    input:
        model=ancient(plan.model_files),
    output:
        # Snakemake removes it when the last shard that needs it is done; then the server stops.
        ready=temp(layout.ready("{server}")),
    log:
        layout.log("servers", "{server}.log"),
    benchmark:
        layout.log("benchmarks", "serve.{server}.tsv")
    conda:
        "../envs/pipeline.yaml"
    message:
        "Starting server {wildcards.server}"
    script:
        "../scripts/serve.py"
