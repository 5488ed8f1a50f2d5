"""One pool's job: the same pipeline once more, on the machine that the job got, for the pool's shards alone.

What keeps two jobs from writing one file: a pool's job waits until no older job of its shards is left (it
cancels them where Slurm knows them), and the inner run holds the pool's lock. What a killed job leaves is
cleared at the start of the next: files of the wrong size, readiness files of dead servers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import slurm
from .config import Config
from .engine_env import build_environment
from .errors import UserError
from .files import read_json_or_none, write_json
from .launch import ANY_HOST
from .layout import Layout
from .load_config import load_config
from .logs import get_logger
from .model.staging import stage
from .owner import STALE_SECONDS, owner_is_alive, read_owner
from .planning import Plan, make_plan
from .pool_plan import clear_damaged, live_pools, overlaps, write_proof
from .process import is_alive, port_is_free, stop, wait_until
from .supervisor_state import read_status

log = get_logger(__name__)

SNAKEFILE = Path(__file__).resolve().parents[2] / "Snakefile"
TAKE_OVER_SECONDS = 600.0  # for an older job to be gone; a node that died is noticed within that
LONGEST_LINGER = 5.0  # seconds: nobody comes back to the servers of a job that is gone
_TICK = 0.5
_MOST_SLOTS = 64
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, prctl(2)


class PoolJob:
    """Makes one pool's shards, as far as its job's time goes.

    Args:
        config: of the whole run.
        pool: the pool's name.
        cores: shards answered at once.
    """

    def __init__(self, config: Config, pool: str, cores: int) -> None:
        self.config, self.pool, self.cores = config, pool, cores
        self.layout = config.layout.of_pool(pool)
        self.job = slurm.job_id()
        self._started = time.time()
        self._told_to_stop = False
        self._inner: subprocess.Popen[bytes] | None = None
        self._is_over_time = False
        self._before: dict[str, int] = {}
        self._again_in_vain = False

    def run(self) -> dict[str, Any]:
        """Make the shards; returns the proof that they are made.

        Raises:
            UserError: if some are not: a shard failed, or time was up and the job could not be queued again.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        self._take_over()
        self._before, last = self._work_left(), read_json_or_none(self.layout.pool_job) or {}
        self._again_in_vain = last.get("left") == self._before
        write_json(self.layout.pool_job, {"job": self.job, "host": socket.gethostname(), "left": self._before})
        for shard in clear_damaged(self.layout, self._plan().shards):
            log.info("pool %s: shard %s is made again: its files are damaged", self.pool, shard)
        plan = self._plan()
        if plan.pending:
            with self._own_settings() as config:
                self._prepare_machine(config, plan)
                try:
                    self._run_inner()
                finally:
                    self._stop_servers()
        left = self._plan().pending
        if not left:
            return write_proof(self.config, self.pool, plan.shards)
        raise self._unfinished(sorted(left))

    def _plan(self) -> Plan:
        settings = self.config.model_dump()
        settings["pools"]["only"] = self.pool
        return make_plan(settings)

    # Before the run

    def _take_over(self) -> None:
        """Wait until nothing works on this pool's shards any more, and see to that where it can be done.

        Raises:
            UserError: if somebody goes on working on them.
        """
        root = self.config.layout
        owner = read_owner(root)
        if owner and not owner.leaves_to_pools and owner_is_alive(root):
            raise UserError(f"a run without pools makes these shards: {owner}", where=f"pool {self.pool}")
        cancelled: set[str] = set()
        deadline = time.monotonic() + TAKE_OVER_SECONDS
        while others := self._others():
            for layout, job in others:
                if job and job not in cancelled:
                    log.info("pool %s: cancelling job %s, which works on its shards (%s)", self.pool, job, layout.pool)
                    slurm.cancel(job)
                    cancelled.add(job)
            if time.monotonic() > deadline:
                raise UserError(
                    f"is being worked on by another job ({', '.join(job or str(lay.lock) for lay, job in others)})",
                    where=f"pool {self.pool}",
                    hint=f"end that job; the lock of a machine that is gone counts for {STALE_SECONDS:.0f} s",
                )
            time.sleep(_TICK)

    def _others(self) -> list[tuple[Layout, str | None]]:
        """Who else works on shards of this pool, with the Slurm job if it has one that is not this one."""
        found: list[tuple[Layout, str | None]] = []
        for layout in live_pools(self.config.layout):
            if overlaps(self.pool, str(layout.pool)):
                record = read_json_or_none(layout.pool_job) or {}
                found.append((layout, record.get("job") if record.get("job") != self.job else None))
        # A job may also be past its run, or before it: then it holds no lock.
        record = read_json_or_none(self.layout.pool_job) or {}
        other = record.get("job")
        if self.job and other and other != self.job and slurm.is_queued(other):
            if int(other) > int(self.job):
                raise UserError(f"job {other}, which is newer, has these shards", where=f"pool {self.pool}")
            if not found:
                found.append((self.layout, other))
        return found

    @contextlib.contextmanager
    def _own_settings(self) -> Iterator[Config]:
        """The run's settings with what this machine gives: its GPUs, and ports that no other pool has."""
        settings = self.config.model_dump()
        settings["pools"]["only"] = self.pool
        servers = settings["servers"]
        servers["linger"] = min(servers["linger"], LONGEST_LINGER)
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
        if visible and not servers["gpus"] and servers["count"] is None:
            servers["gpus"] = list(range(len(visible) - len(visible) % servers["gpus_per_server"]))
        count = load_config(settings).server_count
        with port_slot(servers["port"], count) as port:
            servers["port"] = port
            config = load_config(settings)
            if (nccl := settings["engine"]["sglang"]["nccl_port"]) is not None:
                settings["engine"]["sglang"]["nccl_port"] = nccl + port - self.config.servers.port
                config = load_config(settings)
            write_json(self.layout.pool_config, settings, mode=0o600)
            yield config

    def _prepare_machine(self, config: Config, plan: Plan) -> None:
        """What belongs to the machine, and so may be made by another pool on it at this moment; both wait for it."""
        for path in self.layout.ready("x").parent.glob("*.ready"):
            path.unlink(missing_ok=True)
        if plan.in_need:
            if plan.engine_environment:
                build_environment(config)
            if plan.staged_manifest:
                stage(config)

    # The run

    def _run_inner(self) -> None:
        """Run the pipeline for this pool until it ends, or its time does."""
        ends = self._end_time()
        wind_down = None if ends is None else ends - min(self.config.pools.wind_down, (ends - self._started) / 2)
        stop_at = None if ends is None else ends - min(self.config.pools.margin, (ends - self._started) / 4)
        if self._told_to_stop:
            return
        inner = self._inner = subprocess.Popen(
            self._command(),
            env=_clean_environment(),
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 (there are no threads here)
        )
        if self._told_to_stop:  # between the last look and the start of the inner run there was nobody to pass it on to
            inner.send_signal(signal.SIGTERM)
        while inner.poll() is None:
            now = time.time()
            if wind_down is not None and now >= wind_down and not self._is_over_time:
                log.info("pool %s: its job ends soon; no more shards are begun", self.pool)
                self._is_over_time = True
                # To it alone: so Snakemake begins nothing new and waits for what runs.
                inner.send_signal(signal.SIGTERM)
            if stop_at is not None and now >= stop_at:
                log.info("pool %s: its job ends; the shards that run are stopped", self.pool)
                stop_at = None
                _signal_group(inner, signal.SIGTERM)
            time.sleep(_TICK)
        # Jobs that Snakemake left behind see that it is gone, and end; nothing may outlive this job.
        wait_until(lambda: not _signal_group(inner, 0), 30, interval=_TICK)
        _signal_group(inner, signal.SIGKILL)

    def _command(self) -> list[str]:
        quiet = ["--quiet", "host", "rules", "progress"]
        triggers = ["--rerun-triggers", "mtime", "params", "software-env"]
        profiles = ["--profile", "none", "--workflow-profile", "none", "--executor", "local"]
        again = ["--nolock", "--rerun-incomplete", "--keep-going", "--latency-wait", "30", "--scheduler", "greedy"]
        return [
            *(sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE)),
            *("--configfile", str(self.layout.pool_config), "--cores", str(self.cores)),
            *(*profiles, *again, *triggers, *quiet),
        ]

    def _end_time(self) -> float | None:
        """When this job will be ended, seconds since the epoch; None if nothing says so."""
        if self.job and (ends := slurm.end_time(self.job)):
            return ends
        return self._started + 60 * self.config.pools.minutes if self.config.pools.minutes else None

    def _pass_on(self, number: int, frame: object) -> None:
        self._told_to_stop = True
        if self._inner:
            _signal_group(self._inner, number)

    # After the run

    def _stop_servers(self) -> None:
        """Take back the leases, and wait until the servers are gone: the next job may want their GPUs."""
        supervisors = []
        for path in self.layout.ready("x").parent.glob("*.status.json"):
            status = read_status(self.layout, path.name.removesuffix(".status.json"))
            if status and (supervisor := status.identity("supervisor")):
                supervisors.append(supervisor)
        for path in self.layout.ready("x").parent.glob("*.ready"):
            path.unlink(missing_ok=True)
        patience = self.config.servers.stop_timeout + LONGEST_LINGER + 10
        wait_until(lambda: not any(map(is_alive, supervisors)), patience, interval=0.1)
        for supervisor in supervisors:
            stop(supervisor, term_timeout=patience)

    def _work_left(self) -> dict[str, int]:
        """Bytes of the journals of the shards that are to be made: what two starts in vain have in common."""
        return {shard: _size(self.layout.journal(shard)) for shard in sorted(self._plan().pending)}

    def _unfinished(self, left: list[str]) -> UserError:
        """Hand the rest back, or say why it stays undone."""
        where, done = f"pool {self.pool}", len(self._before) - len(left)
        what = f"{len(left)} of its shards are not made yet ({', '.join(left[:5])}{', ...' if len(left) > 5 else ''})"
        again = "finished answers are kept; the same command goes on"
        if self._told_to_stop:
            return UserError(f"stopped; {what}", where=where, hint=again)
        if not self._is_over_time:
            return UserError(what, where=where, hint=f"see {self.layout.log('completions')}; {again}")
        if self._again_in_vain and self._work_left() == self._before:
            hint = f"give the job more time; see {self.layout.log('servers')}"
            return UserError(f"two jobs in a row had no time to get anything done; {what}", where=where, hint=hint)
        log.info("pool %s: %d shards made, %d handed back; the job queues again", self.pool, done, len(left))
        if self.job:
            slurm.requeue(self.job)
        return UserError(f"time is up; {what}", where=where, hint=again)


@contextlib.contextmanager
def port_slot(first: int, count: int) -> Iterator[int]:
    """The first of `count` free ports, from `first` on, that no other pool of this machine takes meanwhile.

    Pools that share a machine share its ports, so the claim is an abstract Unix socket: it belongs to the
    same network namespace as the ports, and to nobody as soon as its holder is dead.

    Raises:
        UserError: if there are none.
    """
    for slot in range(_MOST_SLOTS):
        port = first + slot * count
        if port + count - 1 > 65535:
            break
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0shardmill-ports-{port}-{count}")
            except OSError:
                continue
            if all(port_is_free(ANY_HOST, number) for number in range(port, port + count)):
                yield port
                return
    raise UserError(f"no {count} free ports in a row from {first} on", where="servers.port")


def _clean_environment() -> dict[str, str]:
    """Without what would give the inner run the outer one's profile."""
    return {name: value for name, value in os.environ.items() if name != "SNAKEMAKE_PROFILE"}


def _die_with_parent() -> None:
    """Kill the inner run if this process is killed; its jobs and servers then find their owner dead."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Signal a process group; False if nobody is left in it."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
