"""The beginning and the end of a run, in the process that owns it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from . import contract, mirror
from .config import Config
from .errors import UserError
from .files import read_json_or_none, write_bytes
from .owner import RunLock
from .pool_plan import holds, live_pools

_held: dict[str, RunLock] = {}
_mirrors: dict[str, subprocess.Popen[bytes]] = {}
_began_at = time.time()


def begin(config: Config) -> None:
    """Take the run for this process, lock its contract, and make its api key; nothing if this process has it.

    Raises:
        UserError: if another live run owns it.
    """
    layout, pools = config.layout, config.pools
    if str(layout.home) in _held:
        return
    leaves_to_pools = bool(pools.shards and not pools.only)
    if not pools.shards and (live := live_pools(layout)):
        raise UserError(
            f"pools of this run are at work: {', '.join(str(pool.pool) for pool in live)}",
            where=f"run {layout.run}",
            hint="cancel their jobs or wait for them, or go on with the same `pools.shards`",
        )
    lock = _held[str(layout.home)] = RunLock.acquire(layout, leaves_to_pools=leaves_to_pools)
    if count := mirror.restore(config):
        lock.release()
        print(f"shardmill: {count} files brought back from {config.output.mirror}", file=sys.stderr, flush=True)
        # What came back changes the plan, so this process begins once more, as the same command.
        os.execv(sys.executable, [sys.executable, *sys.argv])
    contract.check(config)
    if not pools.only:
        contract.lock(config)
    _place_api_key(config)
    _sweep(config)
    if process := mirror.start(config):
        _mirrors[str(layout.home)] = process


def _place_api_key(config: Config) -> None:
    """The run's own key, made once; for external servers the key that the user names, or none."""
    path = config.layout.api_key
    if config.engine.kind != "external":
        if not _is_secret(path):
            write_bytes(path, secrets.token_urlsafe(32).encode(), mode=0o600)
        return
    name = config.engine.external.api_key_env
    if not name:
        path.unlink(missing_ok=True)
    elif key := os.environ.get(name, "").strip():
        write_bytes(path, key.encode(), mode=0o600)
    else:
        raise UserError(f"${name} is not set", where="engine.external.api_key_env", hint=f"export {name}=...")


def _is_secret(path: Path) -> bool:
    """Whether a key is there that nobody else could read; one that was lost to damage would leave the servers open."""
    try:
        status = path.stat()
        return not status.st_mode & 0o077 and status.st_uid == os.getuid() and bool(path.read_bytes().strip())
    except OSError:
        return False


def _sweep(config: Config) -> None:
    """Remove the half-written files that killed jobs left; nobody else writes them while this process owns them."""
    layout, pools = config.layout, config.pools
    own = [layout.progress("x").parent, layout.canary.parent]
    for folder in own if pools.only else [*own, layout.dataset.parent]:
        for path in folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)
    for path in layout.progress("x").parent.glob("*.json"):
        path.unlink(missing_ok=True)
    for file in (layout.completions("x"), layout.rejects("x"), layout.stats("x")):
        for path in file.parent.glob(".*.tmp"):
            shard = path.name[1:].partition(".")[0]
            # Of a run over several machines, each pool sees to its own: others may be writing theirs.
            if not pools.shards or (pools.only and shard.isdigit() and holds(pools.only, shard)):
                path.unlink(missing_ok=True)


def end(config: Config) -> list[str]:
    """Give the run up, and leave nothing behind outside its folder; returns warnings."""
    layout = config.layout
    process = _mirrors.pop(str(layout.home), None)
    problem = mirror.finish(config, process) if process else None
    if lock := _held.pop(str(layout.home), None):
        with contextlib.suppress(OSError):
            os.unlink(layout.ledger)
        lock.release()
    return [problem] if problem else []


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
