"""The monitor in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..run_state import human_time

STATE_STYLES = {"ready": "green", "failed": "bold red", "silent": "bold red", "absent": "dim", "running": "green"}
LEVEL_STYLES = {"error": "bold red", "warning": "yellow"}


def print_once(snapshot: dict[str, Any]) -> None:
    """Print a snapshot as text; with colours only on a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160, no_color=True)
    console.print(render(snapshot, width=console.width))


def watch(look: Callable[[], dict[str, Any]], interval: float) -> None:
    """Show the run until Ctrl-C."""
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(look(), width=console.width), refresh=True)
            time.sleep(interval)


def render(snapshot: dict[str, Any], *, width: int = 120) -> RenderableType:
    """The whole view of one snapshot."""
    parts: list[RenderableType] = [*_head(snapshot, width), _rates(snapshot)]
    parts += [*_alarms(snapshot), _servers(snapshot), *_events(snapshot), _foot(snapshot)]
    return Group(*parts)


def _head(snapshot: dict[str, Any], width: int) -> list[RenderableType]:
    prompts, shards = snapshot["prompts"], snapshot["shards"]
    title = Text.assemble(
        ("run ", ""), (snapshot["run"], "bold"), "  ", (snapshot["state"], STATE_STYLES.get(snapshot["state"], ""))
    )
    if snapshot["since"]:
        title.append(f" for {human_time(snapshot['at'] - snapshot['since'])}")
    title.append(f"   {clock(snapshot['at'])}", style="dim")
    total = prompts["total"]
    share = prompts["done"] / total if total else 0.0
    line = Text(
        f"{prompts['done']:,} of {total:,} prompts ({share:.1%}), {shards['done']:,} of {shards['total']:,} shards"
    )
    line.append(f", {shards['open']} open" if shards["open"] else "")
    line.append(f"\n{eta_text(snapshot)}")
    bar = Table.grid()
    bar.add_row(ProgressBar(total=max(total, 1), completed=prompts["done"], width=max(20, min(width, 120) - 4)))
    return [title, bar, line]


def eta_text(snapshot: dict[str, Any]) -> str:
    """When the run will be done, in words."""
    eta = snapshot["eta"]
    if eta is None:
        return "time left: not known yet" if snapshot["state"] == "running" else ""
    if not eta["seconds"]:
        return "all prompts have an outcome"
    low, high = human_time(eta["low"]), human_time(eta["high"])
    return f"about {human_time(eta['seconds'])} left ({low} to {high}), until {clock(eta['end'])}"


def _rates(snapshot: dict[str, Any]) -> Text:
    rates, check = snapshot["rates"], snapshot["check"]
    text = Text()
    servers = f"{rates['completion_tokens']:,.0f} tok/s out, {rates['prompt_tokens']:,.0f} tok/s in"
    if rates["requests"] is None:
        text.append(servers)
    else:
        text.append(f"{rates['requests']:.2f} requests/s, {servers}")
        text.append(f"; {snapshot['prompts']['in_flight']} in flight")
        if rates["latency_p50"]:
            text.append(f"; latency {rates['latency_p50']:.1f} s median, {rates['latency_p95']:.1f} s for 95 %")
        if rates["sent_again"]:
            text.append(f"; {rates['sent_again'] * 60:.1f} requests/min sent again", style="yellow")
    if check:
        text.append(
            f"\ncheck over {check['seconds'] / 60:.0f} min: {check['requests']:.2f} requests/s x "
            f"{check['tokens_per_request']:,.0f} tokens = {check['jobs_tokens']:,.0f} tok/s; the servers count "
            f"{check['servers_tokens']:,.0f} ({check['ratio']:.0%})",
            style="" if 0.85 < check["ratio"] < 1.15 else "yellow",
        )
    rejected = {name: count for name, count in snapshot["verdicts"].items() if name != "ok"}
    if rejected or snapshot["prompts"]["rejected"]:
        shown = ", ".join(f"{name} {count:,}" for name, count in sorted(rejected.items(), key=lambda kv: -kv[1]))
        text.append(f"\nrejected prompts: {snapshot['prompts']['rejected']:,}; answers by verdict: {shown or 'all ok'}")
    return text


