"""A repo of the hub: watching the process that downloads it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import orjson

from ..errors import UserError
from ..logs import get_logger
from .hub_files import FetchJob
from .locks import FileLock
from .show import Progress, human_bytes

logger = get_logger(__name__)

MAX_RESTARTS = 5
RESTART_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0)
START_TIMEOUT_S = 120.0
"""Seconds for the process to import its libraries, which a slow network disk can draw out."""


@dataclass
class _Attempt:
    """How one process ended, and how far it came."""

    finished: bool = False
    commit: str = ""
    best: int = 0
    error: dict[str, Any] = field(default_factory=dict)


def fetch_repo(job: FetchJob, lock: FileLock, *, stall: float, where: str, on_commit: Callable[[str], None]) -> str:
    """Download what `job` names, through stalls, crashes and short outages. Returns the commit.

    Args:
        job: what to download.
        lock: the store's lock, held; the process inherits it.
        stall: seconds without a byte received or hashed until the process is killed and started again.
        where: for error messages.
        on_commit: called with the commit as soon as it is known. From then on every restart asks for
            that commit, so that a branch that moves in between changes nothing.

    Raises:
        UserError: what cannot be helped, or `MAX_RESTARTS` restarts in a row that brought nothing new.
    """
    failures, best = 0, -1
    while True:
        attempt = _run_once(job, lock, stall, on_commit)
        if attempt.commit:
            job = replace(job, revision=attempt.commit)
        if attempt.finished:
            return attempt.commit
        what, hint = attempt.error["what"], attempt.error["hint"]
        if not attempt.error["retry"]:
            raise UserError(what, where=where, hint=hint)
        failures = failures + 1 if attempt.best <= best else 1
        best = max(best, attempt.best)
        if failures > MAX_RESTARTS:
            raise UserError(f"{what}, after {MAX_RESTARTS} restarts that brought nothing new", where=where, hint=hint)
        delay = RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S)) - 1]
        logger.warning("%s: %s; going on in %.0f s (restart %d of %d)", where, what, delay, failures, MAX_RESTARTS)
        time.sleep(delay)


def _run_once(job: FetchJob, lock: FileLock, stall: float, on_commit: Callable[[str], None]) -> _Attempt:
    """One process from start to end."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardmill.model.fetch", job.to_json()],
            stdin=subprocess.PIPE,  # its end tells the process that we are gone
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(),
            pass_fds=[lock.fileno()],
        )
        try:
            attempt = _watch(process, stall, on_commit)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                pipe.close()
        if not attempt.finished and not attempt.error:
            last = _last_line(errors)
            what = f"the download process ended with code {process.returncode}" + (f" ({last})" if last else "")
            attempt.error = {"what": what, "hint": "run again; what has come is kept", "retry": True}
        return attempt


def _environment() -> dict[str, str]:
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, os.environ.get("PYTHONPATH", "")]
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return {**quiet, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _watch(process: subprocess.Popen[bytes], stall: float, on_commit: Callable[[str], None]) -> _Attempt:
    """Follow a process's events until it ends, or until it moves nothing for `stall` seconds."""
    events: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read_events, args=(process.stdout, events), daemon=True).start()
    attempt, progress, done = _Attempt(), None, 0
    deadline = time.monotonic() + max(START_TIMEOUT_S, stall)
    while True:
        try:
            event = events.get(timeout=min(1.0, max(0.01, deadline - time.monotonic())))
        except queue.Empty:
            if progress:
                progress.update(done)
            if time.monotonic() > deadline:
                what = f"the download stood still for {stall:g} s at {human_bytes(done)}"
                attempt.error = {"what": what, "hint": "check the network and run again", "retry": True}
                return attempt
            continue
        if event is None:
            return attempt
        # Only what moves bytes sends events, apart from the first ones, which say that it started.
        deadline = time.monotonic() + stall
        kind = event.pop("event")
        if kind == "commit":
            attempt.commit = event["commit"]
            on_commit(attempt.commit)
        elif kind == "progress":
            done = event["done"]
            attempt.best = max(attempt.best, done)
            progress = progress or Progress(logger, "downloading the model", event["total"], start=done)
            progress.update(done)
        elif kind == "error":
            attempt.error = event
        elif kind == "done":
            attempt.finished = True
            if progress:
                progress.finish(done)


def _read_events(pipe: IO[bytes], events: queue.Queue[dict[str, Any] | None]) -> None:
    try:
        for line in pipe:
            events.put(orjson.loads(line))
    except (ValueError, OSError):
        pass  # cut off by a kill, or closed by us: either way it was the last
    finally:
        events.put(None)


def _last_line(errors: IO[bytes]) -> str:
    """The last line that a crashed process wrote, without the token."""
    errors.seek(0)
    lines = errors.read()[-4000:].decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if last:
        from huggingface_hub import get_token

        token = get_token()
        return last.replace(token, "***") if token else last
    return last
