"""The report's plots, each a function from the run's data to SVG, or to nothing where there is nothing to see."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..monitor.eta import quantile
from ..monitor.history import MINUTE, Minute, ServerHistory
from ..monitor.jobs import STEPS, bucket_value
from . import figures as f
from .gather import RunData

POINTS = 260  # of a curve
TOKEN_TICKS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000)
SECOND_TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)


def span(data: RunData) -> tuple[float, float]:
    """From the first to the last minute of the samples, in seconds since the epoch."""
    first, end = data.history.span
    return first * MINUTE, end * MINUTE


def bins(data: RunData) -> list[tuple[int, int]]:
    """The run's minutes, put together to at most `POINTS` stretches."""
    first, end = data.history.span
    size = max(1, math.ceil((end - first) / POINTS))
    return [(number, min(number + size, end)) for number in range(first, end, size)]


def curve(
    server: ServerHistory, parts: list[tuple[int, int]], read: Callable[[list[Minute]], float | None]
) -> list[float]:
    """One figure of a server for each stretch; nan where there is none."""
    values = []
    for first, end in parts:
        minutes = [server.minutes[n] for n in range(first, end) if n in server.minutes]
        value = read(minutes) if minutes else None
        values.append(math.nan if value is None else value)
    return values


def _rate(minutes: list[Minute]) -> float | None:
    seconds = sum(minute.seconds for minute in minutes)
    return sum(minute.tokens for minute in minutes) / seconds if seconds else None


def _mean_of(read: Callable[[Minute], float | None]) -> Callable[[list[Minute]], float | None]:
    def mean(minutes: list[Minute]) -> float | None:
        values = [value for minute in minutes if (value := read(minute)) is not None]
        return sum(values) / len(values) if values else None

    return mean


def _servers(data: RunData) -> list[ServerHistory]:
    return [data.history.servers[name] for name in sorted(data.history.servers, key=lambda name: (len(name), name))]


def _lines(axes: Any, data: RunData, read: Callable[[list[Minute]], float | None]) -> bool:
    parts = bins(data)
    x = f.moments((first + end) / 2 * MINUTE for first, end in parts)
    is_any = False
    for index, server in enumerate(_servers(data)):
        values = curve(server, parts, read)
        if not all(map(math.isnan, values)):
            is_any = True
            axes.plot(
                x, values, color=f.colour(index), label=f"server {server.name}", marker="." if len(parts) < 3 else ""
            )
    f.time_axis(axes, span(data))
    return is_any


def throughput(data: RunData) -> str:
    """Completion tokens per second of each server over time."""
    with f.figure(3.2) as (drawing, axes):
        if not _lines(axes, data, _rate):
            return ""
        f.thousands(axes)
        axes.set_title("completion tokens per second")
        drawing.legend(loc="outside lower center", ncols=8)
        return f.svg(drawing, "throughput", "completion tokens per second of each server over time")


def utilisation(data: RunData) -> str:
    """How full each server was: requests running, as a share of what it can run."""
    servers = [s for s in _servers(data) if any(minute.capacity for minute in s.minutes.values())]
    if not servers:
        return ""
    parts = bins(data)
    read = _mean_of(lambda minute: minute.load / minute.capacity if minute.capacity else None)
    rows = [curve(server, parts, read) for server in servers]
    begin, end = span(data)
    with f.figure(0.9 + 0.3 * len(rows)) as (drawing, axes):
        left, right = (_date_number(value) for value in (begin, end))
        image = axes.imshow(
            rows,
            aspect="auto",
            interpolation="nearest",
            vmin=0,
            vmax=1,
            cmap="viridis",
            extent=(left, right, len(rows), 0),
        )
        axes.set_yticks([n + 0.5 for n in range(len(rows))], [f"server {server.name}" for server in servers])
        axes.grid(False)
        f.time_axis(axes, (begin, end))
        axes.set_title("requests running, as a share of what fits")
        bar = drawing.colorbar(image, ax=axes, pad=0.01, ticks=[0, 0.5, 1])
        bar.ax.set_yticklabels(["0 %", "50 %", "100 %"])
        bar.outline.set_visible(False)
        return f.svg(drawing, "utilisation", "share of each server's places in use over time")


