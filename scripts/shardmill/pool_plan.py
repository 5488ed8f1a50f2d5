"""Cutting the shards into pools, one for each job of a cluster, and the proof that a pool has made its own.

A pool is named by the shards it may hold, "00050-00099". So pools of different cuts cannot be taken for
each other, whether two pools could write the same shard can be seen from their names, and appending
prompts renames none.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .config import Config
from .errors import UserError
from .files import iter_zstd_chunks, read_json, read_json_or_none, write_json
from .layout import Layout
from .owner import owner_is_alive
from .prompts.survey import shard_name


def pool_of(number: int, size: int) -> str:
    """Name of the pool, `size` shards long, that shard `number` belongs to."""
    first = number // size * size
    return f"{shard_name(first)}-{shard_name(first + size - 1)}"


def cut(shards: Sequence[str], size: int) -> dict[str, list[str]]:
    """The pools in order, each with its shards. No pools for size 0."""
    pools: dict[str, list[str]] = {}
    for shard in shards if size else ():
        pools.setdefault(pool_of(int(shard), size), []).append(shard)
    return pools


def holds(pool: str, shard: str) -> bool:
    """Whether a shard belongs to a pool."""
    first, last = _range(pool)
    return first <= int(shard) <= last


def overlaps(pool: str, other: str) -> bool:
    """Whether two pools, of different cuts, have a shard in common."""
    (first, last), (other_first, other_last) = _range(pool), _range(other)
    return first <= other_last and other_first <= last


def _range(pool: str) -> tuple[int, int]:
    first, last = pool.split("-")
    return int(first), int(last)


def live_pools(layout: Layout) -> list[Layout]:
    """Layouts of the run's pools that a job works on now."""
    pools = (layout.of_pool(path.parent.name) for path in sorted(layout.pools.glob("*-*/run.lock")))
    return [pool for pool in pools if owner_is_alive(pool)]


def write_proof(config: Config, pool: str, shards: Sequence[str]) -> dict[str, Any]:
    """Read a pool's files back and record what they are; returns the record.

    Raises:
        UserError: if one of them is not what its shard's statistics say.
    """
    layout = config.layout
    proof = {
        "pool": pool,
        "shards": {shard: _proven(layout, shard) for shard in shards},
        "host": platform.node(),
        "finished_at": round(time.time(), 3),
    }
    write_json(layout.pool_proof(pool), proof)
    return proof


def _proven(layout: Layout, shard: str) -> dict[str, Any]:
    stats = read_json(layout.stats(shard))
    for path, part in ((layout.completions(shard), stats["completions"]), (layout.rejects(shard), stats["rejects"])):
        size = sum(map(len, iter_zstd_chunks(path)))  # unpacking checks each frame's own checksum
        if (size, path.stat().st_size) != (part["bytes"], part["compressed_bytes"]):
            raise UserError(
                f"is not what shard {shard} wrote",
                where=str(path),
                hint="remove it and run again; its answers are in the journal",
            )
    return {
        "prompts": stats["prompts"],
        "bytes": stats["completions"]["compressed_bytes"],
        "rejects_bytes": stats["rejects"]["compressed_bytes"],
        "content_sha256": stats["completions"]["content_sha256"],
    }


def proof_problem(layout: Layout, pool: str, shards: Sequence[str]) -> str | None:
    """Why a pool's proof does not hold, by the sizes of files alone; None if it does, or if there is none."""
    path = layout.pool_proof(pool)
    if not path.exists():
        return None
    proof = read_json_or_none(path)
    known = proof.get("shards") if isinstance(proof, dict) else None
    if not isinstance(known, dict):
        return "its proof is damaged"
    for shard in shards:
        if shard not in known:
            return f"shard {shard} is new"
        for file, key in ((layout.completions(shard), "bytes"), (layout.rejects(shard), "rejects_bytes")):
            size = _size(file)
            if size != known[shard].get(key):
                return f"{file} " + ("is missing" if size is None else "has changed")
    return None


def clear_damaged(layout: Layout, shards: Sequence[str]) -> list[str]:
    """Remove shard files of another size than was written, so that they are made again; returns the shards."""
    damaged = []
    for shard in shards:
        stats = read_json_or_none(layout.stats(shard))
        for file, key in ((layout.completions(shard), "completions"), (layout.rejects(shard), "rejects")):
            size = _size(file)
            if stats and size is not None and size != stats[key]["compressed_bytes"]:
                file.unlink(missing_ok=True)
                damaged.append(shard)
    return list(dict.fromkeys(damaged))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
