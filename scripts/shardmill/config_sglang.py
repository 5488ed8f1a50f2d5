"""Settings of the SGLang servers, and which of them cannot work together."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field

from .config_section import Section

# The version that `environment: build` makes unless another one is asked for.
DEFAULT_VERSION = "0.5.23"
Severity = Literal["error", "warn"]


class Speculative(Section):
    """Speculative decoding: faster, and with the same distribution of answers."""

    algorithm: str | None = Field(
        None, description="`EAGLE` (also for a model's own MTP head), `EAGLE3`, `NGRAM`, ...; left out: off."
    )
    num_steps: int | None = Field(None, ge=1, description="Draft steps per verification.")
    eagle_topk: int | None = Field(None, ge=1, description="Branches per draft step; 1 is a chain.")
    num_draft_tokens: int | None = Field(
        None, ge=1, description="Tokens verified at once; `num_steps` + 1 for a chain (`eagle_topk: 1`)."
    )
    draft_model_path: str | None = Field(
        None, description="The draft model; left out where the model brings its own MTP head, as Qwen3.5 and 3.6 do."
    )


class Mamba(Section):
    """State pool of hybrid models (linear attention layers beside full ones). It too limits the running requests."""

    radix_cache_strategy: str | None = Field(
        None, description="`no_buffer` or `extra_buffer`; called mamba-scheduler-strategy by 0.5.11."
    )
    full_memory_ratio: float | None = Field(
        None, gt=0, description="Memory of the states over memory of the KV cache; the engine's default is 0.9."
    )
    max_cache_size: int | None = Field(None, ge=1, description="Slots of the state pool, in place of the ratio.")
    ssm_dtype: str | None = Field(
        None, description="`float32`, `bfloat16` or `float16`; left out: the model's own. Halving it doubles the slots."
    )


class SGLang(Section):
    """Settings of the SGLang servers. What is left out is left to SGLang, unless it says otherwise here."""

    environment: Literal["build"] = Field(
        "build",
        description="`build`: the pipeline makes SGLang's environment itself, from exact pins, on local disk. "
        "Not used where `python` names one that exists.",
    )
    environment_folder: str | None = Field(
        None,
        description="Where it is made; left out: below ~/.cache, or below /var/tmp where the home is a network disk.",
    )
    python: str | None = Field(
        None, min_length=1, description="Python that has SGLang already (the file, or its virtual environment)."
    )
    version: str | None = Field(
        None,
        pattern=r"^[0-9][0-9A-Za-z.+]*$",
        description=f"Version that the servers must have; left out: `python`'s, or {DEFAULT_VERSION} if built here.",
    )
    context_length: int | None = Field(
        None, ge=64, description="Tokens of prompt and answer together; left out: the model's own."
    )
    max_running_requests: int | None = Field(
        None,
        ge=1,
        description="Requests that run at once on one server. Set it: left out, it silently becomes 48 with "
        "speculative decoding.",
    )
    on_reduced_capacity: Severity = Field(
        "error",
        description="What to do about a server that runs fewer requests at once than asked for: `error` (it does not "
        "become ready) or `warn`.",
    )
    max_queued_requests: int | None = Field(
        None, ge=1, description="Requests that may wait inside a server; more are refused with 503."
    )
    mem_fraction_static: float | None = Field(
        None, gt=0, lt=1, description="Share of GPU memory for weights and caches; left out: SGLang's own estimate."
    )
    max_total_tokens: int | None = Field(
        None, ge=1, description="Tokens of the KV cache; left out: as many as the memory holds."
    )
    quantization: str | None = Field(
        None, description="`fp8`, ...; left out: as the model's files say (an FP8 model needs nothing here)."
    )
    kv_cache_dtype: str | None = Field(None, description="`fp8_e4m3`, `bf16`, ...; left out: `auto`.")
    chunked_prefill_size: int | None = Field(
        None, description="Prompt tokens read in one step; -1: a prompt in one go; left out: by GPU memory."
    )
    attention_backend: str | None = Field(None, description="`trtllm_mha`, `flashinfer`, `fa3`, ...; left out: by GPU.")
    disable_radix_cache: bool = Field(
        False,
        description="No reuse of common prefixes. For prompts that share nothing it costs nothing, and on a hybrid "
        "model it leaves room for 3 to 5 times as many running requests.",
    )
    reasoning_parser: str | None = Field(
        None, description="`qwen3`, ...: takes the thought out of the answer. Needed with `thinking.enabled`."
    )
    tool_call_parser: str | None = Field(None, description="`qwen3_coder`, ...: turns tool calls into `tool_calls`.")
    speculative: Speculative = Field(default_factory=Speculative, description="Speculative decoding.")
    mamba: Mamba = Field(default_factory=Mamba, description="Hybrid models.")
    deterministic: bool = Field(
        False,
        description="Same seed, same answer. Without it SGLang ignores seeds; with it, it is slower and has no "
        "speculative decoding on many GPUs.",
    )
    random_seed: int | None = Field(None, ge=0, description="Seed of the server; left out: another one at each start.")
    watchdog_timeout: float = Field(
        300, gt=0, description="Seconds for one step of the engine, after which it kills itself."
    )
    nccl_port: int = Field(
        28500, ge=1024, le=65535, description="Port for NCCL's rendezvous of server 0; server N takes this port + N."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Of the engine's log. Warnings about lowered limits are read from it."
    )
    decode_log_interval: int | None = Field(
        None, ge=1, description="Decode steps between two lines of its log; its gauges are as old as that."
    )
    device: Literal["cuda", "cpu"] | None = Field(None, description="Left out: by what there is.")
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="More launch flags by name, without dashes: `{page-size: 64, enable-mixed-chunk: true}`. Checked "
        "against the flags of the installed version.",
    )
    extra_environment: dict[str, str] = Field(
        default_factory=dict, description="More environment variables of the servers, such as `SGLANG_...`."
    )

    @property
    def is_built(self) -> bool:
        """Whether the pipeline makes the environment."""
        return self.python is None

    @property
    def build_version(self) -> str:
        return self.version or DEFAULT_VERSION


def sglang_conflicts(config: Any) -> list[tuple[str, str]]:
    """Combinations that cannot work, as (key to change, what is wrong and what to write)."""
    if config.engine.kind != "sglang":
        return []
    key, settings, servers = "engine.sglang", config.engine.sglang, config.servers
    found: list[tuple[str, str]] = []
    if not servers.gpus and servers.count is None:
        found.append(("servers.gpus", "is empty; write the GPUs to use, such as [0, 1, 2, 3, 4, 5, 6]"))
    count = config.server_count
    ports, nccl = range(servers.port, servers.port + count), range(settings.nccl_port, settings.nccl_port + count)
    if nccl.stop - 1 > 65535:
        found.append((f"{key}.nccl_port", f"{nccl.start} leaves no room for {count} ports; write a lower one"))
    elif nccl.start < ports.stop and ports.start < nccl.stop:
        text = f"the ports {nccl.start} to {nccl.stop - 1} are among those of `servers.port` ({ports.start} to "
        found.append((f"{key}.nccl_port", f"{text}{ports.stop - 1}); write another one"))
    if config.thinking.enabled and not settings.reasoning_parser:
        text = (
            "is left out although `thinking.enabled` is true: thoughts would stand in the answers; write `qwen3`, say"
        )
        found.append((f"{key}.reasoning_parser", text))
    found += _speculative_conflicts(f"{key}.speculative", settings.speculative)
    found += [(f"{key}.arguments", problem) for problem in argument_problems(settings.arguments)]
    return found


def _speculative_conflicts(key: str, settings: Speculative) -> list[tuple[str, str]]:
    if settings.algorithm is None:
        given = [name for name, value in settings.model_dump().items() if value is not None]
        return [(f"{key}.algorithm", f"is left out although `{given[0]}` is set; write `EAGLE`, say")] if given else []
    if settings.algorithm.upper() == "MTP":
        return [(f"{key}.algorithm", "SGLang knows no `MTP`; write `EAGLE`, which uses the model's own MTP head")]
    steps, tokens = settings.num_steps, settings.num_draft_tokens
    if settings.eagle_topk == 1 and steps and tokens and tokens != steps + 1:
        text = f"is {tokens}, but a chain (`eagle_topk: 1`) of {steps} steps verifies {steps + 1} tokens; write that"
        return [(f"{key}.num_draft_tokens", text)]
    return []


# Flags that a setting of the configuration stands for: never under `arguments` as well.
FLAGS_OF_KEYS = {
    "model-path": "model.source",
    "model": "model.source",
    "host": "servers.host",
    "port": "servers.port",
    "tp-size": "servers.gpus_per_server",
    "tensor-parallel-size": "servers.gpus_per_server",
    "base-gpu-id": "servers.gpus",
    "chat-template": "model.chat_template",
    "trust-remote-code": "model.trust_remote_code",
    "nccl-port": "engine.sglang.nccl_port",
    "context-length": "engine.sglang.context_length",
    "max-running-requests": "engine.sglang.max_running_requests",
    "max-queued-requests": "engine.sglang.max_queued_requests",
    "mem-fraction-static": "engine.sglang.mem_fraction_static",
    "max-total-tokens": "engine.sglang.max_total_tokens",
    "quantization": "engine.sglang.quantization",
    "kv-cache-dtype": "engine.sglang.kv_cache_dtype",
    "chunked-prefill-size": "engine.sglang.chunked_prefill_size",
    "attention-backend": "engine.sglang.attention_backend",
    "disable-radix-cache": "engine.sglang.disable_radix_cache",
    "reasoning-parser": "engine.sglang.reasoning_parser",
    "tool-call-parser": "engine.sglang.tool_call_parser",
    "speculative-algorithm": "engine.sglang.speculative.algorithm",
    "speculative-num-steps": "engine.sglang.speculative.num_steps",
    "speculative-eagle-topk": "engine.sglang.speculative.eagle_topk",
    "speculative-num-draft-tokens": "engine.sglang.speculative.num_draft_tokens",
    "speculative-draft-model-path": "engine.sglang.speculative.draft_model_path",
    "mamba-radix-cache-strategy": "engine.sglang.mamba.radix_cache_strategy",
    "mamba-scheduler-strategy": "engine.sglang.mamba.radix_cache_strategy",
    "mamba-full-memory-ratio": "engine.sglang.mamba.full_memory_ratio",
    "max-mamba-cache-size": "engine.sglang.mamba.max_cache_size",
    "mamba-ssm-dtype": "engine.sglang.mamba.ssm_dtype",
    "enable-deterministic-inference": "engine.sglang.deterministic",
    "random-seed": "engine.sglang.random_seed",
    "watchdog-timeout": "engine.sglang.watchdog_timeout",
    "log-level": "engine.sglang.log_level",
    "decode-log-interval": "engine.sglang.decode_log_interval",
    "device": "engine.sglang.device",
}
# Flags that Shardmill sets, or must not be set at all, and why.
_FORBIDDEN = {
    "api-key": "Shardmill makes a key for each run, and passes it where no other user of the machine can read it",
    "admin-api-key": "Shardmill makes a key for each run",
    "config": "write its settings here instead",
    "served-model-name": "Shardmill sets it",
    "enable-metrics": "it is always on",
    "allow-auto-truncate": "it cuts off the end of long prompts without saying so",
    "nnodes": "a server must lie within one machine",
    "node-rank": "a server must lie within one machine",
    "skip-server-warmup": "a server that was not warmed up is slow for its first requests",
}
_FLAG_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


def argument_problems(arguments: dict[str, Any]) -> list[str]:
    """What is wrong with the pass-through flags, whatever the version of SGLang."""
    found = []
    for name, value in arguments.items():
        plain = name.removeprefix("--").replace("_", "-")
        if name != plain:
            found.append(f"`{name}`: write flags without leading dashes and with `-` for `_`: `{plain}`")
        elif not _FLAG_NAME.fullmatch(name):
            found.append(f"`{name}` is no name of a flag")
        elif name in FLAGS_OF_KEYS:
            found.append(f"`{name}` has its own setting; write `{FLAGS_OF_KEYS[name]}`")
        elif name in _FORBIDDEN:
            found.append(f"`{name}` cannot be set: {_FORBIDDEN[name]}; leave it out")
        elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
            found.append(f"`{name}` holds a list of what is neither text nor number")
    return found
