"""How far a run is, from its files, with a memory so that looking again is cheap."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import read_json_or_none
from ..layout import Layout
from ..run_state import open_progress
from .history import pools_of
from .samples import iter_values


@dataclass
class Progress:
    """A run's prompts and shards. Prompts are usable ones; `done` is accepted and rejected together."""

    shards: int = 0
    shards_done: int = 0
    shards_open: int = 0
    prompts: int = 0
    done: int = 0
    accepted: int = 0
    rejected: int = 0
    unusable: int = 0
    in_flight: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    usage: Counter[str] = field(default_factory=Counter)
    requests_sent: int = 0
    retries: int = 0
    shard_means: list[float] = field(default_factory=list)  # tokens per completion of each finished shard
    bytes_per_prompt: float = 0.0  # of journal, shard files and dataset together
    last_finished_at: float = 0.0


class ProgressReader:
    """Reads a run's progress; statistics that did not change are not read again."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[str, tuple[int, dict[str, Any]]] = {}
        self._index: tuple[int, dict[str, Any]] | None = None

    def stats(self) -> dict[str, dict[str, Any]]:
        """Statistics of the finished shards, by shard."""
        found: dict[str, tuple[int, dict[str, Any]]] = {}
        with contextlib.suppress(OSError), os.scandir(self._layout.root / "stats") as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.name.endswith(".json"):
                    continue
                stamp, known = entry.stat().st_mtime_ns, self._known.get(entry.name)
                if known is None or known[0] != stamp:
                    value = read_json_or_none(Path(entry.path))
                    if not isinstance(value, dict) or "accepted" not in value:
                        continue
                    known = (stamp, value)
                found[entry.name] = known
        self._known = found
        return {value["shard"]: value for _, value in found.values()}

    def index(self) -> dict[str, Any]:
        """The prompt index; empty before the prompts are cut."""
        with contextlib.suppress(OSError):
            stamp = self._layout.prompt_index.stat().st_mtime_ns
            if self._index is None or self._index[0] != stamp:
                self._index = (stamp, read_json_or_none(self._layout.prompt_index) or {})
            return self._index[1]
        return {}

    def read(self) -> Progress:
        """Where the run stands now."""
        stats, index = self.stats(), self.index()
        result = Progress(
            shards=len(index.get("shards", ())), prompts=index.get("usable", 0), unusable=index.get("unusable", 0)
        )
        known = {entry["name"] for entry in index.get("shards", ())}
        stored = 0
        for shard, value in stats.items():
            if known and shard not in known:
                continue
            result.shards_done += 1
            result.done += value["prompts"]
            result.accepted += value["accepted"]
            result.rejected += value["rejected"]
            result.requests_sent += value.get("requests_sent", 0)
            result.retries += value.get("retries", 0)
            result.verdicts.update(value.get("verdicts", {}))
            result.finish_reasons.update(value.get("finish_reasons", {}))
            result.usage.update(value.get("usage", {}))
            result.last_finished_at = max(result.last_finished_at, value.get("finished_at", 0.0))
            if value["accepted"] and (tokens := value.get("usage", {}).get("completion_tokens")):
                result.shard_means.append(tokens / value["accepted"])
            stored += 2 * sum(value.get(part, {}).get("compressed_bytes", 0) for part in ("completions", "rejects"))
        self._add_open(result, stats)
        journals = _sizes(self._layout.root / "journals")
        if result.done:
            result.bytes_per_prompt = (stored + journals) / result.done
        return result

    def _add_open(self, result: Progress, stats: dict[str, Any]) -> None:
        """Shards that are being answered, and those that were when the run stopped."""
        machines = [self._layout, *map(self._layout.of_pool, pools_of(self._layout))]
        live = {value.get("shard"): value for machine in machines for value in open_progress(machine)}
        for shard, value in live.items():
            if shard in stats:
                continue
            result.shards_open += 1
            result.done += value.get("done", 0)
            result.accepted += value.get("accepted", 0)
            result.rejected += value.get("rejected", 0)
            result.in_flight += value.get("in_flight", 0)
        for machine in machines:
            for shard in _stems(machine.samples / "shards") - stats.keys() - live.keys():
                result.done += _last_done(machine.shard_samples(shard))


def _stems(folder: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return {name[: -len(".jsonl")] for name in os.listdir(folder) if name.endswith(".jsonl")}
    return set()


def _last_done(path: Path) -> int:
    """Settled prompts of a shard by the last word of its job."""
    with contextlib.suppress(OSError), path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - 16384))
        values = list(iter_values(handle.read().split(b"\n")))
        return values[-1].get("d", 0) if values else 0
    return 0


def _sizes(folder: Path) -> int:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(".jsonl"))
    return 0
