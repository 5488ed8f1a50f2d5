"""SGLang's launch command, from the configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..config import Config
from .base import ServerPlace

_KEY = "engine.sglang"


def launch_words(config: Config, place: ServerPlace, model: Path, name: str) -> list[tuple[str, Any, str]]:
    """Every flag of the launch as (name, value, config key that it comes from); None and False mean left out."""
    settings, template = config.engine.sglang, config.model.chat_template
    words: list[tuple[str, Any, str]] = [
        ("model-path", os.path.abspath(model), "model.source"),
        ("served-model-name", name, "model.source"),
        ("host", place.host, "servers.host"),
        ("port", place.port, "servers.port"),
        ("tp-size", max(1, len(place.gpus)), "servers.gpus_per_server"),
        ("nccl-port", settings.nccl_port + int(place.name), f"{_KEY}.nccl_port"),
        ("enable-metrics", True, _KEY),
        # A line for every request, and two a second for the supervisor's own, would bury the rest of the log.
        ("log-level-http", None if "log-level-http" in settings.arguments else "warning", _KEY),
        ("trust-remote-code", config.model.trust_remote_code, "model.trust_remote_code"),
        ("chat-template", os.path.abspath(template) if template else None, "model.chat_template"),
    ]
    for flag, field in _PLAIN:
        words.append((flag, getattr(settings, field), f"{_KEY}.{field}"))
    for flag, field in _SPECULATIVE:
        words.append((flag, getattr(settings.speculative, field), f"{_KEY}.speculative.{field}"))
    for flag, field in _MAMBA:
        words.append((flag, getattr(settings.mamba, field), f"{_KEY}.mamba.{field}"))
    words += [(flag, value, f"{_KEY}.arguments") for flag, value in settings.arguments.items()]
    # What is left out is not asked of this version: it may not know the flag, and need not.
    return [word for word in words if word[1] is not None and (word[1] is not False or word[2].endswith("arguments"))]


_PLAIN = (
    ("device", "device"),
    ("context-length", "context_length"),
    ("max-running-requests", "max_running_requests"),
    ("max-queued-requests", "max_queued_requests"),
    ("mem-fraction-static", "mem_fraction_static"),
    ("max-total-tokens", "max_total_tokens"),
    ("quantization", "quantization"),
    ("kv-cache-dtype", "kv_cache_dtype"),
    ("chunked-prefill-size", "chunked_prefill_size"),
    ("attention-backend", "attention_backend"),
    ("disable-radix-cache", "disable_radix_cache"),
    ("reasoning-parser", "reasoning_parser"),
    ("tool-call-parser", "tool_call_parser"),
    ("enable-deterministic-inference", "deterministic"),
    ("random-seed", "random_seed"),
    ("watchdog-timeout", "watchdog_timeout"),
    ("log-level", "log_level"),
    ("decode-log-interval", "decode_log_interval"),
)
_SPECULATIVE = (
    ("speculative-algorithm", "algorithm"),
    ("speculative-num-steps", "num_steps"),
    ("speculative-eagle-topk", "eagle_topk"),
    ("speculative-num-draft-tokens", "num_draft_tokens"),
    ("speculative-draft-model-path", "draft_model_path"),
)
_MAMBA = (
    ("mamba-radix-cache-strategy", "radix_cache_strategy"),
    ("mamba-full-memory-ratio", "full_memory_ratio"),
    ("max-mamba-cache-size", "max_cache_size"),
    ("mamba-ssm-dtype", "ssm_dtype"),
)


def server_environment(config: Config) -> dict[str, str]:
    """Environment variables of a server, beyond those it inherits."""
    environment = {
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",  # all of the model is on this machine; a lookup could only hang or change it
    }
    if config.engine.sglang.device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    return environment | config.engine.sglang.extra_environment