def _date_number(seconds: float) -> float:
    from matplotlib.dates import date2num

    return float(date2num(f.moments([seconds])[0]))


def timeline(data: RunData) -> str:
    """What happened when: each server's states, restarts and alarms."""
    servers = _servers(data)
    if not servers:
        return ""
    begin, end = span(data)
    rows = {server.name: n for n, server in enumerate(servers)}
    names = [f"server {server.name}" for server in servers]
    if any(not alarm.server for alarm in data.alarms):
        rows[""] = len(rows)
        names.append("run")
    with f.figure(0.8 + 0.32 * len(rows)) as (drawing, axes):
        for server in servers:
            _states(axes, server, rows[server.name])
        seen: set[str] = set()
        for alarm in data.alarms:
            if alarm.server not in rows or alarm.kind == "down":
                continue
            stop = min(alarm.until or end, end)
            label = "alarm" if "alarm" not in seen else None
            seen.add("alarm")
            y, x = rows[alarm.server] + 0.27, f.moments([alarm.since, max(stop, alarm.since + (end - begin) / 300)])
            axes.plot(
                x,
                [y, y],
                color=f.WARN if alarm.level == "warning" else f.BAD,
                linewidth=4,
                solid_capstyle="butt",
                label=label,
            )
            axes.annotate(alarm.kind, (x[0], y), xytext=(0, -9), textcoords="offset points", fontsize=7.5, color=f.DIM)
        downs = [(event.at, rows[event.server]) for event in data.history.events() if event.kind in ("down", "failed")]
        if downs:
            axes.plot(
                f.moments(at for at, _ in downs), [row - 0.1 for _, row in downs], "x", color=f.BAD, label="went down"
            )
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(False)
        f.time_axis(axes, (begin, end))
        axes.set_title("servers that were ready, and what went wrong")
        if axes.get_legend_handles_labels()[1]:
            drawing.legend(loc="outside lower center", ncols=8)
        return f.svg(drawing, "timeline", "states, restarts and alarms of each server over time")


def _states(axes: Any, server: ServerHistory, row: int) -> None:
    """A bar where the server was ready, a thin one where it was there at all."""
    for width, share in ((2, lambda minute: minute.seconds), (9, lambda minute: minute.ready)):
        for first, stop in _runs(sorted(n for n, minute in server.minutes.items() if share(minute) >= 20)):
            x = f.moments([first * MINUTE, (stop + 1) * MINUTE])
            axes.plot(
                x, [row - 0.1] * 2, color=f.colour(2) if width > 2 else f.DIM, linewidth=width, solid_capstyle="butt"
            )


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [(first, last) for first, last in found]


def acceptance(data: RunData) -> str:
    """Acceptance length of speculative decoding over time."""
    with f.figure(2.6) as (drawing, axes):
        if not _lines(axes, data, _mean_of(lambda minute: minute.detail("acceptance_length"))):
            return ""
        axes.set_title("acceptance length (tokens per verification)")
        drawing.legend(loc="outside lower center", ncols=8)
        return f.svg(drawing, "acceptance", "acceptance length of each server over time")


def gpus(data: RunData) -> str:
    """Clocks, power and temperature of the servers' GPUs over time."""
    panels = (("sm_clock_mhz", "SM clock in MHz"), ("power_w", "power in W"), ("temperature_c", "temperature in °C"))
    with f.figure(5.0, nrows=3, sharex=True) as (drawing, axes):
        found = [
            _lines(one, data, _mean_of(lambda minute, column=column: minute.gpu(column)))
            for one, (column, _) in zip(axes, panels, strict=True)
        ]
        if not any(found):
            return ""
        for one, (_, title) in zip(axes, panels, strict=True):
            one.set_title(title)
        handles, labels = axes[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=8)
        return f.svg(drawing, "gpus", "clocks, power and temperature of each server's GPUs over time")


