"""The beginning and the end of a run, in the process that owns it."""

from __future__ import annotations

import contextlib
import os
import secrets
import time

from . import contract
from .config import Config
from .errors import UserError
from .files import read_json_or_none, write_bytes
from .layout import Layout
from .owner import RunLock

_held: dict[str, RunLock] = {}
_began_at = time.time()


def begin(config: Config) -> None:
    """Take the run for this process, lock its contract, and make its api key.

    Raises:
        UserError: if another live run owns it.
    """
    layout = config.layout
    _held[str(layout.root)] = RunLock.acquire(layout)
    contract.check(config)
    contract.lock(config)
    _place_api_key(config)
    _sweep(layout)


def _place_api_key(config: Config) -> None:
    """The run's own key, made once; for external servers the key that the user names, or none."""
    path = config.layout.api_key
    if config.engine.kind != "external":
        if not path.exists():
            write_bytes(path, secrets.token_urlsafe(32).encode(), mode=0o600)
        return
    name = config.engine.external.api_key_env
    if not name:
        path.unlink(missing_ok=True)
    elif key := os.environ.get(name, "").strip():
        write_bytes(path, key.encode(), mode=0o600)
    else:
        raise UserError(f"${name} is not set", where="engine.external.api_key_env", hint=f"export {name}=...")


def _sweep(layout: Layout) -> None:
    """Remove the half-written files that killed jobs left; nobody else writes here while this process owns the run."""
    for folder in ("completions", "rejected", "stats", "progress", "dataset", "quality"):
        for path in (layout.root / folder).glob(".*.tmp"):
            path.unlink(missing_ok=True)
    for path in (layout.root / "progress").glob("*.json"):
        path.unlink(missing_ok=True)


def end(config: Config) -> None:
    """Give the run up, and leave nothing behind outside its folder."""
    layout = config.layout
    with contextlib.suppress(OSError):
        os.unlink(layout.ledger)
    if lock := _held.pop(str(layout.root), None):
        lock.release()


def closing_line(config: Config) -> str | None:
    """What was made and where, in one line; None if this session made no dataset."""
    layout = config.layout
    manifest = read_json_or_none(layout.manifest)
    if not manifest or manifest["times"]["merged"] < _began_at:
        return None
    counts, dataset = manifest["counts"], manifest["dataset"]
    bad = counts["rejected"] + counts["unusable"]
    return (
        f"shardmill: {counts['accepted']} completions and {bad} rejects of {counts['input']} prompts, "
        f"proven complete, {_megabytes(dataset['compressed_bytes'])} in {layout.dataset}"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
