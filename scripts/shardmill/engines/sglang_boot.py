"""What a started SGLang server is, compared with what was asked for: it lowers limits without saying so aloud."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config
from ..files import sha256_file
from ..model.inventory import chat_template
from .base import BootReport, ServerPlace
from .openai import get_json

# /server_info is answered by the scheduler, which may be busy with its first prompts.
_TIMEOUT = 60.0
_LOWERED = re.compile(
    r"(max_running_requests is capped to .*|max_running_requests was reduced .*|Max running requests is reset to .*)"
)
_SILENT_CAP = 48  # what max_running_requests becomes with speculative decoding if nobody sets it
# Settings worth keeping, by SGLang's names. The api key is among the others and must never be kept.
_SETTINGS = (
    "model_path served_model_name revision quantization kv_cache_dtype dtype mem_fraction_static max_running_requests "
    "max_queued_requests chunked_prefill_size attention_backend sampling_backend tp_size dp_size device "
    "reasoning_parser tool_call_parser chat_template disable_radix_cache enable_deterministic_inference random_seed "
    "speculative_algorithm speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
    "speculative_draft_model_path mamba_radix_cache_strategy mamba_scheduler_strategy mamba_full_memory_ratio "
    "max_mamba_cache_size mamba_ssm_dtype watchdog_timeout nccl_port schedule_policy page_size sampling_defaults"
).split()


@dataclass(frozen=True)
class Boot:
    """What the server says of itself.

    Args:
        settings: all that /server_info shows. It holds the api key in clear: never to be stored.
        context: tokens of prompt and answer together.
        running: requests that can run at once; None if it does not say.
        lowered: the log's own words about lowered limits.
    """

    settings: dict[str, Any]
    context: int | None
    running: int | None
    lowered: tuple[str, ...]


def read_boot(place: ServerPlace, log_tail: str) -> Boot | None:
    """Ask a server; None if it does not answer."""
    info = get_json(place, "/server_info", timeout=_TIMEOUT)
    info = info if isinstance(info, dict) else get_json(place, "/get_server_info", timeout=_TIMEOUT)
    if not isinstance(info, dict):
        return None
    models = get_json(place, "/v1/models", timeout=_TIMEOUT)
    try:
        context = int(models["data"][0]["max_model_len"])
    except (TypeError, KeyError, IndexError, ValueError):
        context = None
    states = info.get("internal_states")
    states = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
    each = [state.get("effective_max_running_requests_per_dp") for state in states]
    running = sum(each) if each and all(isinstance(one, int) for one in each) else None
    # A cap on the state pool is resolved by the scheduler, and shows only in its state.
    resolved = {key: state[key] for state in states for key in ("max_mamba_cache_size",) if state.get(key)}
    lowered = tuple(dict.fromkeys(match.group(1).strip() for match in _LOWERED.finditer(log_tail)))
    return Boot(info | resolved, context, running, lowered)


def judge_boot(config: Config, boot: Boot, model: Path | None) -> BootReport:
    """What of the server is not as configured.

    Args:
        model: what it was launched with; None of an external server, of which only the run's own needs are checked.
    """
    errors, warnings = _needs_of_the_run(config, boot), []
    if model is not None:
        errors += _not_as_launched(config, boot, model)
        if lowered := _lowered_capacity(config, boot):
            asked = config.engine.sglang.max_running_requests is not None
            (errors if asked and config.engine.sglang.on_reduced_capacity == "error" else warnings).append(lowered)
    return BootReport(_facts(config, boot, model), tuple(errors), tuple(warnings), boot.running)


def _facts(config: Config, boot: Boot, model: Path | None) -> dict[str, Any]:
    facts = {key: boot.settings[key] for key in _SETTINGS if boot.settings.get(key) is not None}
    facts |= {
        "version": boot.settings.get("version"),
        "context_length": boot.context,
        "max_total_tokens": boot.settings.get("max_total_num_tokens"),
        "max_input_tokens": boot.settings.get("max_req_input_len"),
        "effective_max_running_requests": boot.running,
        "lowered": list(boot.lowered),
    }
    if model is not None:
        facts["chat_template_sha256"] = _template_hash(config, model)
    return facts


def _template_hash(config: Config, model: Path) -> str | None:
    """SHA-256 of the chat template that the server applies."""
    try:
        if config.model.chat_template:
            return sha256_file(config.model.chat_template)
        found = chat_template(model, os.listdir(model)) if model.is_dir() else None
    except OSError:
        return None
    return found["sha256"] if found else None


def _needs_of_the_run(config: Config, boot: Boot) -> list[str]:
    """What this run cannot do with the server, whoever started it."""
    found, most = [], config.sampling.max_tokens
    if config.thinking.enabled and not boot.settings.get("reasoning_parser"):
        found.append(
            "thinking.enabled is true, but the server has no reasoning parser, so thoughts would stand in the answers "
            "(--reasoning-parser, engine.sglang.reasoning_parser)"
        )
    if boot.context is not None and most >= boot.context:
        found.append(
            f"sampling.max_tokens is {most}, but the server's context is {boot.context} tokens: every request would "
            "be refused; write less"
        )
    pool = boot.settings.get("max_total_num_tokens")
    if isinstance(pool, int) and most >= pool and not (boot.context and most >= boot.context):
        found.append(
            f"sampling.max_tokens is {most}, but the KV cache holds only {pool} tokens: long answers would be cut off "
            "without a word; write less, or give the cache more memory (engine.sglang.mem_fraction_static)"
        )
    if boot.settings.get("allow_auto_truncate"):
        found.append("the server was started with --allow-auto-truncate, which cuts off the end of long prompts")
    return found


def _not_as_launched(config: Config, boot: Boot, model: Path) -> list[str]:
    """Where the server is not what was launched."""
    settings, given = config.engine.sglang, boot.settings
    found = []

    def check(what: str, asked: Any, got: Any) -> None:
        if asked is not None and asked != got:
            found.append(f"it has {what} {got!r}, not {asked!r} as configured")

    check("the model", os.path.abspath(model), os.path.abspath(str(given.get("model_path"))))
    check("the reasoning parser", settings.reasoning_parser, given.get("reasoning_parser"))
    check("the tool call parser", settings.tool_call_parser, given.get("tool_call_parser"))
    wanted = settings.context_length
    if wanted is not None and boot.context is not None and boot.context < wanted:
        found.append(f"its context is {boot.context} tokens, fewer than engine.sglang.context_length ({wanted})")
    if settings.speculative.algorithm and not given.get("speculative_algorithm"):
        found.append("speculative decoding was asked for (engine.sglang.speculative), but is off")
    if settings.deterministic and not given.get("enable_deterministic_inference"):
        found.append("deterministic inference was asked for (engine.sglang.deterministic), but is off")
    return found


def _lowered_capacity(config: Config, boot: Boot) -> str | None:
    """That fewer requests run at once than was asked for, and why."""
    settings, running = config.engine.sglang, boot.running
    asked = settings.max_running_requests
    if running is None or (asked is not None and running >= asked):
        return None
    if asked is None:
        if not settings.speculative.algorithm or running > _SILENT_CAP:
            return None
        return (
            f"it runs {running} requests at once: SGLang lowers this to {_SILENT_CAP} with speculative decoding unless "
            "it is set; set engine.sglang.max_running_requests"
        )
    return f"it runs {running} requests at once, not {asked} (engine.sglang.max_running_requests): {_cause(boot)}"


def _cause(boot: Boot) -> str:
    if boot.lowered:
        return f"its log says: {' | '.join(boot.lowered)}"
    if slots := boot.settings.get("max_mamba_cache_size"):
        return (
            f"the state pool of this hybrid model has {slots} slots, of which each request takes several; raise "
            "engine.sglang.mamba.full_memory_ratio, halve the states with mamba.ssm_dtype: bfloat16, or set "
            "disable_radix_cache, with which a request takes one slot"
        )
    pool = boot.settings.get("max_total_num_tokens")
    return f"the KV cache holds {pool} tokens; raise engine.sglang.mem_fraction_static, or ask for fewer requests"
