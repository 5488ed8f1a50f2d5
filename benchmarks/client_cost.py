"""What a shard job costs: CPU per request and memory, with 512 requests in flight and answers of 8 kB.

    python -m benchmarks.client_cost [--prompts N]

Two figures: *bare*, the HTTP client alone; and *whole*, a real shard job with its journal, its checks and its files.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import orjson

from benchmarks.node import ROOT, run_jobs, run_of, settings_for, stand_ins, write_prompts

IN_FLIGHT = 512
SHARD = 1000
EIGHT_KILOBYTES = "1600,0.05,4096"  # tokens; one word each, about five bytes
# A server that answers each request after a few seconds, whatever its load, as a full GPU would.
STEADY_STEP = "1.2,0.0,0.0"


def bare(url: str, prompts: int) -> dict[str, float]:
    """The client alone in this process: CPU ms per request and memory in MB."""
    from concurrent.futures import ThreadPoolExecutor

    from shardmill.client import Call, Client

    body = orjson.dumps(
        {"messages": [{"role": "user", "content": "How does the mill turn?"}], "max_tokens": 4096, "seed": 1}
    )
    client = Client(connections=IN_FLIGHT)
    gate = threading.Semaphore(IN_FLIGHT)

    def ask() -> int:
        try:
            status, raw = client.post(f"{url}/v1/chat/completions", body, api_key=None, call=Call())
            assert status == 200
            return len(raw)
        finally:
            gate.release()

    before = time.process_time()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        futures = []
        for _ in range(prompts):
            gate.acquire()
            futures.append(pool.submit(ask))
        size = sum(future.result() for future in futures)
    cpu = time.process_time() - before
    client.close()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu_ms": 1000 * cpu / prompts, "memory_mb": memory, "bytes": size / prompts}


def measure(prompts: int) -> dict[str, dict[str, float]]:
    """Both figures, against one stand-in that runs 512 requests at once."""
    with tempfile.TemporaryDirectory(prefix="shardmill-bench-") as name:
        folder = Path(name)
        with stand_ins(folder, [1.0], scale=1.0, lengths=EIGHT_KILOBYTES, slots=IN_FLIGHT, step=STEADY_STEP) as servers:
            url = servers[0].url
            environment = os.environ | {"PYTHONPATH": f"{ROOT / 'scripts'}{os.pathsep}{ROOT}"}
            command = [sys.executable, "-m", "benchmarks.client_cost", "--bare", url, "--prompts", str(prompts)]
            text = subprocess.run(command, check=True, capture_output=True, env=environment, cwd=ROOT).stdout
            write_prompts(folder / "prompts.jsonl", prompts)
            settings = settings_for(
                folder, [url], shards={"size": SHARD}, sampling={"max_tokens": 4096}, dispatch={"queue": 0}
            )
            with run_of(settings):
                said = run_jobs(settings, [f"{number:05d}" for number in range(-(-prompts // SHARD))], 1)
    whole = {
        "cpu_ms": 1000 * sum(one["cpu"] for one in said) / sum(one["requests"] for one in said),
        "memory_mb": max(one["memory_kb"] for one in said) / 1024,
        "start_cpu_s": sum(one["start_cpu"] for one in said) / len(said),
    }
    return {"bare": orjson.loads(text), "whole": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=5000)
    parser.add_argument("--bare", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        print(orjson.dumps(bare(options.bare, options.prompts)).decode())
        return
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, found in measure(options.prompts).items():
        print(f"{name:6} {found['cpu_ms']:.2f} ms CPU per request, {found['memory_mb']:.0f} MB   {found}")


if __name__ == "__main__":
    main()
