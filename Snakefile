# Shardmill: a prompts file in, a verified and compressed dataset of LLM completions out.
# This file is the table of contents; README.md says how to run it, docs/architecture.md how it is built.
from snakemake.common.configfile import load_configfile
from snakemake.utils import min_version

min_version("9.27")

# A --configfile that names its own model stands alone; anything less is laid over the default configuration.
files = map(load_configfile, workflow.config_settings.configfiles)
if not any("source" in (file.get("model") or {}) for file in files):

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
include: "rules/planning.smk"
include: "rules/report.smk"
include: "rules/run.smk"


rule all:
    default_target: not is_module
    input:
        get_results,
