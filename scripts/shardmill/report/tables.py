"""The report's figures that are no plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from ..monitor.gpu import reason_names
from ..monitor.history import Minute, ServerHistory
from ..run_state import human_time
from .gather import RunData, without_passwords

# What a server's record says of its processes and files: of no use to a reader.
_OWN = frozenset("server supervisor launch_digest model_digest boot_id ready_at instance".split())


def facts(data: RunData) -> Iterator[tuple[str, str]]:
    """The figures at the top, as (label, value)."""
    prompts, snapshot = data.snapshot["prompts"], data.snapshot
    yield "of " + f"{prompts['total']:,} prompts have an outcome", f"{prompts['done']:,}"
    yield "answers", f"{prompts['accepted']:,}"
    yield (
        "rejects" + (f", and {prompts['unusable']:,} unusable lines" if prompts["unusable"] else ""),
        (f"{prompts['rejected']:,}"),
    )
    if data.hours:
        yield "of serving", human_time(data.hours * 3600)
        yield "tokens/s, all servers", f"{data.tokens_made / data.hours / 3600:,.0f}"
    if data.progress.accepted and (tokens := data.progress.usage.get("completion_tokens")):
        answers = sum(data.progress.finish_reasons.values())
        yield "tokens per answer", f"{tokens / answers:,.0f}" if answers else "-"
    if (eta := snapshot["eta"]) and eta["seconds"]:
        yield f"left ({human_time(eta['low'])} to {human_time(eta['high'])})", human_time(eta["seconds"])
    lasting = [alarm for alarm in data.alarms if alarm.kind != "down"]
    yield "alarms", f"{len(lasting):,}"


def server_rows(data: RunData) -> tuple[list[str], list[list[str]]]:
    """One row per server over the whole run: (column names, rows)."""
    servers = sorted(data.history.servers.values(), key=lambda server: (len(server.name), server.name))
    rates = {server.name: _busy_rate(server) for server in servers}
    known = [rate for rate in rates.values() if rate]
    median = statistics.median(known) if known else 0.0
    has_gpus = any(minute.gpus for server in servers for minute in server.minutes.values())
    names = [
        "server",
        "tok/s when busy",
        "of median",
        "tokens",
        "answers",
        "sent again",
        "ready",
        "running",
        "went down",
    ]
    names += ["SM clock", "power", "throttled by"] if has_gpus else []
    rows = []
    for server in servers:
        minutes = list(server.minutes.values())
        seconds = sum(minute.seconds for minute in minutes) or 1.0
        answers, _, _, again = data.history.jobs.servers.get(server.name, [0, 0, 0, 0])
        row = [
            server.name,
            f"{rates[server.name]:,.0f}",
            f"{rates[server.name] / median:.3f}" if median else "-",
            f"{server.completion_tokens:,.0f}",
            f"{answers:,}",
            f"{again:,}",
            f"{sum(minute.ready for minute in minutes) / seconds:.1%}",
            f"{sum(minute.running for minute in minutes) / seconds:.1f}",
            str(sum(event.kind == "down" for event in server.events)),
        ]
        rows.append(row + (_gpu_cells(minutes) if has_gpus else []))
    return names, rows


def _busy_rate(server: ServerHistory) -> float:
    """Tokens per second over the minutes in which it was ready and had work."""
    busy = [
        minute for minute in server.minutes.values() if minute.load >= 0.5 * (minute.capacity or 2) and minute.seconds
    ]
    seconds = sum(minute.seconds for minute in busy)
    return sum(minute.tokens for minute in busy) / seconds if seconds else 0.0


def _gpu_cells(minutes: list[Minute]) -> list[str]:
    def mean(column: str, unit: str) -> str:
        values = [value for minute in minutes if (value := minute.gpu(column)) is not None]
        return f"{statistics.fmean(values):,.0f} {unit}" if values else "-"

    bits = 0
    for minute in minutes:
        bits |= minute.reasons
    return [mean("sm_clock_mhz", "MHz"), mean("power_w", "W"), ", ".join(reason_names(bits)) or "-"]


def cost_rows(data: RunData) -> Iterator[tuple[str, str]]:
    """What the run took, as (what, how much)."""
    if not data.hours:
        return
    config, progress = data.config, data.progress
    yield "serving", f"{data.hours:,.2f} h, {data.server_hours:,.2f} server hours"
    if count := len(config.servers.gpus):
        yield "GPU hours", f"{data.hours * count:,.2f}"
    made, kept = data.tokens_made, progress.usage.get("completion_tokens", 0)
    yield "completion tokens made", f"{made:,.0f}"
    if made and data.is_finished:
        yield (
            "of them in the dataset",
            f"{kept:,.0f} ({min(1.0, kept / made):.1%}); the rest: rejects, retries, the canary, cut requests",
        )
    price, unit = config.monitor.price_per_hour, config.monitor.currency
    if price is None:
        yield "price", "set monitor.price_per_hour to see it"
        return
    paid = price * data.hours
    yield "price", f"{paid:,.2f} {unit} at {price:,.2f} {unit} per hour"
    if made:
        yield "per million completion tokens", f"{paid / made * 1e6:,.3f} {unit}"
    if accepted := data.snapshot["prompts"]["accepted"]:
        yield "per 1,000 answers", f"{paid / accepted * 1000:,.3f} {unit}"
    if (eta := data.snapshot["eta"]) and eta["seconds"]:
        more = [price * eta[key] / 3600 for key in ("seconds", "low", "high")]
        yield "still to come", f"{more[0]:,.2f} {unit} ({more[1]:,.2f} to {more[2]:,.2f})"


def provenance(data: RunData) -> Iterator[tuple[str, str]]:
    """Where the answers come from, as (what, value)."""
    config = data.config
    model = data.model or {}
    yield "model", config.model.source
    if digest := model.get("digest"):
        yield "model digest", digest
    if revision := model.get("revision"):
        yield "revision", revision
    yield "engine", config.engine.kind
    for name, info in sorted(data.servers_info.items()):
        yield f"server {name}", _brief(without_passwords({k: v for k, v in info.items() if k not in _OWN}))
    yield "thinking", {True: "on", False: "off", None: "the model has none"}[config.thinking.enabled]
    yield "sampling", _brief(config.sampling.model_dump())
    index = data.index
    if index:
        yield (
            "prompts",
            f"{index.get('path')}: {index.get('records', 0):,} records, {index.get('unusable', 0):,} unusable",
        )
        yield "prompts digest", index.get("digest", "")
    if manifest := data.manifest:
        yield "dataset", f"{manifest['dataset']['records']:,} records, sha256 {manifest['dataset']['sha256']}"
        yield "made by", f"Shardmill {manifest['shardmill']} on {manifest['host']}, Python {manifest['python']}"
    for begin, end in data.sessions[:20]:
        yield "served", f"{_local(begin)} to {_local(end)} ({human_time(end - begin)})"


def _local(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M %z")


def _brief(value: Any) -> str:
    """A setting or a server's facts on one line, long texts cut."""
    if not isinstance(value, dict):
        return str(value)[:200]
    shown = {key: part for key, part in value.items() if part not in (None, "", [], {})}
    return ", ".join(f"{key}: {str(part)[:120]}" for key, part in shown.items())[:1500]
