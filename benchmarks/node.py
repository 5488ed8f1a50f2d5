"""A node without GPUs: stand-in servers under real supervisors, and shard jobs as Snakemake would run them.

The servers are those of tests/sglang: SGLang's HTTP API over a model of continuous batching, at the speed of a B200
and with time scaled down. Supervisors, status files, ledger, journals and shard jobs are the real ones.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import requests

from shardmill import contract, session
from shardmill.config import Config
from shardmill.files import write_json
from shardmill.launch import start_server
from shardmill.load_config import load_config
from shardmill.prompts.split import split
from tests.sglang.servers import Running, standin

ROOT = Path(__file__).resolve().parents[1]
MODEL_DIGEST = "benchmark"
FAST_STEP = "3.72,0.356,0.02"  # ms: 245 tokens/s from one request, 2,309 from 48 (a B200 with Qwen3.6-27B)
LENGTHS = "2306,1.0,32768"  # mean, sigma, cap of the log-normal answer lengths, in tokens
SAMPLE_SECONDS = 0.25


@dataclass(frozen=True)
class Sample:
    """All servers at one moment (monotonic seconds): tokens made, requests running, requests waiting, per server."""

    at: float
    tokens: tuple[int, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    received: int


@dataclass
class Outcome:
    """What one scenario did: samples from its beginning to its end, and what its clients cost."""

    samples: list[Sample]
    answers: int
    cpu_seconds: float
    most_memory_kb: int = 0
    stats: list[dict[str, Any]] = field(default_factory=list)
    last_sent: float | None = None


class Meter:
    """Reads the servers' own counts a few times a second."""

    def __init__(self, servers: Sequence[Running]) -> None:
        self.samples: list[Sample] = []
        self._servers, self._stop = servers, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Meter:
        self.samples.append(self._take())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.samples.append(self._take())

    def _run(self) -> None:
        self._session = requests.Session()
        while not self._stop.wait(SAMPLE_SECONDS):
            self.samples.append(self._take())

    def _take(self) -> Sample:
        read = [requests.get(f"{server.url}/_standin/stats", timeout=60).json() for server in self._servers]
        return Sample(
            time.monotonic(),
            tuple(one["tokens"] for one in read),
            tuple(one["running"] for one in read),
            tuple(one["waiting"] for one in read),
            sum(one["received"] for one in read),
        )


@contextlib.contextmanager
def stand_ins(
    folder: Path,
    speeds: Sequence[float],
    *,
    scale: float,
    lengths: str = LENGTHS,
    slots: int = 48,
    step: str = FAST_STEP,
) -> Iterator[list[Running]]:
    """One stand-in per speed.

    Args:
        scale: real seconds for each second of the servers' time; 0.025 is 40 times as fast.
    """
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                standin(
                    folder / f"server-{number}.log",
                    *("--standin-time-scale", str(scale), "--standin-speed", str(speed)),
                    *("--standin-lengths", lengths, "--standin-step-ms", step),
                    *("--max-running-requests", str(slots), "--context-length", "40000", "--enable-metrics"),
                    *("--max-total-tokens", "4000000", "--reasoning-parser", "qwen3"),
                )
            )
            for number, speed in enumerate(speeds)
        ]


