"""datatrove's inference runner, for real, on the same stand-in servers.

    python -m benchmarks.peers --python VENV/bin/python [--prompts N] [--speedup X]

VENV is an environment of its own with datatrove in it (`uv venv V; uv pip install --python V datatrove`); the pipeline
needs none of it. datatrove gives each task one server and its fixed part of the input, so this runs one task per server
with 48 requests in flight, the way its examples do.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import tempfile
from pathlib import Path

from benchmarks import clients
from benchmarks.dispatch import EVEN, IDEAL_SECONDS, SLOW, rates, show
from benchmarks.node import Meter, Outcome, stand_ins

# Runs in datatrove's own environment: arguments are the server's URL, the first prompt, the count, a folder.
TASK = """
import sys
from datatrove.data import Document
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter

url, first, count, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

async def rollout(document, generate):
    result = await generate({"messages": [{"role": "user", "content": document.text}], "max_tokens": 32768,
                             "seed": int(document.id)})
    return result.text

text = "how does the mill at the river turn its stones " * 4
documents = (Document(text=f"Question {n}: {text}", id=str(n)) for n in range(first, first + count))
config = InferenceConfig(server_type="endpoint", model_name_or_path="tiny", model_max_context=40000, endpoint_url=url,
                         max_concurrent_generations=48, metric_interval=3600)
InferenceRunner(rollout_fn=rollout, config=config, output_writer=JsonlWriter(folder)).run(documents, 0, 1)
"""


def datatrove(python: str, urls: list[str], prompts: int, folder: Path) -> float:
    """All prompts in one task per server; returns CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    each = prompts // len(urls)
    tasks = []
    for number, url in enumerate(urls):
        command = [python, "-c", TASK, url, str(number * each), str(each), str(folder / f"out-{number}")]
        log = (folder / f"task-{number}.log").open("wb")
        tasks.append(subprocess.Popen(command, stdout=log, stderr=log))
    codes = [task.wait() for task in tasks]
    if any(codes):
        raise RuntimeError((folder / "task-0.log").read_text()[-3000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", required=True, help="the Python of an environment with datatrove")
    parser.add_argument("--prompts", type=int, default=7000)
    parser.add_argument("--speedup", type=float, default=10.0)
    options = parser.parse_args()
    lines = []
    for scenario, speeds in (("seven equal servers", EVEN), ("one of seven at 0.6", SLOW)):
        print(f"{scenario}, load average {os.getloadavg()[0]:.1f}", flush=True)
        with (
            tempfile.TemporaryDirectory(prefix="shardmill-bench-") as name,
            stand_ins(Path(name), speeds, scale=1 / options.speedup) as servers,
        ):
            urls = [server.url for server in servers]
            with Meter(servers) as meter:
                clients.closed_loop(urls, seconds=IDEAL_SECONDS)
            ideal = clients.loop_rate(meter.samples)
            with Meter(servers) as meter:
                cpu = datatrove(options.python, urls, options.prompts, Path(name))
        requests = options.prompts // len(urls) * len(urls)
        outcome = Outcome(meter.samples, requests, cpu)
        steady, whole = rates(outcome, requests)
        figures = {"steady": steady / ideal, "whole": whole / ideal, "tail_loss": (steady - whole) / ideal}
        show("datatrove", figures | {"cpu_ms": 1000 * cpu / requests}, outcome)
        lines.append(f"{scenario}, datatrove: steady-state utilisation: {steady / ideal:.3f}x")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
