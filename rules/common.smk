# What all stages share: the validated configuration, the plan, wildcards, and the input functions.
# Needs: the configuration and the prompts file. Makes: nothing.
import sys

sys.path.insert(0, f"{workflow.current_basedir}/../scripts")

from shardmill import overrides
from shardmill.errors import UserError
from shardmill.planning import clear_lies, make_plan

# The command line's values come without types; jobs read the same `config`.
overrides.merge(config, overrides.with_types(dict(workflow.config_settings.config)))

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


def get_servers(wildcards):
    """Readiness files for a shard that still has something to generate, none for one that has not."""
    return [layout.ready(name) for name in plan.config.server_names] if needs_servers(wildcards.shard) else []


def get_canary(wildcards):
    """The canary's report, for a shard that still has something to generate."""
    return [layout.canary] if needs_servers(wildcards.shard) and not plan.config.quality.canary.skip else []


def get_completions(wildcards):
    """Every shard's files."""
    return [make(shard) for shard in plan.shards for make in (layout.completions, layout.rejects, layout.stats)]


def get_results(wildcards):
    """All that a finished run holds."""
    return [
        layout.dataset,
        layout.dataset_rejects,
        layout.manifest,
        *map(layout.completions, plan.shards),
    ]


def needs_servers(shard):
    return shard in plan.unanswered
