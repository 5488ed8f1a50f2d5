# Shardmill: a prompts file in, a verified and compressed dataset of LLM completions out.
# This file is the table of contents; README.md says how to run it, docs/architecture.md how it is built.
from snakemake.utils import min_version

min_version("9.27")

# A --configfile that names its own model stands alone; anything less is laid over the default configuration.
if not workflow.config_settings.configfiles or "source" not in (
    config.get("model") or {}
):

    configfile: "config.yaml"


include: "rules/common.smk"
include: "rules/prompts.smk"
include: "rules/model.smk"
include: "rules/servers.smk"
include: "rules/quality.smk"
include: "rules/completions.smk"
include: "rules/pools.smk"
include: "rules/dataset.smk"
include: "rules/training.smk"
include: "rules/run.smk"


rule all:
    default_target: True
    input:
        get_results,
