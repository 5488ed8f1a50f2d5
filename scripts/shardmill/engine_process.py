"""One engine as a child process: started under the reaper, its output kept, its end certain."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import psutil

from . import reaper
from .process import Identity, identify, kill_descendants, wait_until

LOG_BYTES = 64 << 20
LOGS_KEPT = 3
TAIL_BYTES = 64 << 10
_FORCE_SECONDS = 5.0  # that the reaper gets beyond its own deadline


def clean_environment() -> dict[str, str]:
    """This process's environment without the package's own folder, whose scripts could shadow an engine's modules."""
    environment = dict(os.environ)
    package_root = str(Path(__file__).resolve().parents[1])
    path = [part for part in environment.pop("PYTHONPATH", "").split(os.pathsep) if part and part != package_root]
    return environment | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


class EngineProcess:
    """A running engine.

    Must be made by the main thread of a process that is a subreaper: the reaper is told of the death of
    the thread that started it, and what a killed reaper leaves behind must come to this process.

    Args:
        command: what to run.
        environment: all of its environment.
        log: file that its output is appended to, rotated.
        stop_timeout: seconds from SIGTERM to SIGKILL.
        secrets: texts that must not reach the log.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        log: Path,
        stop_timeout: float,
        secrets: tuple[str, ...],
    ) -> None:
        self._stop_timeout = stop_timeout
        wrapped = [sys.executable, "-S", "-E", str(Path(reaper.__file__).resolve())]
        wrapped += ["--stop-timeout", str(stop_timeout), "--parent", str(os.getpid()), "--", *command]
        self._reaper = subprocess.Popen(
            wrapped,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._reaper.stdout is not None
        self.log = LogPump(self._reaper.stdout, log, secrets)
        self.reaper_identity = identify(self._reaper.pid)
        self._engine_identity: Identity | None = None

    @property
    def engine_identity(self) -> Identity | None:
        """The engine's main process, once it runs."""
        if self._engine_identity is None:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self._reaper.pid).children():
                    self._engine_identity = identify(child.pid)
        return self._engine_identity

    def pids(self) -> set[int]:
        """Pids of all its processes."""
        try:
            children = psutil.Process(self._reaper.pid).children(recursive=True)
        except psutil.Error:
            return set()
        return {self._reaper.pid, *(child.pid for child in children)}

    def has_ended(self) -> bool:
        return self._reaper.poll() is not None

    def how_it_ended(self) -> str:
        """Its end in words, once it has ended."""
        code = self._reaper.poll()
        if code is None:
            return "still runs"
        number = -code if code < 0 else code - 128
        who = "the engine's keeper process" if code < 0 else "the engine"
        if number > 0 and number in set(signal.Signals):
            name = signal.Signals(number).name
            hint = " (perhaps the system was out of memory)" if number == signal.SIGKILL else ""
            return f"{who} was killed by {name}{hint}"
        return f"{who} exited with code {code}"

    def stop(self, tick: Callable[[], None] = lambda: None) -> bool:
        """End it and all that descends from it; False if something of it cannot be killed.

        Args:
            tick: called now and then while waiting.
        """

        def ended() -> bool:
            tick()
            return self.has_ended()

        with contextlib.suppress(ProcessLookupError):
            self._reaper.terminate()
        if not wait_until(ended, self._stop_timeout + _FORCE_SECONDS):
            self._reaper.kill()
            self._reaper.wait()
        # Only if the reaper was killed is there anything left.
        gone = kill_descendants(timeout=_FORCE_SECONDS)
        self.log.close()
        return gone


class LogPump:
    """Copies an engine's output to its log in a thread of its own; a full disk loses lines, nothing else."""

    def __init__(self, source: IO[bytes], path: Path, secrets: tuple[str, ...]) -> None:
        self._source = source
        self._path = path
        self._secrets = [secret.encode() for secret in secrets if secret]
        self._tail = b""
        self._file: IO[bytes] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="engine-log", daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """The last output, at most 64 KiB, of this engine alone."""
        return self._tail.decode("utf-8", "replace")

    def close(self) -> None:
        """Take what is still in the pipe, and end; to be called once the engine is gone."""
        self._closing.set()
        self._thread.join(timeout=2)

    def _pump(self) -> None:
        descriptor, pending = self._source.fileno(), b""
        while True:
            ready = bool(select.select([descriptor], [], [], 0.5)[0])
            data = os.read(descriptor, 1 << 16) if ready else b""
            pending += data
            if ready and data and len(pending) < 1 << 20:
                # Whole lines only, so that no secret is cut in two and so missed.
                complete, newline, pending = pending.rpartition(b"\n")
                self._write(complete + newline)
                continue
            self._write(pending)
            pending = b""
            if (ready and not data) or (not ready and self._closing.is_set()):
                break
        if self._file:
            self._file.close()
        self._source.close()

    def _write(self, data: bytes) -> None:
        if not data:
            return
        for secret in self._secrets:
            data = data.replace(secret, b"***")
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            self._file.write(data)
            if self._file.tell() > LOG_BYTES:
                self._rotate()
        except OSError:
            # Disk full, or gone. The tail in memory still serves.
            pass

    def _rotate(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        for number in range(LOGS_KEPT - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
        os.replace(self._path, f"{self._path}.1")
