# What all stages share: the validated configuration, the plan, wildcards, and the input functions.
# Needs: the configuration and the prompts file. Makes: nothing.
import sys

sys.path.insert(0, f"{workflow.current_basedir}/../scripts")

from shardmill import overrides
from shardmill.errors import UserError
from shardmill.planning import clear_lies, make_plan

# The command line's values come without types; jobs read the same `config`. As a module's they are in it already.
is_module = not workflow.modifier.is_main_snakefile()
overrides.merge(config, overrides.with_types(dict(config if is_module else workflow.config_settings.config)))

try:
    plan = make_plan(config)
    if workflow.is_main_process:
        for line in clear_lies(plan):
            print(f"shardmill: {line}", file=sys.stderr)
except UserError as error:
    sys.exit(f"shardmill: error: {error}")

layout = plan.layout


wildcard_constraints:
    shard=r"\d\d\d\d\d+",
    server=r"\d+",
    pool=r"\d+-\d+",


def get_index(wildcards):
    """The prompt index, for a shard that is to be made: a new index must not reach the finished ones.

    With `ancient()` Snakemake would not look at a shard's own params while the index is to be made.
    """
    return [layout.prompt_index] if wildcards.shard in plan.pending else []


def get_means(wildcards):
    """Servers and the canary's report, for a shard that still has something to generate; nothing for one that has not."""
    if wildcards.shard not in plan.in_need:
        return []
    canary = [] if plan.config.quality.canary.skip else [layout.canary]
    return [*map(layout.ready, plan.config.server_names), *canary]


def get_completions(wildcards):
    """Every shard's completions, or the proofs of the pools that hold them."""
    if plan.pools:
        return [*map(layout.pool_proof, plan.pools)]
    return [*map(layout.completions, plan.shards)]


def get_pool_means(wildcards):
    """What a pool with work builds on."""
    if wildcards.pool not in plan.open_pools:
        return []
    return [layout.prompt_index, layout.model_manifest]


def get_results(wildcards):
    """All that a finished run holds; of a pool, its shards."""
    if plan.awaits_prompts:
        checkpoints.fetch_prompts.get()  # raises until they are here; then Snakemake asks again
        plan.look_again()
    if plan.config.pools.only:
        return get_completions(wildcards)
    return [
        layout.dataset,
        layout.dataset_rejects,
        layout.manifest,
        *get_completions(wildcards),
        *layout.training_files(plan.config.output.training.formats),
        *([layout.report] if plan.config.monitor.report else []),
    ]