def lengths(data: RunData) -> str:
    """How long answers were, and the thoughts in them."""
    jobs = data.history.jobs
    both = [(jobs.lengths, "answers, thought included", 0), (jobs.thoughts, "thoughts", 1)]
    with f.figure(2.7) as (drawing, axes):
        if not _histograms(axes, both, TOKEN_TICKS, "tokens"):
            return ""
        axes.legend()
        return f.svg(drawing, "lengths", "histograms of the lengths of answers and thoughts")


def latency(data: RunData) -> str:
    """How long requests took, in all and over time."""
    jobs = data.history.jobs
    with f.figure(2.7, ncols=2, width_ratios=[1, 1.25]) as (drawing, (left, right)):
        if not _histograms(left, [(jobs.latencies, "", 0)], SECOND_TICKS, "seconds"):
            return ""
        for share, style in ((0.5, "-"), (0.95, "--"), (0.99, ":")):
            value = quantile(jobs.latencies, share)
            left.axvline(value, color=f.INK, linestyle=style, linewidth=1, label=f"{share:.0%}: {value:,.3g} s")
        left.legend()
        left.set_title("requests by latency")
        parts = bins(data)
        merged = [
            sum((jobs.minutes[n].latencies for n in range(*part) if n in jobs.minutes), Counter()) for part in parts
        ]
        x = f.moments((first + end) / 2 * MINUTE for first, end in parts)
        for index, share in enumerate((0.5, 0.95)):
            values = [quantile(one, share) if one else math.nan for one in merged]
            right.plot(x, values, color=f.colour(index), label=f"{share:.0%}", marker="." if len(parts) < 3 else "")
        f.time_axis(right, span(data))
        f.thousands(right)
        right.set_title("latency in seconds, over time")
        right.legend()
        return f.svg(drawing, "latency", "latency of requests, as a histogram and over time")


def _histograms(axes: Any, histograms: list[tuple[Counter[int], str, int]], ticks: Any, unit: str) -> bool:
    keys = [key for histogram, _, _ in histograms for key in histogram]
    if not keys:
        return False
    first, last = min(keys), max(keys)
    edges = [bucket_value(index) * 2 ** (-0.5 / STEPS) for index in range(first, last + 2)]
    for histogram, label, index in histograms:
        if histogram:
            counts = [histogram.get(key, 0) for key in range(first, last + 1)]
            axes.stairs(counts, edges, fill=True, color=f.colour(index), alpha=0.35)
            axes.stairs(counts, edges, color=f.colour(index), label=label or None)
    f.log_axis(axes, ticks, edges[0], edges[-1])
    f.thousands(axes)
    axes.set_xlabel(unit)
    return True


def progress(data: RunData) -> str:
    """Prompts done over time, and what the forecasts of the end were."""
    values = [value for value in data.history.forecasts if value.get("done") is not None]
    if len(values) < 3:
        return ""
    with f.figure(2.7, ncols=2) as (drawing, (left, right)):
        left.plot(f.moments(value["t"] for value in values), [value["done"] for value in values], color=f.colour(0))
        left.set_title("prompts done")
        f.thousands(left)
        f.time_axis(left, span(data))
        known = [value for value in values if value.get("end")]
        if known:
            x = f.moments(value["t"] for value in known)
            right.plot(x, f.moments(value["end"] for value in known), color=f.colour(1), label="forecast of the end")
            low, high = (f.moments(value[key] for value in known) for key in ("low", "high"))
            right.fill_between(x, low, high, color=f.colour(1), alpha=0.25, linewidth=0, label="its 90 % range")
            if data.is_finished and data.progress.last_finished_at:
                end = f.moments([data.progress.last_finished_at])[0]
                right.axhline(end, color=f.INK, linewidth=1, linestyle="--", label="the end")
            from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

            locator = AutoDateLocator(minticks=3, maxticks=6)
            right.yaxis.set_major_locator(locator)
            right.yaxis.set_major_formatter(ConciseDateFormatter(locator))
            f.time_axis(right, span(data))
            right.legend()
            right.set_title("when it was to end")
        else:
            right.set_visible(False)
        return f.svg(drawing, "progress", "prompts done, and forecasts of the end, over time")
