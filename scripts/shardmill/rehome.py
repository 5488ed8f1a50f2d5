"""Carrying finished answers over when prompts move between shards.

After a new cut, or a reordered or filtered input, an answer may lie in the journal of a shard that no
longer holds its prompt. Such entries are copied to the journal of the shard that does. Nothing is
taken away, and an entry that is already there is not copied again, so this may be killed at any moment.
"""

from __future__ import annotations

from typing import Any

import orjson

from .files import iter_zstd_lines, read_json_or_none, write_json
from .journal import Journal, decode_entry, encode_entry
from .layout import Layout
from .logs import get_logger

log = get_logger(__name__)


def rehome(layout: Layout, index: dict[str, Any]) -> int:
    """Bring every journal entry to the shard that holds its prompt; returns how many were copied.

    Memory: about 150 bytes per prompt while anything has to move, nothing otherwise.
    """
    new_cut = {entry["name"]: entry["ids_digest"] for entry in index["shards"]}
    old_cut = read_json_or_none(layout.journal_cut) or {}
    journals = sorted(path for path in layout.journal_cut.parent.glob("*.jsonl") if path.stat().st_size)
    moved = [path for path in journals if old_cut.get(path.stem) != new_cut.get(path.stem)]
    copied = 0
    if moved:
        homes = _homes(layout, index)
        for path in moved:
            copied += _copy_strangers(layout, path.stem, homes)
        log.info("%d finished answers were carried over to the shards that now hold their prompts", copied)
    if new_cut != old_cut:
        write_json(layout.journal_cut, new_cut, indent=False)
    return copied


def remove_strays(layout: Layout, index: dict[str, Any]) -> int:
    """Remove the files of shards that are no more, so that nobody takes them for part of the result.

    Their journals stay: what was answered is kept, whatever becomes of its prompt. Returns the number of files.
    """
    names = {entry["name"] for entry in index["shards"]}
    strays = [
        path
        for make in (layout.completions, layout.rejects, layout.stats)
        for path in make("0").parent.glob("[0-9]*")
        if path.name.split(".")[0] not in names
    ]
    for path in strays:
        path.unlink(missing_ok=True)
    return len(strays)


def _homes(layout: Layout, index: dict[str, Any]) -> dict[str, str]:
    """Shard of every prompt id."""
    return {
        orjson.loads(line)["id"]: entry["name"]
        for entry in index["shards"]
        for line in iter_zstd_lines(layout.prompt_shard(entry["name"]))
    }


def _copy_strangers(layout: Layout, shard: str, homes: dict[str, str]) -> int:
    """Copy the entries of one journal whose prompts live in other shards."""
    strangers: dict[str, list[dict[str, Any]]] = {}
    with open(layout.journal(shard), "rb") as handle:
        for raw in handle:
            entry = decode_entry(raw.rstrip(b"\n"))
            home = homes.get(entry["id"]) if entry else None
            if entry and home and home != shard:
                strangers.setdefault(home, []).append(entry)
    copied = 0
    for home, entries in strangers.items():
        with Journal(layout.journal(home)) as journal:
            for entry in entries:
                if encode_entry(entry) not in map(encode_entry, journal.entries(entry["id"], entry["fingerprint"])):
                    journal.append(entry)
                    copied += 1
    return copied
