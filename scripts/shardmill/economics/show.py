"""A forecast and a calibration as a person reads them."""

from __future__ import annotations

from typing import Any

from ..config import Config
from ..model.show import human_bytes
from ..run_state import human_time
from .estimate import Estimate
from .forecast import Forecast, Room

BAR = 40  # characters of the longest bar


def describe(config: Config, forecast: Forecast) -> str:
    """The forecast as text of several lines."""
    tokens = forecast.prompts_left * forecast.tokens_each.value
    lines = [
        f"run {config.run.name}: {forecast.prompts:,} prompts in {forecast.shards:,} shards, "
        f"{forecast.pending:,} shards to make ({forecast.prompts_left:,} prompts)",
        f"tokens:  {_count(tokens)} to generate, {forecast.tokens_each.value:,.0f} each "
        f"({forecast.tokens_each.source})",
    ]
    if forecast.rate is None or forecast.here is None:
        lines.append(
            "rate:    not known for this node; run `snakemake calibrate` on it, or set `economics.gpu` or "
            "`economics.tokens_per_second`"
        )
    else:
        lines.append(
            f"rate:    {config.server_count} servers x {forecast.rate.value:,.0f} tokens/s ({forecast.rate.source})"
        )
        lines.append(f"here:    {_estimate(forecast.here, config.monitor.currency)}")
    lines += [_room(room) for room in forecast.room]
    lines.append("elsewhere, for the same tokens (rates of Qwen3.6-27B; prices are examples):")
    for node, estimate in forecast.elsewhere:
        mark = "measured" if node.is_measured else "estimate"
        lines.append(
            f"  {node.name:18} {human_time(estimate.hours * 3600):>8}  {estimate.gpu_hours:>9,.1f} GPU-hours  "
            f"{estimate.cost or 0:>8,.0f} USD  ({node.rate:,.0f} tokens/s per GPU, {mark})"
        )
    return "\n".join(lines)


def _estimate(estimate: Estimate, currency: str) -> str:
    cost = "cost not known: set `monitor.price_per_hour`"
    if estimate.cost is not None:
        cost = f"{estimate.cost:,.2f} {currency} at {estimate.price_per_hour:,.2f} an hour"
    return f"{human_time(estimate.hours * 3600)}, {estimate.gpu_hours:,.1f} GPU-hours, {cost}"


def _room(room: Room) -> str:
    if room.needed is None:
        return f"room:    {room.what}: its size is known after the download; {human_bytes(room.free)} are free"
    verdict = "" if room.needed <= room.free else "  <- NOT ENOUGH"
    return f"room:    {room.what}: {human_bytes(room.needed)} needed, {human_bytes(room.free)} free{verdict}"


def _count(value: float) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f}"


def describe_calibration(found: dict[str, Any]) -> str:
    """Throughput against requests in flight, as bars, with the knee marked and the advice below."""
    best = max(level["tokens_per_second"] for level in found["levels"])
    lines = ["requests in flight per server, tokens/s of one server, tokens/s of one request:"]
    for level in found["levels"]:
        bar = "#" * round(BAR * level["tokens_per_second"] / best)
        mark = "  <- knee" if level["in_flight"] == found["knee"] else ""
        lines.append(
            f"{level['in_flight']:>6} {level['tokens_per_second']:>10,.1f} "
            f"{level['tokens_per_request_second']:>8,.1f}  {bar}{mark}"
        )
    return "\n".join([*lines, found["advice"]])