def write_prompts(path: Path, count: int, *, words: int = 40, turns: int = 1) -> None:
    """Prompts that differ; with several turns, conversations to be answered turn by turn."""
    with path.open("wb") as out:
        for number in range(count):
            text = f"Question {number}: " + "how does the mill at the river turn its stones " * (words // 10)
            record: dict[str, Any] = {"id": f"p{number:07}"}
            record |= {"prompt": text} if turns == 1 else {"turns": [f"{text} ({turn})" for turn in range(turns)]}
            out.write(orjson.dumps(record) + b"\n")


def settings_for(
    folder: Path, urls: Sequence[str], *, flavor: str = "sglang", window: int = 16, **sections: Any
) -> dict[str, Any]:
    """A configuration for servers that are there. Further sections are laid over it."""
    made: dict[str, Any] = {
        "run": {"name": "bench", "results": str(folder / "results")},
        "prompts": {"path": str(folder / "prompts.jsonl")},
        "model": {"source": str(folder)},
        "engine": {"kind": "external", "external": {"urls": list(urls), "flavor": flavor, "window": window}},
        "sampling": {"max_tokens": 32768},
        "thinking": {"enabled": True},
        # A long answer of the stand-in is one text several times over, and some reach the cap, as real ones do.
        "quality": {"actions": {"looping": "accept", "truncated": "accept", "unclosed_thought": "accept"}},
        "output": {"token_ids": False},
    }
    for name, section in sections.items():
        made[name] = {**made.get(name, {}), **section}
    return made


@contextlib.contextmanager
def run_of(settings: dict[str, Any]) -> Iterator[Config]:
    """A run that this process owns, its prompts cut, its servers supervised; all is stopped at the end."""
    config = load_config(settings)
    layout = config.layout
    shutil.rmtree(layout.root, ignore_errors=True)
    session.begin(config)
    try:
        # External servers have no key.
        layout.api_key.unlink(missing_ok=True)
        write_json(layout.model_manifest, {"digest": MODEL_DIGEST})
        contract.lock_model(config, MODEL_DIGEST)
        split(config)
        starters = [
            threading.Thread(target=start_server, args=(config, name, Path(config.model.source), MODEL_DIGEST))
            for name in config.server_names
        ]
        for starter in starters:
            starter.start()
        for starter in starters:
            starter.join()
        missing = [name for name in config.server_names if not layout.ready(name).exists()]
        if missing:
            raise RuntimeError(f"servers {missing} did not start; see {layout.supervisor_log(missing[0])}")
        yield config
    finally:
        for name in config.server_names:
            layout.ready(name).unlink(missing_ok=True)
        deadline = time.monotonic() + 30
        while any(layout.server_status(name).exists() for name in config.server_names) and time.monotonic() < deadline:
            time.sleep(0.1)
        session.end(config)


def start_job(settings: dict[str, Any], shard: str) -> subprocess.Popen[bytes]:
    """One shard job in a process of its own, as Snakemake would start it; prints its statistics at its end."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'scripts'}{os.pathsep}{ROOT}"}
    prefix = os.environ.get("BENCH_JOB_PREFIX", "").split()  # a profiler, such as `py-spy record -o F --`
    command = [*prefix, sys.executable, "-m", "benchmarks.node", shard]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT)
    assert child.stdin
    child.stdin.write(orjson.dumps(settings))
    child.stdin.close()
    child.stdin = None  # so that `communicate` does not flush it
    return child


def run_jobs(
    settings: dict[str, Any], shards: Sequence[str], jobs: int, *, on_tick: Callable[[int], None] = lambda done: None
) -> list[dict[str, Any]]:
    """All shards, at most `jobs` of them at once, in order; returns what each said at its end.

    Args:
        on_tick: called a few times a second with the number of finished shards.
    """
    waiting, running, said = deque(shards), [], []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start_job(settings, waiting.popleft()))
            for job in [job for job in running if job.poll() is not None]:
                running.remove(job)
                assert job.stdout
                text = job.stdout.read()
                if job.returncode:
                    raise RuntimeError(f"a shard job ended with {job.returncode}")
                said.append(orjson.loads(text))
            on_tick(len(said))
            time.sleep(0.02)
    finally:
        for job in running:
            job.kill()
            job.wait()
    return said


def _be_a_job(shard: str) -> None:
    """A shard job, with its cost: CPU seconds in all, those of start and end, and the most memory (kB)."""
    settings = orjson.loads(sys.stdin.buffer.read())
    from shardmill import logs
    from shardmill.generate import ShardRun

    logs.configure(None)
    started_cpu = time.process_time()
    run = ShardRun(load_config(settings), shard, MODEL_DIGEST)
    stats = run.run()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    said = {
        "shard": shard,
        "requests": stats["requests_sent"],
        "answers": stats["accepted"],
        "rejected": stats["rejected"],
        "seconds": stats["seconds"],
        "cpu": time.process_time() - started_cpu,
        "start_cpu": started_cpu,
        "memory_kb": usage.ru_maxrss,
        "tokens": stats["usage"].get("completion_tokens", 0),
        "hedges": stats.get("hedges", 0),
    }
    sys.stdout.buffer.write(orjson.dumps(said))


if __name__ == "__main__":
    _be_a_job(sys.argv[1])
