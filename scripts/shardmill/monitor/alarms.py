"""The alarms: rules over the history of a run.

Every rule goes over the whole history it is given and returns what it found with its beginning and, once it is over,
its end. So the live view, the log and the report say the same of the same samples, and nothing is remembered elsewhere.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from typing import Any

from ..config import Config
from ..quality.verdicts import wilson_lower_bound
from .alarm import Alarm, Level
from .history import MINUTE, History
from .pace import idle_servers, slow_servers

SHOWN_SECONDS = 3600.0  # an alarm about one moment (a restart) is shown for so long
ACCEPTANCE_MINUTES = 10
BASELINE_MINUTES = 180  # what acceptance is compared with
REJECT_MINUTES = 15
SLIP_SECONDS = 3600.0


def scan(history: History, config: Config) -> list[Alarm]:
    """All alarms that the samples hold, in order of their beginning; those that last have no end."""
    found = [
        *slow_servers(history, config),
        *idle_servers(history, config),
        *low_acceptance(history, config),
        *_downs(history),
        *_stalls(history),
        *rising_rejects(history, config),
        *slipping(history, config),
        *_disk(history, config),
    ]
    return sorted(found, key=lambda alarm: (alarm.since, alarm.key))


def active(alarms: list[Alarm], now: float) -> list[Alarm]:
    """Those that last, or were only just over; errors first."""
    return sorted((a for a in alarms if a.until is None or a.until > now), key=lambda a: (a.level != "error", a.since))


# Speculative decoding


def low_acceptance(history: History, config: Config) -> Iterator[Alarm]:
    """Servers whose acceptance length fell below `acceptance_below` of what it was in the hours before."""
    below = config.monitor.alarms.acceptance_below
    for name, server in history.servers.items():
        values: list[tuple[int, float]] = []
        since, base = None, 0.0
        for number in sorted(server.minutes):
            if (value := server.minutes[number].detail("acceptance_length")) is None:
                continue
            values.append((number, value))
            recent = [value for _, value in values[-ACCEPTANCE_MINUTES:]]
            before = [value for _, value in values[-BASELINE_MINUTES - ACCEPTANCE_MINUTES : -ACCEPTANCE_MINUTES]]
            mean = statistics.fmean(recent)
            if since is None:
                if len(before) < 2 * ACCEPTANCE_MINUTES:
                    continue
                base = statistics.median(before)
                if mean < below * base:
                    since = number - ACCEPTANCE_MINUTES + 1
            elif mean > (1 + below) / 2 * base:
                yield _fallen(name, since, number, mean, base)
                since = None
        if since is not None:
            recent = [value for _, value in values[-ACCEPTANCE_MINUTES:]]
            yield _fallen(name, since, None, statistics.fmean(recent), base)


def _fallen(name: str, since: int, until: int | None, mean: float, base: float) -> Alarm:
    text = (
        f"acceptance length fell from {base:.2f} to {mean:.2f}"
        if until is None
        else (f"acceptance length was below its {base:.2f} for {until - since} min")
    )
    return Alarm("acceptance", name, since * MINUTE, None if until is None else until * MINUTE, "warning", text)


# Servers that fail


def _downs(history: History) -> Iterator[Alarm]:
    for name, server in history.servers.items():
        downs = [event for event in server.events if event.kind == "down"]
        for number, event in enumerate(downs, start=1):
            recent = sum(1 for other in downs[:number] if other.at > event.at - SHOWN_SECONDS)
            text = f"went down: {event.text}" + (f" (time {recent} within an hour)" if recent > 1 else "")
            level: Level = "error" if recent > 2 else "warning"
            yield Alarm("down", name, event.at, event.at + SHOWN_SECONDS, level, text)
        last = server.last
        failed = [event for event in server.events if event.kind == "failed"]
        if failed and last is not None and last.state == "failed":
            yield Alarm("failed", name, failed[-1].at, None, "error", failed[-1].text)


def _stalls(history: History) -> Iterator[Alarm]:
    for name, server in history.servers.items():
        for since, until, inside in server.stalls:
            length = (until or server.last.at if server.last else since) - since
            text = f"no token for {length:,.0f} s while {inside} requests are in it"
            yield Alarm("stall", name, since, until, "error", text)


# The run


def rising_rejects(history: History, config: Config) -> Iterator[Alarm]:
    """A quarter of an hour with surely more rejects than before, or a run on its way to `quality.stop_run_above`."""
    factor, stop = config.monitor.alarms.rejects_factor, config.quality.stop_run_above
    window: deque[tuple[int, int, int]] = deque()
    settled = rejected = 0
    recent_settled = recent_rejected = 0
    since: int | None = None
    text = ""
    for number in sorted(history.jobs.minutes):
        minute = history.jobs.minutes[number]
        window.append((number, minute.settled, minute.rejected))
        recent_settled += minute.settled
        recent_rejected += minute.rejected
        while window[0][0] <= number - REJECT_MINUTES:
            _, old_settled, old_rejected = window.popleft()
            settled += old_settled
            rejected += old_rejected
            recent_settled -= old_settled
            recent_rejected -= old_rejected
        before = rejected / settled if settled else 0.0
        # Wilson's lower end treats answers as independent, which they are not quite: hence the margin of 1 %.
        surely = wilson_lower_bound(recent_rejected, recent_settled) if recent_settled >= 20 else 0.0
        overall = wilson_lower_bound(rejected + recent_rejected, settled + recent_settled)
        is_rising = settled >= 100 and surely > max(factor * before, before + 0.01)
        is_near = settled + recent_settled >= 50 and overall > 0.7 * stop
        if is_rising or is_near:
            since = number if since is None else since
            text = (
                f"{recent_rejected} of the last {recent_settled} prompts rejected"
                + (f", {before:.1%} before" if settled else "")
                + (f"; the run stops above {stop:.0%} (quality.stop_run_above)" if is_near else "")
            )
        elif since is not None and surely <= max(before, 0.7 * factor * before):
            yield Alarm("rejects", "", since * MINUTE, number * MINUTE, "warning", text)
            since = None
    if since is not None:
        yield Alarm("rejects", "", since * MINUTE, None, "warning", text)


def slipping(history: History, config: Config) -> Iterator[Alarm]:
    """The end of the run moved later than the forecast of an hour before allowed for."""
    limit = config.monitor.alarms.eta_slip
    earlier: deque[dict[str, Any]] = deque()
    since: float | None = None
    text = ""
    for value in history.forecasts:
        if value.get("end") is None:
            continue
        if earlier and earlier[-1].get("s") != value.get("s"):
            earlier.clear()  # another session: the pause between does not count
            if since is not None:
                yield Alarm("eta", "", since, value["t"], "warning", text)
                since = None
        earlier.append(value)
        while len(earlier) > 1 and earlier[1]["t"] <= value["t"] - SLIP_SECONDS:
            earlier.popleft()
        old = earlier[0]
        if value["t"] - old["t"] < SLIP_SECONDS / 2:
            continue
        slip, left = value["end"] - old["end"], old["end"] - old["t"]
        if slip > max(limit * left, 600) and value["end"] > old.get("high", old["end"]):
            since = value["t"] if since is None else since
            text = f"the end moved {slip / 3600:.1f} h later within the last hour"
        elif since is not None:
            yield Alarm("eta", "", since, value["t"], "warning", text)
            since = None
    if since is not None:
        yield Alarm("eta", "", since, None, "warning", text)


def _disk(history: History, config: Config) -> Iterator[Alarm]:
    since, text = None, ""
    for value in history.forecasts:
        if (problem := room_problem(value, config)) is not None:
            since, text = (value["t"] if since is None else since), problem
        elif since is not None:
            yield Alarm("disk", "", since, value["t"], "error", text)
            since = None
    if since is not None:
        yield Alarm("disk", "", since, None, "error", text)


def room_problem(value: dict[str, Any], config: Config) -> str | None:
    """What is wrong with the free space (`free`, bytes) for what the rest will need (`need`), or None."""
    free, need = value.get("free"), value.get("need") or 0
    if free is None:
        return None
    if free < need + config.monitor.alarms.disk_free_gb * 1e9:
        return f"{free / 1e9:.1f} GB free for results; the rest will need about {need / 1e9:.1f} GB"
    return None
