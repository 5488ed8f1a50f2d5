"""The real llama.cpp server (from the xllamacpp wheel) over a tiny model, as a child process, for tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

READY_WITHIN = 30.0  # seconds


@contextmanager
def serve(model: Path, log: Path, slots: int = 16, context: int = 2048) -> Iterator[str]:
    """Serve `model` with `slots` answers at a time of up to `context` tokens each; yields the URL, kills at the end.

    Raises RuntimeError, with the end of the log, if the server exits or is not ready in time.
    """
    port = _free_port()
    command = [sys.executable, __file__, str(model), str(port), str(slots), str(context)]
    # Waiting OpenMP threads must sleep, not spin: on few cores spinning costs ten times the speed.
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("wb") as sink:
        child = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(child, url, log)
        yield url
    finally:
        child.send_signal(signal.SIGKILL)  # an orderly stop deadlocks while a request is in flight
        child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_ready(child: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline and child.poll() is None:
        try:
            if requests.get(f"{url}/health", timeout=1).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(0.02)
    state = "is not ready" if child.poll() is None else f"exited with {child.returncode}"
    raise RuntimeError(f"llama.cpp server {state}: {log.read_text(errors='replace')[-2000:]}")


def _run(model: str, port: int, slots: int, context: int) -> None:
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path = model
    p.hostnames, p.port = ["127.0.0.1"], port
    p.n_parallel, p.n_ctx = slots, slots * context  # n_ctx is the total over all slots
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    p.n_threads_http = 4 * slots + 8  # each waiting request holds one; /health must not queue behind them
    p.cache_ram_mib = 0
    p.endpoint_metrics = p.endpoint_slots = p.endpoint_props = True
    p.ui = p.warmup = False
    server = xllamacpp.Server(p)
    signal.pause()
    del server


if __name__ == "__main__":
    _run(sys.argv[1], *map(int, sys.argv[2:]))
