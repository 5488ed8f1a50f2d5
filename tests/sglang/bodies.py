"""The JSON and text bodies of SGLang 0.5.23 and 0.5.11, as the real servers send them.

0.5.23's were read off the real server on CPU (test_standin_against_real.py compares them); 0.5.11's off its source.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from .answers import EOS, Answer, prompt_token_ids

_ROLES = ("system", "assistant", "tool", "function", "developer", "latest_reminder", "root")


@dataclass
class Load:
    """What the server is doing, at `time` (Unix seconds)."""

    time: float
    running: int
    waiting: int
    waiting_tokens: int
    held_tokens: int
    pool: int
    capacity: int
    throughput: float
    prompt_tokens: int
    decode_tokens: int
    accept_length: float | None
    accept_rate: float | None


@dataclass
class Counters:
    """Totals since the start, moved when a request finishes."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


def error(message: str, kind: str, code: int) -> dict[str, Any]:
    """SGLang's error body."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


def invalid(kind: str, where: str, message: str) -> dict[str, Any]:
    """Error body of a request that is not what the endpoint takes; the real one adds file and line of its source."""
    return error(
        f"1 validation error:\n  {{'type': '{kind}', 'loc': ({where}), 'msg': '{message}'}}\n", "Bad Request", 400
    )


def check_request(body: Any) -> dict[str, Any] | None:
    """The error body for a chat request that SGLang refuses whatever its length; None if it is in order."""
    if not isinstance(body, dict):
        return invalid("model_attributes_type", "'body',", "Input should be a valid dictionary or object")
    messages = body.get("messages")
    if messages is None:
        return invalid("missing", "'body', 'messages'", "Field required")
    if not isinstance(messages, list):
        return invalid("list_type", "'body', 'messages'", "Input should be a valid list")
    if not messages:
        return error("Messages cannot be empty.", "BadRequestError", 400)
    for i, message in enumerate(messages):
        role = str(message.get("role")).lower() if isinstance(message, dict) else None
        if role != "user" and role not in _ROLES:
            return invalid(
                "value_error", f"'body', 'messages', {i}, 'role'", f"Value error, role must be one of {_ROLES}."
            )
        if role == "user" and not isinstance(message.get("content"), str | list):
            return invalid("string_type", f"'body', 'messages', {i}, 'content'", "Input should be a valid string")
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    if most is not None and (not isinstance(most, int) or isinstance(most, bool)):
        return invalid("int_parsing", "'body', 'max_tokens'", "Input should be a valid integer")
    if most is not None and most < 0:
        return error(f"max_new_tokens must be at least 0, got {most}.", "BadRequestError", 400)
    heat = body.get("temperature")
    if heat is not None and (not isinstance(heat, int | float) or heat < 0):
        return error(f"temperature must be a non-negative finite number, got {heat}.", "BadRequestError", 400)
    if body.get("stream") or body.get("n", 1) not in (None, 1):
        return error("The stand-in offers neither stream nor n > 1.", "BadRequestError", 400)
    return None


def check_length(prompt: int, most: int | None, context: int) -> dict[str, Any] | None:
    """The error body for a prompt that does not fit the context, alone or with the tokens asked for."""
    if prompt >= context:
        text = f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
        return error(text, "BadRequestError", 400)
    if most is not None and prompt + most > context:
        text = (
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {prompt + most} tokens: {prompt} tokens from the input messages and {most} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within the "
            "limit."
        )
        return error(text, "BadRequestError", 400)
    return None


def chat(
    version: str, rid: str, request: dict[str, Any], answer: Answer, *, prompt: int, separate: bool
) -> dict[str, Any]:
    """Body of a finished chat completion. `separate`: there is a reasoning parser and the request wants it used."""
    new = version != "0.5.11"
    content: str | None = answer.content if separate else answer.raw
    reasoning = answer.reasoning if separate else None
    if not content and not new:
        content = None
    message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + answer.completion_tokens,
        "completion_tokens": answer.completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": answer.reasoning_tokens,
    }
    matched = EOS if answer.finish == "stop" else None
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": answer.finish,
        "matched_stop": matched,
    }
    metadata: dict[str, Any] = {"weight_version": "default"}
    if new:
        thought = answer.reasoning_tokens
        usage["completion_tokens_details"] = {"reasoning_tokens": thought} if thought else None
        metadata["weight_versions"] = [{"version": "default", "start": 0, "end": answer.completion_tokens}]
        if request.get("return_token_ids"):
            choice["prompt_token_ids"] = prompt_token_ids(prompt)
            choice["response_token_ids"] = answer.token_ids
    else:
        message["tool_calls"] = None
    return {
        "id": rid,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.get("model") or "default",
        "choices": [choice],
        "usage": usage,
        "metadata": metadata,
    }


def loads(version: str, load: Load, now: float) -> dict[str, Any]:
    """/v1/loads. `now` is the time of the answer, `load.time` that of the reading."""
    one: dict[str, Any] = {"timestamp": load.time} if version != "0.5.11" else {}
    one |= {
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_used_tokens": load.held_tokens,
        "num_total_tokens": load.held_tokens + load.waiting_tokens,
        "max_total_num_tokens": load.pool,
        "max_running_requests": load.capacity,
        "token_usage": round(load.held_tokens / load.pool, 4),
        "gen_throughput": round(load.throughput, 2),
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "memory": {"weight_gb": 27.0, "kv_cache_gb": 60.0, "graph_gb": 2.0, "token_capacity": load.pool},
        "queues": {"waiting": load.waiting, "grammar": 0, "paused": 0, "retracted": 0},
    }
    if load.accept_length is not None:
        one["speculative"] = {"accept_length": load.accept_length, "accept_rate": load.accept_rate}
    body: dict[str, Any] = {"timestamp": datetime.fromtimestamp(now, UTC).isoformat(), "version": version}
    if version != "0.5.11":
        one["num_waiting_uncached_tokens"] = load.waiting_tokens
        one["num_active_tokens"] = load.held_tokens
        return body | {"accelerator": None, "num_accelerators": 1, "loads": [one]}
    total = load.running + load.waiting
    one["num_total_reqs"] = total
    aggregate = {
        "total_running_reqs": load.running,
        "total_waiting_reqs": load.waiting,
        "total_reqs": total,
        "total_used_tokens": load.held_tokens,
        "total_tokens": one["num_total_tokens"],
        "avg_token_usage": one["token_usage"],
        "avg_throughput": one["gen_throughput"],
        "avg_utilization": 0.0,
    }
    return body | {"dp_rank_count": 1, "loads": [one], "aggregate": aggregate}


def get_load(load: Load) -> list[dict[str, Any]]:
    """/get_load of 0.5.11 (gone in 0.5.23)."""
    one = {
        "dp_rank": 0,
        "num_reqs": load.running + load.waiting,
        "num_waiting_reqs": load.waiting,
        "num_tokens": load.held_tokens + load.waiting_tokens,
        "num_pending_tokens": load.waiting_tokens,
        "ts_tic": load.time,
    }
    return [one]


def server_info(version: str, settings: dict[str, Any], load: Load, max_input: int) -> dict[str, Any]:
    """/server_info: every launch setting (the API key in clear, as the real one), sizes, and the scheduler's state."""
    state = settings | {
        "effective_max_running_requests_per_dp": load.capacity,
        "last_gen_throughput": load.throughput,
        "memory_usage": {"weight": 27.0, "kvcache": 60.0, "token_capacity": load.pool},
    }
    if load.accept_length is not None and load.decode_tokens:
        state["avg_spec_accept_length"] = load.accept_length
    return settings | {
        "status": "ready",
        "max_total_num_tokens": load.pool,
        "max_req_input_len": max_input,
        "internal_states": [state],
        "version": version,
    }


