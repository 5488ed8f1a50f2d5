"""How far a run is, from its files alone."""

from __future__ import annotations

import time
from typing import Any

from .config import Config
from .files import read_json_or_none
from .layout import Layout
from .owner import read_owner


def finished_stats(layout: Layout) -> list[dict[str, Any]]:
    """Statistics of all finished shards, in no particular order."""
    folder = layout.root / "stats"
    found = (read_json_or_none(path) for path in folder.glob("*.json")) if folder.is_dir() else ()
    return [stats for stats in found if isinstance(stats, dict)]


def open_progress(layout: Layout) -> list[dict[str, Any]]:
    """Progress of the shards being answered."""
    folder = layout.progress("x").parent
    found = (read_json_or_none(path) for path in folder.glob("*.json")) if folder.is_dir() else ()
    return [progress for progress in found if isinstance(progress, dict)]


def outcome_counts(layout: Layout) -> tuple[int, int]:
    """(accepted, rejected) prompts of the run so far, over finished and open shards."""
    parts = [*finished_stats(layout), *open_progress(layout)]
    return sum(part["accepted"] for part in parts), sum(part["rejected"] for part in parts)


def describe_shard(config: Config, stats: dict[str, Any]) -> str:
    """One line about a finished shard: what it holds, how fast it was, how far the run is."""
    layout = config.layout
    text = f"shard {stats['shard']}: {stats['accepted']} answers"
    if stats["rejected"]:
        text += f", {stats['rejected']} rejects"
    if stats["requests_sent"]:
        rate = stats["usage"].get("completion_tokens", 0) / max(stats["seconds"], 1e-3)
        text += f" in {stats['seconds']:.1f} s, {rate:.0f} tok/s"
    else:
        text += " from its journal"
    index = read_json_or_none(layout.prompt_index)
    total = len(index["shards"]) if index else 0
    finished = finished_stats(layout)
    return f"{text}  [{len(finished)} of {total} shards{_eta(layout, finished, total)}]"


def _eta(layout: Layout, finished: list[dict[str, Any]], total: int) -> str:
    """Time left at the pace since this session began; empty while there is no pace, or nothing left."""
    owner = read_owner(layout)
    since = [
        stats for stats in finished if owner and stats["finished_at"] >= owner.started_at and stats["requests_sent"]
    ]
    left = total - len(finished)
    if not owner or not since or left <= 0:
        return ""
    seconds = (time.time() - owner.started_at) / len(since) * left
    return f", about {human_time(seconds)} left"


def human_time(seconds: float) -> str:
    """A duration as a person would say it: 40 s, 12 min, 3.5 h, 2.1 d."""
    for unit, size in (("d", 86400), ("h", 3600)):
        if seconds >= size * 1.5:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 0):.0f} s"
