"""Servers that fall behind their peers: slow ones, and ones that get no work."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..config import Config
from .alarm import Alarm
from .gpu import reason_names
from .history import MINUTE, History, Minute, ServerHistory


@dataclass
class _Pace:
    """One server against its peers, minute by minute.

    The deficit below a line just above the limit is summed up (a one-sided CUSUM: E. S. Page, "Continuous inspection
    schemes", Biometrika 41, 1954). A real shortfall adds up; noise around the median does not, however wild.
    """

    deficit: float = 0.0
    began: int = 0
    count: int = 0
    ratios: deque[tuple[int, float]] = field(default_factory=deque)
    since: int | None = None  # while it counts as slow

    def step(self, minute: int, ratio: float, line: float) -> None:
        if self.deficit <= 0:
            self.began = minute
        self.deficit = max(0.0, self.deficit + line - ratio)
        self.ratios.append((minute, ratio))
        self.count += 1

    def mean(self, minutes: int) -> float:
        """Mean ratio of the last `minutes` minutes that could be judged."""
        last = [ratio for _, ratio in self.ratios][-minutes:]
        return sum(last) / len(last)


class _Noise:
    """How much the ratios vary, as the standard deviation that single minutes would have if they were independent.

    Robustly, by the median of changes (1.0484 is 1.4826 / sqrt(2), for normal variables): from minute to minute, and
    between means of six minutes that are not neighbours, which show the slow wandering of a server's batch that would
    be taken for white noise otherwise.
    """

    _FLOOR = 0.05
    _SIGMA = 1.0484
    _BLOCK = 6

    def __init__(self) -> None:
        self._changes: deque[float] = deque(maxlen=240)
        self._block_changes: deque[float] = deque(maxlen=120)

    def add(self, pace: _Pace) -> None:
        ratios = pace.ratios
        if len(ratios) > 1:
            self._changes.append(abs(ratios[-1][1] - ratios[-2][1]))
        size = self._BLOCK
        if len(ratios) >= 3 * size and pace.count % size == 0:
            last = [ratio for _, ratio in list(ratios)[-3 * size :]]
            self._block_changes.append(abs(sum(last[-size:]) - sum(last[:size])) / size)

    @property
    def sigma(self) -> float:
        found = [self._FLOOR] if len(self._changes) >= 5 else [2 * self._FLOOR]
        if len(self._changes) >= 5:
            found.append(self._SIGMA * statistics.median(self._changes))
        if len(self._block_changes) >= 7:
            found.append(self._SIGMA * statistics.median(self._block_changes) * self._BLOCK**0.5)
        return max(found)


def slow_servers(history: History, config: Config) -> Iterator[Alarm]:
    """Servers below `slow_below` of their peers' median over `slow_minutes` or longer, and surely so."""
    rules = config.monitor.alarms
    line, sure = rules.slow_below + 0.02, 5 * (1 - rules.slow_below)
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
            noise.add(pace)
            if len(pace.ratios) < rules.slow_minutes:
                continue
            mean = pace.mean(rules.slow_minutes)
            if pace.since is None:
                if mean < rules.slow_below and pace.deficit > max(sure, 6 * noise.sigma):
                    pace.since = pace.began
            elif pace.mean(2 * rules.slow_minutes) > (1 + rules.slow_below) / 2:
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
    # What is said beside it is of half an hour: the last, or the first of an alarm whose end holds better minutes.
    first = max(pace.since, last - 30) if until is None else pace.since
    end = min(last + 1, first + 31)
    own, peers = _mean_rate(history, [name], first, end), _mean_rate(history, _peers(history, name), first, end)
    text = f"{ratio:.2f} of its peers' median over {last + 1 - pace.since} min ({own:,.0f} against {peers:,.0f} tok/s)"
    if beside := _gpu_beside(history, name, first, end):
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


# A server that gets no work


def idle_servers(history: History, config: Config) -> Iterator[Alarm]:
    """Ready servers that run less than half of what they could for `slow_minutes`, while their peers are full."""
    needed = config.monitor.alarms.slow_minutes
    first, end = history.span
    for name, server in history.servers.items():
        since: int | None = None
        for number in range(first, end):
            if _is_starved(history, server, number):
                since = number if since is None else since
                continue
            if since is not None and number - since >= needed:
                yield _idle(name, since, number)
            since = None
        if since is not None and end - since >= needed:
            yield _idle(name, since, None)


def _is_starved(history: History, server: ServerHistory, number: int) -> bool:
    minute = server.minutes.get(number)
    if minute is None or not minute.capacity or minute.ready < 0.9 * minute.seconds:
        return False
    peers = [history.servers[name].minutes.get(number) for name in _peers(history, server.name)]
    fills = [peer.load / peer.capacity for peer in peers if peer and peer.capacity and peer.ready]
    return bool(fills) and statistics.median(fills) > 0.8 and minute.load < 0.5 * minute.capacity


def _idle(name: str, since: int, until: int | None) -> Alarm:
    text = "runs less than half of what it could, while its peers are full"
    return Alarm("idle", name, since * MINUTE, None if until is None else until * MINUTE, "warning", text)
