"""The real llama.cpp server (from the xllamacpp wheel) over a tiny model, as a child process, for tests."""

from __future__ import annotations

import os
import select
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

    Raises RuntimeError, with the end of the log, if the server exits or is not ready within READY_WITHIN seconds.
    """
    command = [sys.executable, str(Path(__file__)), str(model), str(slots), str(context)]
    # Waiting OpenMP threads must sleep, not spin: on few cores spinning costs ten times the speed.
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, env=env, text=True
        )
    try:
        yield _ready_url(child, log)
    finally:
        child.kill()  # an orderly stop deadlocks while a request is in flight
        child.communicate()


def _ready_url(child: subprocess.Popen[str], log: Path) -> str:
    deadline = time.monotonic() + READY_WITHIN
    if select.select([child.stdout], [], [], READY_WITHIN)[0] and child.stdout:
        url = child.stdout.readline().strip()
        while url and time.monotonic() < deadline and child.poll() is None:
            try:
                if requests.get(f"{url}/health", timeout=1).ok:
                    return url
            except requests.RequestException:
                pass
            time.sleep(0.02)
    raise RuntimeError(f"the llama.cpp server is not ready: {log.read_text(errors='replace')[-2000:]}")


def _run(model: str, slots: int, context: int) -> None:
    """Serve on a free port, print the URL, and end with the process that holds the other end of stdin."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_parallel, params.n_ctx = slots, slots * context  # n_ctx is the total over all slots
    params.kv_unified = False  # one cache for all slots is three times slower here
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_threads_http = 4 * slots + 8  # each waiting request holds one; /health must not queue behind them
    params.cache_ram_mib = 0
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    params.ui = params.warmup = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _run(sys.argv[1], *map(int, sys.argv[2:]))
