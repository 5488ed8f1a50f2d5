"""The alarms: rules over the history of a run.

Every rule goes over the whole history it is given and returns what it found with its beginning and, once it is over,
its end. So the live view, the log and the report say the same of the same samples, and nothing is remembered elsewhere.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ..config import Config
from ..quality.verdicts import wilson_lower_bound
from .gpu import reason_names
from .history import MINUTE, History, Minute, ServerHistory

Level = Literal["warning", "error"]

SHOWN_SECONDS = 3600.0  # an alarm about one moment (a restart) is shown for so long
ACCEPTANCE_MINUTES = 10
BASELINE_MINUTES = 180  # what acceptance is compared with
REJECT_MINUTES = 15
SLIP_SECONDS = 3600.0


@dataclass(frozen=True)
class Alarm:
    """Something that a person should know.

    Args:
        kind: slow, idle, acceptance, down, failed, stall, silent, rejects, eta, disk or memory.
        server: whom it is about; empty for the run.
        until: None while it lasts.
    """

    kind: str
    server: str
    since: float
    until: float | None
    level: Level
    text: str

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.server}"


def scan(history: History, config: Config, now: float) -> list[Alarm]:
    """All alarms that the samples hold, in order of their beginning; those that last have no end."""
    found = [
        *slow_servers(history, config),
        *low_acceptance(history, config),
        *_downs(history, now),
        *_stalls(history),
        *rising_rejects(history, config),
        *slipping(history, config),
        *_disk(history, config),
    ]
    return sorted(found, key=lambda alarm: (alarm.since, alarm.key))


def active(alarms: list[Alarm], now: float) -> list[Alarm]:
    """Those that last, or were only just over; errors first."""
    return sorted((a for a in alarms if a.until is None or a.until > now), key=lambda a: (a.level != "error", a.since))


# A slow server


@dataclass
class _Pace:
    """One server against its peers, minute by minute.

    The deficit below a line just above the limit is summed up (a one-sided CUSUM: E. S. Page, "Continuous inspection
    schemes", Biometrika 41, 1954). A real shortfall adds up; noise around the median does not, however wild.
    """

    deficit: float = 0.0
    began: int = 0
    ratios: deque[tuple[int, float]] = field(default_factory=deque)
    since: int | None = None  # while it counts as slow

    def step(self, minute: int, ratio: float, line: float) -> None:
        if self.deficit <= 0:
            self.began = minute
        self.deficit = max(0.0, self.deficit + line - ratio)
        self.ratios.append((minute, ratio))

    def mean(self, minutes: int) -> float:
        """Mean ratio of the last `minutes` minutes that could be judged."""
        last = [ratio for _, ratio in self.ratios][-minutes:]
        return sum(last) / len(last)


class _Noise:
    """How much the ratios vary from minute to minute: robustly, by the median of their changes, at two distances so
    that slow wandering counts too."""

    _FLOOR = 0.05
    _SIGMA = 1.0484  # of the median absolute change of a normal variable: 1.4826 / sqrt(2)

    def __init__(self) -> None:
        self._changes = {lag: deque[float](maxlen=240) for lag in (1, 3)}

    def add(self, ratios: deque[tuple[int, float]]) -> None:
        for lag, changes in self._changes.items():
            if len(ratios) > lag:
                changes.append(abs(ratios[-1][1] - ratios[-1 - lag][1]))

    @property
    def sigma(self) -> float:
        seen = [statistics.median(changes) for changes in self._changes.values() if len(changes) >= 5]
        return max(self._FLOOR, *(self._SIGMA * value for value in seen)) if seen else 2 * self._FLOOR


def slow_servers(history: History, config: Config) -> Iterator[Alarm]:
    """Servers below `slow_below` of their peers' median over `slow_minutes` or longer, and surely so."""
    rules = config.monitor.alarms
    line, sure = rules.slow_below + 0.025, 0.5 * (1.025 - rules.slow_below) / 0.125
    paces: dict[str, _Pace] = defaultdict(lambda: _Pace(ratios=deque(maxlen=max(60, rules.slow_minutes + 1))))
    noise = _Noise()
    first, end = history.span
    for number in range(first, end):
        rates = _comparable(history, number)
        for name, rate in rates.items():
            peers = [other for peer, other in rates.items() if peer != name]
            if not peers or (median := statistics.median(peers)) <= 0:
                continue
            pace = paces[name]
            pace.step(number, rate / median, line)
            noise.add(pace.ratios)
            if len(pace.ratios) < rules.slow_minutes:
                continue
            mean = pace.mean(rules.slow_minutes)
            if pace.since is None:
                if mean < rules.slow_below and pace.deficit > max(sure, 6 * noise.sigma):
                    pace.since = pace.began
            elif mean > (1 + rules.slow_below) / 2:
                yield _slow(history, name, pace, number)
                pace.since, pace.deficit = None, 0.0
    for name, pace in paces.items():
        if pace.since is not None:
            yield _slow(history, name, pace, None)


def _comparable(history: History, number: int) -> dict[str, float]:
    """Tokens per second of the servers that had a full minute's work: ready, past their start, and filled."""
    found: dict[str, float] = {}
    for name, server in history.servers.items():
        minute = server.minutes.get(number)
        if minute is None or not minute.counted or minute.seconds < MINUTE / 2 or minute.settled < 0.9 * minute.seconds:
            continue
        if minute.load >= 0.5 * (minute.capacity or 2):
            found[name] = minute.rate
    return found


def _slow(history: History, name: str, pace: _Pace, until: int | None) -> Alarm:
    assert pace.since is not None
    judged = [ratio for number, ratio in pace.ratios if number >= pace.since and (until is None or number < until)]
    ratio = sum(judged) / len(judged)
    last = max(number for number, _ in pace.ratios)
    first = max(pace.since, last - 30)
    own, peers = _mean_rate(history, [name], first, last + 1), _mean_rate(history, _peers(history, name), first, last + 1)
    text = f"{ratio:.2f} of its peers' median over {last + 1 - pace.since} min ({own:,.0f} against {peers:,.0f} tok/s)"
    if beside := _gpu_beside(history, name, first, last + 1):
        text += f"; {beside}"
    return Alarm("slow", name, pace.since * MINUTE, None if until is None else until * MINUTE, "warning", text)


def _peers(history: History, name: str) -> list[str]:
    return [peer for peer in history.servers if peer != name]


def _minutes(server: ServerHistory, first: int, end: int) -> list[Minute]:
    return [server.minutes[number] for number in range(first, end) if number in server.minutes]


def _mean_rate(history: History, names: list[str], first: int, end: int) -> float:
    means = []
    for name in names:
        minutes = _minutes(history.servers[name], first, end)
        if seconds := sum(minute.seconds for minute in minutes):
            means.append(sum(minute.tokens for minute in minutes) / seconds)
    return statistics.median(means) if means else 0.0


def _gpu_beside(history: History, name: str, first: int, end: int) -> str:
    """Clocks, power, temperature and throttle reasons of a server's GPUs beside its peers'; empty without NVML."""

    def mean(names: list[str], column: str) -> float | None:
        values = [
            value
            for one in names
            for minute in _minutes(history.servers[one], first, end)
            if (value := minute.gpu(column)) is not None
        ]
        return statistics.fmean(values) if values else None

    parts = []
    for column, label, unit in (
        ("sm_clock_mhz", "SM clock", "MHz"),
        ("power_w", "power", "W"),
        ("temperature_c", "temperature", "C"),
    ):
        own, peers = mean([name], column), mean(_peers(history, name), column)
        if own is not None:
            parts.append(f"{label} {own:,.0f} {unit}" + (f" (peers {peers:,.0f})" if peers is not None else ""))
    if not parts:
        return ""
    bits = 0
    for minute in _minutes(history.servers[name], first, end):
        bits |= minute.reasons
    return ", ".join([*parts, f"throttled by: {', '.join(reason_names(bits)) or 'nothing'}"])


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
    text = f"acceptance length fell from {base:.2f} to {mean:.2f}" if until is None else (
        f"acceptance length was below its {base:.2f} for {until - since} min"
    )
    return Alarm("acceptance", name, since * MINUTE, None if until is None else until * MINUTE, "warning", text)


# Servers that fail


def _downs(history: History, now: float) -> Iterator[Alarm]:
    for name, server in history.servers.items():
        downs = [event for event in server.events if event.kind == "down"]
        for number, event in enumerate(downs, start=1):
            recent = sum(1 for other in downs[:number] if other.at > event.at - SHOWN_SECONDS)
            text = f"went down: {event.text}" + (f" (time {recent} within an hour)" if recent > 1 else "")
            until = event.at + SHOWN_SECONDS
            level: Level = "error" if recent > 2 else "warning"
            yield Alarm("down", name, event.at, min(until, now) if until < now else until, level, text)
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
