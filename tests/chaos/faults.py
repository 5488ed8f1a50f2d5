"""Doing what the schedule says: kills and stops of live processes, and damage to files at rest."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.pipeline import Command, Workspace

from . import schedule
from .door import Door

JUNK = b'\x00\xff{"half": [1, 2\n\xe2\x82'


class Inflictor:
    """Inflicts faults on one run, and keeps count of those that hit something.

    Args:
        work: the run's folder.
        doors: those before its servers, if they are not its own.
    """

    def __init__(self, work: Workspace, doors: list[Door]) -> None:
        self.work, self.doors = work, doors
        self.done: list[str] = []
        self.journals_damaged = False
        self.crashes = 0  # engines that were killed or stopped, so that requests in flight count as crashed
        self._undo: list[Callable[[], None]] = []

    # Live

    def live(self, fault: schedule.Live, command: Command) -> None:
        """Wait for the fault's moment, and inflict it, unless the run ends before."""
        deadline = time.monotonic() + 60
        while fault.lines and self.work.journal_lines() < fault.lines:
            if command.process.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(0.02)
        until = time.monotonic() + fault.delay
        while time.monotonic() < until and command.process.poll() is None:
            time.sleep(0.02)
        if command.process.poll() is None and self._inflict(fault, command):
            self.done.append(fault.kind)

    def _inflict(self, fault: schedule.Live, command: Command) -> bool:  # noqa: PLR0912
        """Do it; says whether there was anything to do it to."""
        rng = random.Random(fault.draw)
        server = str(fault.server)
        match fault.kind:
            case "kill engine" | "kill supervisor" | "kill reaper":
                return self._signal([self._part(server, fault.kind.removeprefix("kill "))], signal.SIGKILL)
            case "kill all engines":
                return self._signal([self._part(name, "engine") for name in "01"], signal.SIGKILL)
            case "kill supervisor and reaper":
                return self._signal([self._part(server, part) for part in ("supervisor", "reaper")], signal.SIGKILL)
            case "kill shard job":
                jobs = self.jobs()
                return bool(jobs) and self._signal([rng.choice(jobs)], signal.SIGKILL)
            case "kill snakemake":
                command.kill_main()
                return True
            case "kill everything":
                return self.work.kill_everything() > 0
            case "SIGTERM to snakemake":
                command.kill_main(signal.SIGTERM)
                return True
            case "ctrl-c":
                command.signal_group(signal.SIGINT)
                return True
            case "stop engine (SIGSTOP)":
                return self._signal([self._part(server, "engine")], signal.SIGSTOP)
            case "stop supervisor for a while (SIGSTOP)":
                return self._pause(self._part(server, "supervisor"), fault.seconds)
            case "stop shard job for a while (SIGSTOP)":
                jobs = self.jobs()
                return bool(jobs) and self._pause(rng.choice(jobs), fault.seconds)
            case "remove readiness file":
                return _remove(self.work.path("servers", f"{server}.ready"))
            case "remove status file":
                return _remove(self.work.path("servers", f"{server}.status.json"))
            case "status file from the future" | "status file from the past":
                return self._move_status(server, 1e6 if "future" in fault.kind else -1e6)
            case "remove ledger":
                return all(map(_remove, self._ledgers()))
            case "damage ledger":
                return all(_scramble(path, rng) for path in self._ledgers())
            case "fill disk":
                self._fill_disk(fault.seconds if rng.random() < 0.6 else None, rng)
                return True
            case _ if self.doors:
                for door in self.doors if rng.random() < 0.3 else [self.doors[fault.server]]:
                    door.fault = fault.kind
                self._later(fault.seconds, self._open_doors)
                return True
        return False

    def end_of_round(self) -> None:
        """Lift what lasts, and wait until no job of the run writes any more."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        deadline = time.monotonic() + 60
        while self.jobs() and time.monotonic() < deadline:
            time.sleep(0.05)

    def jobs(self) -> list[psutil.Process]:
        """Scripts of rules that run."""
        found = []
        for process in self.work.processes():
            with contextlib.suppress(psutil.Error):
                if ".snakemake/scripts" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def _ledgers(self) -> list[Path]:
        return [*self.work.tmp.glob("*.ledger")]

    def _part(self, server: str, part: str) -> psutil.Process | None:
        """A process of a server, if it is this run's and lives."""
        identity = self.work.status(server).get("pids", {}).get(part)
        own = {process.pid: process for process in self.work.processes()}
        return own.get(identity["pid"]) if identity else None

    def _signal(self, processes: list[psutil.Process | None], number: int) -> bool:
        hit = False
        for process in processes:
            with contextlib.suppress(psutil.Error):
                if process is not None:
                    process.send_signal(number)
                    hit = True
        self.crashes += hit
        return hit

    def _pause(self, process: psutil.Process | None, seconds: float) -> bool:
        if process is None or not self._signal([process], signal.SIGSTOP):
            return False
        self._later(seconds, lambda: self._signal([process], signal.SIGCONT))
        return True

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        """Do something in a while, at the latest at the end of the round."""
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()

        def now() -> None:
            timer.cancel()
            act()

        self._undo.append(now)

    def _open_doors(self) -> None:
        for door in self.doors:
            door.fault = ""

    def _move_status(self, server: str, seconds: float) -> bool:
        path = self.work.path("servers", f"{server}.status.json")
        status = self.work.status(server)
        if not status:
            return False
        status["at"] += seconds
        temporary = path.with_name("moved.json")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(status))
            os.utime(temporary, (status["at"], status["at"]))
            temporary.replace(path)
        return True

    def _fill_disk(self, seconds: float | None, rng: random.Random) -> None:
        """Leave nothing, or a few kB, of the folder's small disk."""
        filler = self.work.folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as handle:
            while True:
                handle.write(b"\0" * 4096)
        if rng.random() < 0.5:
            with contextlib.suppress(OSError):
                os.truncate(filler, max(0, filler.stat().st_size - rng.randrange(1, 64) * 1024))

        def free() -> None:
            filler.unlink(missing_ok=True)

        self._later(seconds, free) if seconds else self._undo.append(free)

    # At rest

    def rest(self, fault: schedule.Rest) -> None:
        """Damage a file, if there is one of that kind."""
        if self._damage(fault.kind, random.Random(fault.draw)):
            self.done.append(fault.kind)

    def _damage(self, kind: str, rng: random.Random) -> bool:
        act, _, what = kind.partition(" ")
        match kind:
            case "flip bit in dataset" | "flip bit in dataset manifest" | "flip bit in model manifest":
                what = {"dataset": "dataset", "dataset manifest": "manifest", "model manifest": "model"}[kind[12:]]
                return _flip(self._pick(what, rng), rng)
            case "truncate canary report":
                return _truncate(self._pick("canary", rng), rng)
            case "stale readiness file":
                return self._lie(rng)
            case "forget .snakemake":
                shutil.rmtree(self.work.folder / ".snakemake", ignore_errors=True)
                return True
            case "file from the future (touch)" | "file from the past (touch)":
                files = [path for path in self.work.results.rglob("*") if path.is_file()]
                shift = rng.uniform(10, 1e7) * (1 if "future" in kind else -1)
                return _touch(rng.choice(files) if files else None, time.time() + shift)
            case "prompts touched":
                return _touch(self.work.folder / "prompts.jsonl", time.time() + rng.uniform(-1e5, 1e5))
        what = what.removeprefix("bit in ").removeprefix("at the end of ").removeprefix("in ")
        path = self._pick(what, rng)
        hit = {"truncate": _truncate, "flip": _flip, "garbage": _garbage, "remove": lambda p, r: _remove(p)}[act](
            path, rng
        )
        self.journals_damaged |= hit and what == "journal" and act != "garbage"
        return hit

    def _pick(self, what: str, rng: random.Random) -> Path | None:
        """A file of the run by the schedule's word for it, one that holds something."""
        pattern = {
            "journal": "journals/*.jsonl",
            "completions": "completions/*.zst",
            "rejects": "rejected/*.zst",
            "stats": "stats/*.json",
            "index": "prompts/index.json",
            "prompt shard": "prompts/shards/*.zst",
            "model": "model/manifest.json",
            "canary": "quality/canary.json",
            "dataset": "dataset/*.zst",
            "manifest": "dataset/manifest.json",
            "readiness file": "servers/*.ready",
            "status file": "servers/*.status.json",
            "server spec": "servers/*.spec.json",
            "run lock": "run.lock",
            "journal cut": "journals/cut.json",
        }[what]
        found = [path for path in sorted(self.work.results.glob(pattern)) if path.stat().st_size]
        return rng.choice(found) if found else None

    def _lie(self, rng: random.Random) -> bool:
        """A readiness file of a server that is no more, as after a power loss."""
        source = self.work.path("servers", f"{rng.choice('01')}.info.json")
        target = source.with_name(source.name.replace(".info.json", ".ready"))
        if not source.exists() or target.exists():
            return False
        lease = json.loads(source.read_text())
        match rng.randrange(3):
            case 0:
                lease["supervisor"]["boot_id"] = "an earlier boot"
            case 1:
                lease["supervisor"]["pid"] = os.getpid()
        target.write_text(json.dumps(lease))
        return True


def _remove(path: Path | None) -> bool:
    try:
        path.unlink()  # type: ignore[union-attr]
    except (OSError, AttributeError):
        return False
    return True


def _truncate(path: Path | None, rng: random.Random) -> bool:
    if path is None:
        return False
    os.truncate(path, rng.randrange(path.stat().st_size))
    return True


def _flip(path: Path | None, rng: random.Random) -> bool:
    if path is None:
        return False
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    with path.open("r+b") as handle:
        handle.write(content)
    return True


def _garbage(path: Path | None, rng: random.Random) -> bool:
    """At the end of a journal, in place of the content elsewhere."""
    if path is None:
        return False
    with path.open("ab" if path.suffix == ".jsonl" else "wb") as handle:
        handle.write(rng.choice((JUNK, b"{}", b"", b"[1]", b'"x"', b"null")))
    return True


def _scramble(path: Path, rng: random.Random) -> bool:
    with path.open("r+b") as handle:
        for _ in range(50):
            handle.seek(rng.randrange(64, path.stat().st_size))
            handle.write(rng.randbytes(1))
    return True


def _touch(path: Path | None, at: float) -> bool:
    if path is None or not path.exists():
        return False
    os.utime(path, (at, at))
    return True