def model_info(settings: dict[str, Any]) -> dict[str, Any]:
    """/model_info: what the two versions have in common."""
    return {
        "model_path": settings["model_path"],
        "tokenizer_path": settings["tokenizer_path"],
        "is_generation": True,
        "preferred_sampling_params": settings.get("preferred_sampling_params"),
        "weight_version": settings.get("weight_version"),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
    }


def models(name: str, created: int, context: int) -> dict[str, Any]:
    """/v1/models."""
    one = {"id": name, "object": "model", "created": created, "owned_by": "sglang", "root": name, "parent": None}
    return {"object": "list", "data": [one | {"max_model_len": context}]}


def metrics(version: str, name: str, load: Load, counters: Counters) -> str:
    """/metrics in Prometheus' text format: the gauges and counters that say how a server is doing."""
    model = name.replace("\\", r"\\").replace('"', r"\"")
    ranks = f'engine_type="unified",model_name="{model}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    front = f'engine_type="unified",is_streaming="false",model_name="{model}"'
    gauges = {
        "num_running_reqs": load.running,
        "num_queue_reqs": load.waiting,
        "num_used_tokens": load.held_tokens,
        "token_usage": load.held_tokens / load.pool,
        "max_total_num_tokens": load.pool,
        "gen_throughput": load.throughput,
        "spec_accept_length": load.accept_length or 0.0,
        "spec_accept_rate": load.accept_rate or 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "num_retracted_reqs": 0,
    }
    lines = []
    for key, value in gauges.items():
        lines += [f"# TYPE sglang:{key} gauge", f"sglang:{key}{{{ranks}}} {float(value)}"]
    lines.append("# TYPE sglang:realtime_tokens_total counter")
    modes = {"prefill_compute": load.prompt_tokens, "decode": load.decode_tokens, "prefill_cache": 0}
    lines += [f'sglang:realtime_tokens_total{{{ranks},mode="{mode}"}} {float(value)}' for mode, value in modes.items()]
    totals = {
        "prompt_tokens_total": (front, counters.prompt_tokens),
        "generation_tokens_total": (front, counters.generation_tokens),
        "num_requests_total": (front, counters.requests),
        "num_aborted_requests_total": (f'engine_type="unified",model_name="{model}"', counters.aborted),
    }
    for key, (labels, value) in totals.items():
        if value:  # the real one shows a counter once it has moved
            lines += [f"# TYPE sglang:{key} counter", f"sglang:{key}{{{labels}}} {float(value)}"]
    return "\n".join(lines) + "\n"
