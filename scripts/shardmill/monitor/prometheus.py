"""A snapshot in Prometheus' text format (version 0.0.4), for scraping beside the servers' own metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_RUN = (
    ("prompts", "gauge", "Usable prompts of the run.", ("prompts", "total")),
    ("prompts_done", "gauge", "Prompts with an outcome.", ("prompts", "done")),
    ("prompts_accepted", "gauge", "Prompts with an accepted answer.", ("prompts", "accepted")),
    ("prompts_rejected", "gauge", "Prompts that were rejected.", ("prompts", "rejected")),
    ("requests_in_flight", "gauge", "Requests that jobs wait for.", ("prompts", "in_flight")),
    ("shards", "gauge", "Shards of the run.", ("shards", "total")),
    ("shards_done", "gauge", "Finished shards.", ("shards", "done")),
    ("eta_seconds", "gauge", "Seconds left.", ("eta", "seconds")),
    ("eta_low_seconds", "gauge", "Lower end of the range that the seconds left lie in.", ("eta", "low")),
    ("eta_high_seconds", "gauge", "Upper end of that range.", ("eta", "high")),
    ("requests_per_second", "gauge", "Answers per second over five minutes.", ("rates", "requests")),
    ("retries_per_second", "gauge", "New attempts per second over five minutes.", ("rates", "retries")),
    ("sent_again_per_second", "gauge", "Requests sent again after faults, per second.", ("rates", "sent_again")),
    ("latency_p50_seconds", "gauge", "Median seconds of a request.", ("rates", "latency_p50")),
    ("latency_p95_seconds", "gauge", "95 % quantile of the seconds of a request.", ("rates", "latency_p95")),
    ("token_check_ratio", "gauge", "Tokens that jobs received, by those that servers made.", ("check", "ratio")),
    ("disk_free_bytes", "gauge", "Free space for results.", ("room", "free")),
    ("disk_need_bytes", "gauge", "Space that the rest of the run will need.", ("room", "need")),
    ("memory_available_bytes", "gauge", "Memory left on this machine.", ("room", "memory_available")),
)
_SERVER = (
    ("server_running", "Requests that run in the server.", "running"),
    ("server_queued", "Requests that wait in the server.", "queued"),
    ("server_capacity", "Requests that can run at once.", "capacity"),
    ("server_completion_tokens_per_second", "Completion tokens per second over a minute.", "completion_rate"),
    ("server_prompt_tokens_per_second", "Prompt tokens per second over a minute.", "prompt_rate"),
    ("server_of_peers", "Tokens per second by the median of the other servers, over ten minutes.", "of_peers"),
    ("server_acceptance_length", "Tokens per verification of speculative decoding.", "acceptance_length"),
    ("server_token_usage", "Share of the token pool in use.", "token_usage"),
    ("server_restarts", "Restarts of the engine by its supervisor.", "restarts"),
)
_GPU = (
    ("gpu_use_ratio", "use", 0.01),
    ("gpu_memory_bytes", "memory_gb", 1e9),
    ("gpu_sm_clock_hertz", "sm_clock_mhz", 1e6),
    ("gpu_power_watts", "power_w", 1.0),
    ("gpu_temperature_celsius", "temperature_c", 1.0),
)


def metrics_text(snapshot: dict[str, Any]) -> str:
    """The text that /metrics gives."""
    return "".join(line + "\n" for line in _lines(snapshot))


def _lines(snapshot: dict[str, Any]) -> Iterator[str]:
    run = {"run": snapshot["run"]}
    for name, kind, about, (section, key) in _RUN:
        yield from _family(name, kind, about, [(run, (snapshot[section] or {}).get(key))])
    yield from _family("running", "gauge", "1 while the run is live.", [(run, float(snapshot["state"] == "running"))])
    verdicts = [({**run, "verdict": name}, count) for name, count in sorted(snapshot["verdicts"].items())]
    yield from _family("verdicts", "gauge", "Judged answers by verdict.", verdicts)
    servers = snapshot["servers"]
    for name, about, key in _SERVER:
        yield from _family(name, "gauge", about, [({**run, "server": s["name"]}, s[key]) for s in servers])
    ready = [({**run, "server": s["name"]}, float(s["state"] == "ready")) for s in servers]
    yield from _family("server_ready", "gauge", "1 while the server takes requests.", ready)
    gpus = [({**run, "server": s["name"], "gpu": gpu["gpu"]}, gpu) for s in servers for gpu in s["gpus"]]
    for name, key, unit in _GPU:
        values = [(labels, None if gpu[key] is None else gpu[key] * unit) for labels, gpu in gpus]
        yield from _family(name, "gauge", "By NVML.", values)
    throttled = [({**labels, "reason": reason}, 1.0) for labels, gpu in gpus for reason in gpu["throttled_by"]]
    yield from _family("gpu_throttled", "gauge", "1 for each reason that slows the clocks.", throttled)
    raised = [({**run, "kind": a["kind"], "server": a["server"], "level": a["level"]}, 1.0) for a in snapshot["alarms"]]
    yield from _family("alarm", "gauge", "1 for each alarm that lasts.", raised)


def _family(name: str, kind: str, about: str, values: list[tuple[dict[str, str], Any]]) -> Iterator[str]:
    shown = [(labels, value) for labels, value in values if value is not None]
    if not shown:
        return
    yield f"# HELP shardmill_{name} {about}"
    yield f"# TYPE shardmill_{name} {kind}"
    for labels, value in shown:
        text = ",".join(f'{key}="{_escape(part)}"' for key, part in labels.items())
        yield f"shardmill_{name}{{{text}}} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
