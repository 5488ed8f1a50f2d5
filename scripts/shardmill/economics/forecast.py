"""What the run at hand will take, by what it measured, what it was told, or what is usual."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Any

import psutil

from ..config import Config
from ..disk import room_needed
from ..errors import UserError
from ..files import read_json_or_none
from ..model.ramdisk import ram_disk_root
from ..planning import Plan
from ..run_state import finished_stats
from .estimate import Estimate, Figure
from .nodes import GPUS, NODES, USUAL_TOKENS, NodeKind

JOB_MEMORY = 120e6  # bytes of one shard job with 512 requests in flight


@dataclass(frozen=True)
class Room:
    """Bytes that something needs and that are there; None where it is not known."""

    what: str
    needed: float | None
    free: float


@dataclass(frozen=True)
class Forecast:
    """All that `snakemake plan` says."""

    prompts: int
    shards: int
    pending: int
    prompts_left: int
    tokens_each: Figure
    rate: Figure | None  # of one server
    here: Estimate | None
    elsewhere: list[tuple[NodeKind, Estimate]]
    room: list[Room]


def make_forecast(plan: Plan) -> Forecast:
    """Look at the run, its measurements and this machine. Takes no GPU, no network and no more than seconds.

    Raises:
        UserError: if `economics.gpu` is no known kind.
    """
    config = plan.config
    stats = [one for one in finished_stats(config.layout) if one["shard"] not in plan.pending]
    done = sum(one["prompts"] for one in stats)
    left = max(0, plan.survey.records - done - sum(one.get("unusable", 0) for one in stats))
    each = tokens_each(config, stats)
    tokens = left * each.value
    rate = server_rate(config, stats)
    gpus = len(config.servers.gpus) or config.server_count
    here = Estimate(tokens, rate.value * config.server_count, gpus, _price(config, gpus)) if rate else None
    elsewhere = [(node, Estimate(tokens, node.rate * node.gpus, node.gpus, node.price * node.gpus)) for node in NODES]
    return Forecast(
        prompts=plan.survey.records,
        shards=len(plan.shards),
        pending=len(plan.pending),
        prompts_left=left,
        tokens_each=each,
        rate=rate,
        here=here,
        elsewhere=elsewhere,
        room=_room(config, left),
    )


def tokens_each(config: Config, stats: list[dict[str, Any]]) -> Figure:
    """Mean tokens to generate per prompt; answers that were rejected cost as much and are in the rate already."""
    answers = sum(one["accepted"] for one in stats)
    if answers:
        total = sum(one["usage"].get("completion_tokens", 0) for one in stats)
        return Figure(total / answers, f"mean of {answers} answers of this run")
    canary = read_json_or_none(config.layout.canary)
    if canary and canary.get("mean_completion_tokens"):
        return Figure(canary["mean_completion_tokens"], f"mean of the canary's {canary['accepted']} answers")
    if config.economics.tokens_per_answer:
        return Figure(config.economics.tokens_per_answer, "economics.tokens_per_answer")
    if config.sampling.max_tokens < USUAL_TOKENS:
        return Figure(config.sampling.max_tokens, "sampling.max_tokens, the most an answer can have")
    return Figure(USUAL_TOKENS, "usual for Qwen3.6-27B with thinking on; the canary will measure yours")


def server_rate(config: Config, stats: list[dict[str, Any]]) -> Figure | None:
    """Tokens per second of one full server."""
    if found := _calibrated(config):
        return found
    if found := _rate_of_run(config, stats):
        return found
    given = config.economics
    if given.tokens_per_second:
        return Figure(given.tokens_per_second, "economics.tokens_per_second")
    if given.gpu is None:
        return None
    node = _gpu(given.gpu)
    how = "measured on such a node" if node.is_measured else "ESTIMATE by its memory bandwidth"
    return Figure(node.rate * config.servers.gpus_per_server, f"{given.gpu} with Qwen3.6-27B, {how}")


def _calibrated(config: Config) -> Figure | None:
    found = read_json_or_none(config.layout.calibration)
    if not isinstance(found, dict) or found.get("engine") != config.engine.kind:
        return None
    return Figure(found["tokens_per_second"], f"snakemake calibrate, {found['knee']} requests in flight")


def _rate_of_run(config: Config, stats: list[dict[str, Any]]) -> Figure | None:
    """Over the shards that asked servers, from the first one's start to the last one's end."""
    asked = [one for one in stats if one["requests_sent"]]
    if not asked:
        return None
    begun = min(one["finished_at"] - one["seconds"] for one in asked)
    seconds = max(one["finished_at"] for one in asked) - begun
    tokens = sum(one["usage"].get("completion_tokens", 0) for one in asked)
    # Pauses between sessions would pass for slowness.
    busy = sum(one["seconds"] for one in asked)
    if seconds <= 0 or not tokens or busy < seconds / 2:
        return None
    return Figure(tokens / seconds / config.server_count, f"this run's {len(asked)} shards so far")


def _price(config: Config, gpus: int) -> float | None:
    if config.monitor.price_per_hour is not None:
        return config.monitor.price_per_hour
    return _gpu(config.economics.gpu).price * gpus if config.economics.gpu else None


def _gpu(name: str) -> NodeKind:
    if name not in GPUS:
        raise UserError(f"{name!r} is not among the known kinds: {', '.join(GPUS)}", where="economics.gpu")
    return GPUS[name]


def _room(config: Config, prompts_left: int) -> list[Room]:
    needed, free = room_needed(config, prompts_left)
    found = [Room(f"disk for answers ({config.run.results})", needed, free)]
    root = ram_disk_root(config)
    if root is not None:
        found.append(Room(f"RAM disk for the model ({root})", _model_bytes(config), shutil.disk_usage(root).free))
    jobs = JOB_MEMORY * config.server_count
    found.append(Room("memory for the shard jobs", jobs, psutil.virtual_memory().available))
    return found


def _model_bytes(config: Config) -> float | None:
    """Size of the model's files, once they are known; 0 if the copy is there already."""
    manifest = read_json_or_none(config.layout.model_manifest)
    if manifest and "files" in manifest:
        return float(sum(entry["size"] for entry in manifest["files"]))
    if os.path.isfile(config.model.source):
        return float(os.path.getsize(config.model.source))
    return None