def _alarms(snapshot: dict[str, Any]) -> list[RenderableType]:
    return [
        Text(f"! {alarm['title']} (since {clock(alarm['since'])})", style=LEVEL_STYLES[alarm["level"]])
        for alarm in snapshot["alarms"]
    ]


def _servers(snapshot: dict[str, Any]) -> Table:
    servers = snapshot["servers"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = ["server", "state", "tok/s out", "in", "of peers", "run/cap", "queue", "accept", "KV use", "restarts"]
    has_gpus = any(server["gpus"] for server in servers)
    for name in [*columns, *(["GPU", "use", "clock", "power", "temp", "throttled by"] if has_gpus else [])]:
        table.add_column(name, justify="left" if name in ("server", "state", "GPU", "throttled by") else "right")
    for server in servers:
        capacity = server["capacity"] if server["capacity"] is not None else "?"
        row = [
            Text(server["name"]),
            Text(server["state"], style=STATE_STYLES.get(server["state"], "yellow")),
            f"{server['completion_rate']:,.0f}",
            f"{server['prompt_rate']:,.0f}",
            number(server["of_peers"], ".2f"),
            f"{server['running']}/{capacity}",
            str(server["queued"]),
            number(server["acceptance_length"], ".2f"),
            number(server["token_usage"], ".0%"),
            str(server["restarts"]),
        ]
        gpus = server["gpus"]
        table.add_row(*row, *(_gpu_cells(gpus[0]) if gpus else [""] * 6 if has_gpus else []))
        for gpu in gpus[1:]:
            table.add_row(*[""] * len(columns), *_gpu_cells(gpu))
    return table


def _gpu_cells(gpu: dict[str, Any]) -> list[RenderableType]:
    return [
        Text(str(gpu["gpu"])[:12]),
        number(gpu["use"], ".0f", " %"),
        number(gpu["sm_clock_mhz"], ",.0f", " MHz"),
        number(gpu["power_w"], ",.0f", " W"),
        number(gpu["temperature_c"], ".0f", " C"),
        Text(", ".join(gpu["throttled_by"]), style="yellow"),
    ]


def _events(snapshot: dict[str, Any]) -> list[RenderableType]:
    told = {server["name"]: server["message"] for server in snapshot["servers"] if server["message"]}
    lines = [Text(f"server {name}: {first_line(message)}", style="yellow") for name, message in told.items()]
    lines += [
        Text(f"{clock(event['at'])}  server {event['server']}  {first_line(event['text'])}", style="dim")
        for event in snapshot["events"][-8:]
    ]
    return lines


def _foot(snapshot: dict[str, Any]) -> Text:
    room = snapshot["room"]
    parts = []
    if room["free"] is not None:
        need = f", the rest needs about {size(room['need'])}" if room["need"] else ""
        parts.append(f"disk {size(room['free'])} free{need}")
    if ram_disk := room.get("ram_disk"):
        parts.append(f"{ram_disk['folder']} {size(ram_disk['free'])} free")
    parts.append(f"memory {size(room['memory_available'])} left of {size(room['memory_total'])}")
    return Text("\n" + "; ".join(parts), style="dim")


def number(value: float | None, form: str, unit: str = "") -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else format(value, form) + unit


def first_line(text: str) -> str:
    """The first line of a message, without what a terminal would obey."""
    line = text.splitlines()[0] if text.splitlines() else ""
    return "".join(c if c.isprintable() else " " for c in line)[:160]


def size(count: float) -> str:
    """Bytes as a person would say them."""
    return (
        f"{count / 1e9:,.1f} GB"
        if count >= 1e9
        else f"{count / 1e6:,.0f} MB"
        if count >= 1e6
        else f"{count / 1e3:.0f} kB"
    )


def clock(at: float) -> str:
    """A moment in local time; the day only where it is not today."""
    when, today = datetime.fromtimestamp(at), datetime.now()
    return when.strftime("%H:%M:%S" if when.date() == today.date() else "%b %d %H:%M")
