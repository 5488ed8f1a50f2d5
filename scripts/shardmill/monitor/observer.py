"""Everything that can be seen of a run at one moment, as plain data that all views share."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import psutil

from ..config import Config
from ..layout import Layout
from ..owner import owner_is_alive, read_owner
from ..supervisor_state import ServerStatus, read_status
from . import alarms as rules
from .alarm import Alarm
from .eta import Eta, estimate, quantile
from .gpu import GPU_FIELDS, reason_names
from .history import MINUTE, History, ServerHistory, pools_of
from .progress import Progress, ProgressReader

WINDOW_SECONDS = 4 * 3600.0  # of history that the live views look at
PACE_SECONDS = 300.0  # over which the totals are taken
CHECK_SECONDS = 900.0  # over which the two levels are compared
ALARM_SECONDS = 10.0  # between two runs of the alarm rules
SILENT_SECONDS = 60.0  # without a word from a supervisor
EVENTS = 12


class Observer:
    """Looks at one run again and again.

    Args:
        since: from when on samples are read; left out: the last hours before the newest sample.
    """

    def __init__(self, config: Config, *, since: float | None = None, keep: float | None = WINDOW_SECONDS) -> None:
        self.config = config
        self.layout = config.layout
        if since is None:
            since = _newest_sample(self.layout) - WINDOW_SECONDS
        self.history = History(self.layout, since=since, keep=keep, stall=config.monitor.alarms.stall_seconds)
        self._reader = ProgressReader(self.layout)
        self.progress = Progress()
        self._alarms: list[Alarm] = []
        self._alarms_due = 0.0

    def snapshot(self, now: float | None = None) -> dict[str, Any]:
        """The run as it stands. Rates are per second, times seconds since the epoch, sizes bytes."""
        now = time.time() if now is None else now
        self.history.refresh()
        progress = self.progress = self._reader.read()
        owner = read_owner(self.layout)
        is_live = owner_is_alive(self.layout)
        statuses = {name: self._status(name) for name in self._names()}
        eta = self._eta(progress, owner.started_at if owner else 0.0, now) if is_live else None
        room = self._room(progress)
        return {
            "run": self.config.run.name,
            "folder": str(self.layout.root),
            "at": now,
            "state": self._state(progress, is_live),
            "owner": str(owner) if owner and is_live else None,
            "since": owner.started_at if owner and is_live else None,
            "prompts": {
                "total": progress.prompts,
                "done": progress.done,
                "accepted": progress.accepted,
                "rejected": progress.rejected,
                "unusable": progress.unusable,
                "in_flight": progress.in_flight,
            },
            "shards": {"total": progress.shards, "done": progress.shards_done, "open": progress.shards_open},
            "eta": _eta_json(eta, now),
            "rates": self._rates(statuses, owner.started_at if owner else 0.0, now),
            "check": self._check(now),
            "servers": [self._server(name, statuses[name], now) for name in statuses],
            "verdicts": dict(self.history.jobs.verdicts or progress.verdicts),
            "alarms": [_alarm_json(alarm) for alarm in self._current_alarms(statuses, room, is_live, now)],
            "events": [vars(event) for event in self.history.events()[-EVENTS:]],
            "room": room,
        }

    def finished(self) -> dict[str, dict[str, Any]]:
        """Statistics of the finished shards, by shard."""
        return self._reader.stats()

    @property
    def prompt_index(self) -> dict[str, Any]:
        """The prompt index; empty before the prompts are cut."""
        return self._reader.index()

    def forecast(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """A snapshot's part that is kept for later (`layout.forecasts`)."""
        eta, at = snapshot["eta"], snapshot["at"]
        value = {"t": round(at, 1), "s": snapshot["since"], "done": snapshot["prompts"]["done"]}
        if eta:
            value |= {
                name: round(at + eta[key]) for name, key in (("end", "seconds"), ("low", "low"), ("high", "high"))
            }
        return value | {"free": snapshot["room"]["free"], "need": round(snapshot["room"]["need"])}

    def curves(self, now: float, *, minutes: int = 180) -> dict[str, Any]:
        """Per minute: completion tokens per second of each server, and prompts per minute of all jobs."""
        end = int(now // MINUTE)
        numbers = range(end - minutes, end)
        servers = {
            name: [round(server.minutes[number].rate, 1) if number in server.minutes else None for number in numbers]
            for name, server in sorted(self.history.servers.items())
        }
        return {"minutes": [number * 60 for number in numbers], "servers": servers}

    def _names(self) -> list[str]:
        """The configured servers, and any that left samples; of a run over several machines, those of its pools."""
        configured = [] if pools_of(self.layout) else self.config.server_names
        return sorted({*configured, *self.history.servers}, key=lambda name: (len(name), name))

    def _status(self, name: str) -> ServerStatus | None:
        pool, _, server = name.rpartition(".")
        return read_status(self.layout.of_pool(pool) if pool else self.layout, server)

    def _state(self, progress: Progress, is_live: bool) -> str:
        if progress.shards and progress.shards_done == progress.shards and self._is_proven(progress):
            return "finished"  # for its last seconds the run is live as well: it makes its report
        if is_live:
            return "running"
        return "stopped" if progress.shards or self.history.servers else "not started"

    def _is_proven(self, progress: Progress) -> bool:
        """Whether there is a manifest, and none of the shards was made again since."""
        with contextlib.suppress(OSError):
            return self.layout.manifest.stat().st_mtime > progress.last_finished_at - 1
        return False

    def _eta(self, progress: Progress, since: float, now: float) -> Eta | None:
        return estimate(
            self.history.jobs,
            left=progress.prompts - progress.done,
            shards_left=progress.shards - progress.shards_done,
            since=since,
            now=now,
            shard_means=progress.shard_means,
        )

    def _rates(self, statuses: dict[str, ServerStatus | None], since: float, now: float) -> dict[str, Any]:
        end = now // MINUTE * MINUTE
        begin = max(end - PACE_SECONDS, min(self._first_job(since), end - MINUTE))
        jobs, span = self.history.jobs.sums(begin, end), end - begin
        is_known = bool(jobs.requests)
        servers = [self.history.servers[name] for name in statuses if name in self.history.servers]
        return {
            "requests": jobs.requests / span if is_known else None,
            "prompts": jobs.settled / span if is_known else None,
            "retries": jobs.retries / span if is_known else None,
            "sent_again": jobs.resent / span if is_known else None,
            "completion_tokens": sum(recent_rate(server, now)[0] for server in servers),
            "prompt_tokens": sum(recent_rate(server, now)[1] for server in servers),
            "latency_p50": quantile(jobs.latencies, 0.5) or None,
            "latency_p95": quantile(jobs.latencies, 0.95) or None,
        }

    def _check(self, now: float) -> dict[str, Any] | None:
        """The two levels against each other: answers that jobs received, and the servers' own counters.

        The first minutes are left out: servers count tokens as they come, jobs when an answer is whole.
        """
        end = now // MINUTE * MINUTE
        since = max(end - CHECK_SECONDS, self._first_job(end - CHECK_SECONDS) + 2 * MINUTE)
        if end - since < 3 * MINUTE:
            return None
        jobs = self.history.jobs.sums(since, end)
        counted = [
            minute
            for server in self.history.servers.values()
            for number, minute in server.minutes.items()
            if since <= number * MINUTE < end and minute.counted
        ]
        tokens = sum(minute.tokens for minute in counted)
        if not jobs.answers or not tokens:
            return None
        return {
            "seconds": end - since,
            "requests": jobs.answers / (end - since),
            "tokens_per_request": jobs.tokens / jobs.answers,
            "jobs_tokens": jobs.tokens / (end - since),
            "servers_tokens": tokens / (end - since),
            "ratio": jobs.tokens / tokens,
        }

    def _first_job(self, since: float) -> float:
        """Beginning of the first whole minute from `since` on in which a job said something; infinite if none did."""
        found = [number * MINUTE for number in self.history.jobs.minutes if number * MINUTE >= since]
        return min(found, default=float("inf"))

    def _server(self, name: str, status: ServerStatus | None, now: float) -> dict[str, Any]:
        history = self.history.servers.get(name)
        rate, prompt_rate = recent_rate(history, now) if history else (0.0, 0.0)
        last = history.last if history else None
        is_there = status is not None and (status.age() < SILENT_SECONDS or status.state == "failed")
        details = status.details if status else {}
        return {
            "name": name,
            "state": status.state if status and is_there else "silent" if status else "absent",
            "message": status.message if status else "",
            "running": status.running if status and is_there else 0,
            "queued": status.queued if status and is_there else 0,
            "capacity": status.capacity if status else None,
            "completion_rate": rate,
            "prompt_rate": prompt_rate,
            "of_peers": self._of_peers(name, now),
            "acceptance_length": details.get("acceptance_length"),
            "acceptance_rate": details.get("acceptance_rate"),
            "token_usage": details.get("token_usage"),
            "restarts": status.restarts if status else 0,
            "answered_at": status.answered_at if status else None,
            "gpus": [_gpu_json(row) for row in last.gpus] if last and is_there else [],
        }

    def _of_peers(self, name: str, now: float) -> float | None:
        """Share of the peers' median over the last ten minutes; None where nothing can be compared."""
        end = int(now // MINUTE)
        means: dict[str, float] = {}
        for one, server in self.history.servers.items():
            minutes = [server.minutes[n] for n in range(end - 10, end) if n in server.minutes]
            if seconds := sum(minute.seconds for minute in minutes if minute.counted):
                means[one] = sum(minute.tokens for minute in minutes) / seconds
        own = means.pop(name, None)
        ordered = sorted(means.values())
        if own is None or not ordered:
            return None
        median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        return own / median if median else None

    def _room(self, progress: Progress) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        room: dict[str, Any] = {
            "need": progress.bytes_per_prompt * max(0, progress.prompts - progress.done),
            "free": None,
            "total": None,
            "memory_available": memory.available,
            "memory_total": memory.total,
        }
        with contextlib.suppress(OSError):
            disk = shutil.disk_usage(self.layout.root)
            room |= {"free": disk.free, "total": disk.total}
        ram_disk = self.config.model.ram_disk
        folder = Path(ram_disk) if isinstance(ram_disk, str) else Path("/dev/shm")
        if ram_disk:
            with contextlib.suppress(OSError):
                usage = shutil.disk_usage(folder)
                room["ram_disk"] = {"folder": str(folder), "free": usage.free, "total": usage.total}
        return room

    def _current_alarms(
        self, statuses: dict[str, ServerStatus | None], room: dict[str, Any], is_live: bool, now: float
    ) -> list[Alarm]:
        if not is_live:
            return []
        if now >= self._alarms_due:
            self._alarms_due = now + ALARM_SECONDS
            self._alarms = rules.scan(self.history, self.config)
        live = [
            Alarm("silent", name, status.at, None, "error", f"its supervisor wrote nothing for {status.age():.0f} s")
            for name, status in statuses.items()
            if status is not None and status.age() > SILENT_SECONDS and status.state != "failed"
        ]
        if problem := rules.room_problem(room, self.config):
            live.append(Alarm("disk", "", now, None, "error", problem))
        if room["memory_available"] < 0.04 * room["memory_total"]:
            text = f"{room['memory_available'] / 1e9:.1f} GB of memory left"
            live.append(Alarm("memory", "", now, None, "error", text))
        known = {alarm.key for alarm in live}
        return rules.active([*live, *(alarm for alarm in self._alarms if alarm.key not in known)], now)


def recent_rate(server: ServerHistory, now: float) -> tuple[float, float]:
    """(completion, prompt) tokens per second over about the last minute; (0, 0) if it has said nothing since."""
    samples = [sample for sample in server.recent if sample.at > now - 75]
    if len(samples) < 2 or samples[-1].instance != samples[-2].instance:
        return 0.0, 0.0
    samples = [sample for sample in samples if sample.instance == samples[-1].instance]
    first, last = samples[0], samples[-1]
    span = last.at - first.at
    if span <= 0:
        return 0.0, 0.0
    return (
        max(0.0, (last.completion_tokens or 0) - (first.completion_tokens or 0)) / span,
        max(0.0, (last.prompt_tokens or 0) - (first.prompt_tokens or 0)) / span,
    )


def _newest_sample(layout: Layout) -> float:
    """When anything was last appended; now, if nothing ever was."""
    times = []
    for machine in (layout, *map(layout.of_pool, pools_of(layout))):
        with contextlib.suppress(OSError):
            times += [path.stat().st_mtime for path in machine.samples.iterdir()]
    return max(times, default=time.time())


def _eta_json(eta: Eta | None, now: float) -> dict[str, float] | None:
    if eta is None:
        return None
    return {"seconds": eta.seconds, "low": eta.low, "high": eta.high, "pace": eta.pace, "end": now + eta.seconds}


def _alarm_json(alarm: Alarm) -> dict[str, Any]:
    return vars(alarm) | {"title": alarm_title(alarm)}


def alarm_title(alarm: Alarm) -> str:
    """An alarm in one line."""
    about = f"server {alarm.server}: " if alarm.server else ""
    return f"{about}{alarm.text}"


def _gpu_json(row: list[Any]) -> dict[str, Any]:
    value = dict(zip(GPU_FIELDS, row, strict=False))
    value["throttled_by"] = reason_names(value.get("reasons"))
    return value
