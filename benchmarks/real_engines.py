"""The same measure on real engines: two llama.cpp servers with a tiny model, a closed loop against real shard jobs.

    python -m benchmarks.real_engines [--prompts N] [--repeat N]

On two cores the servers and their clients share the CPU, so the client's cost counts twice here: a GPU node has cores
to spare. The figure is for comparing versions on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import orjson
import requests

from benchmarks.node import run_jobs, run_of, settings_for, write_prompts
from shardmill.client import Call, Client
from shardmill.config import Config
from shardmill.engines.base import Answer
from shardmill.engines.registry import engine_for
from shardmill.prompts.shards import read_shard
from tests.tiny.gguf_model import Knobs, make
from tests.tiny.server import serve

SLOTS = 8
SHARD = 100
JOBS = 3
LOOP_SECONDS = 15.0


def closed_loop(config: Config, urls: list[str]) -> float:
    """Tokens per second with a queue kept at each server, on the run's own requests."""
    engine, client, until = engine_for(config), Client(connections=64), time.monotonic() + LOOP_SECONDS
    prompts = [
        record for number in range(2) for record in read_shard(config.layout, f"{number:05d}", _entry(config, number))
    ]
    counted = [0]
    lock = threading.Lock()

    def ask(url: str, number: int) -> None:
        seed = number
        while time.monotonic() < until:
            seed += 1000
            body = engine.request_body(config, prompts[seed % len(prompts)]["messages"], None, seed, {})
            with contextlib.suppress(requests.RequestException):
                status, raw = client.post(f"{url}/v1/chat/completions", orjson.dumps(body), api_key=None, call=Call())
                result = engine.read_answer(status, raw)
                if isinstance(result, Answer) and time.monotonic() < until:
                    with lock:
                        counted[0] += result.usage["completion_tokens"]

    threads = [threading.Thread(target=ask, args=(url, n)) for url in urls for n in range(SLOTS + 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    return counted[0] / LOOP_SECONDS


def _entry(config: Config, number: int) -> dict[str, object]:
    return orjson.loads(config.layout.prompt_index.read_bytes())["shards"][number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory(prefix="shardmill-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = make(folder / "tiny.gguf", Knobs())
        urls = [stack.enter_context(serve(model, folder / f"{n}.log", slots=SLOTS, context=1024)) for n in range(2)]
        write_prompts(folder / "prompts.jsonl", options.prompts, words=10)
        for _ in range(options.repeat):
            settings = settings_for(
                folder, urls, flavor="llamacpp", window=SLOTS, shards={"size": SHARD}, sampling={"max_tokens": 512}
            )
            with run_of(settings) as config:
                ideal = closed_loop(config, urls)
                shards = [f"{n:05d}" for n in range(options.prompts // SHARD)]
                begun = time.monotonic()
                said = run_jobs(settings, shards, JOBS)
                seconds = time.monotonic() - begun
            rate = sum(one["tokens"] for one in said) / seconds
            ratios.append(rate / ideal)
            print(
                f"  ideal {ideal:.0f} tokens/s, shardmill {rate:.0f}; load average {os.getloadavg()[0]:.1f}", flush=True
            )
    print(f"two llama.cpp servers, whole-run utilisation (starts of jobs included): {statistics.median(ratios):.3f}x")


if __name__ == "__main__":
    main()
