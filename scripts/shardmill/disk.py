"""Room on the results' disk: looked at before a run, and watched during it.

A disk that fills up loses no finished answer, but it costs the ones in flight. So a run stops sending while there is
still room for those.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .config import Config
from .errors import UserError
from .files import read_json_or_none
from .layout import Layout

GB = 1_000_000_000
# Bytes on disk for each byte of the journal: itself, the shard's completions and the dataset, both compressed.
COPIES = 1.8
BYTES_PER_TOKEN = 4.5  # of text, with a record's other fields


def no_room(config: Config) -> UserError | None:
    """Why nothing more should be sent, or None. A disk that cannot be asked says nothing."""
    try:
        disk = os.statvfs(_existing(config.layout.root))
    except OSError:
        return None
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    own = config.run.min_free_disk
    least = min(GB, total / 100) if own is None else own * GB
    if free >= least:
        return None
    return UserError(
        f"only {_size(free)} of the disk are free, and {_size(least)} are to stay so (run.min_free_disk)",
        where=str(config.layout.root),
        hint="make room, then run the same command again; all finished answers are kept",
    )


def room_needed(config: Config, pending: int) -> tuple[float, float]:
    """(bytes that answers to so many prompts will take, bytes that are free), by the run's own answers if it has any.

    Before the first answer every one counts as if it took all of `sampling.max_tokens`: an upper bound.
    """
    layout = config.layout
    per_prompt = _measured(layout) or config.sampling.max_tokens * BYTES_PER_TOKEN
    disk = os.statvfs(_existing(layout.root))
    return pending * per_prompt * COPIES, disk.f_bavail * disk.f_frsize


def warning(config: Config, pending: int) -> str | None:
    """What to say before a run whose answers may not find room, or None."""
    needed, free = room_needed(config, pending)
    if needed <= free:
        return None
    kind = "about" if _measured(config.layout) else "up to"
    return (
        f"the answers will take {kind} {_size(needed)}, and {_size(free)} of the disk are free ({config.layout.root})"
    )


def _measured(layout: Layout) -> float | None:
    """Journal bytes per prompt, over the shards that are finished."""
    size = prompts = 0
    for path in layout.stats("x").parent.glob("*.json"):
        stats: Any = read_json_or_none(path)
        journal = layout.journal(path.stem)
        if stats and journal.exists():
            size, prompts = size + journal.stat().st_size, prompts + stats["prompts"]
    return size / prompts if prompts else None


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _size(count: float) -> str:
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / 1e6:.1f} MB"
