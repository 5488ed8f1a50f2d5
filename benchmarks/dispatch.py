"""How full the servers are: Shardmill, an ideal closed loop and a pinned client on the same stand-in servers.

    python -m benchmarks.dispatch [--shards N] [--speedup X] [--repeat N] [--plot FILE] [--only NAME,...]

Seven stand-in servers at the speed of a B200, time sped up, all seven alike or one of them at 0.6. Per scenario:

- *ideal*: a closed loop that keeps every server's queue filled, with no shards and no end. Its rate is the 1.0.
- *shardmill*: real shard jobs of 1,000 prompts, seven at once, under real supervisors.
- *pinned*: what SpecForge's regenerate_train_data.py does: one pass, requests dealt round-robin to the servers with a
  window for each, and a full one holds up the feeder.

Steady state is from the first quarter of the work to the moment when the last request has been handed out; the whole
run is from the first request to the last answer. The tail loss is what lies between the two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import clients
from benchmarks.node import Meter, Outcome, Sample, run_jobs, run_of, settings_for, stand_ins, write_prompts
from tests.sglang.servers import Running

SHARD = 1000
JOBS = 7
EVEN = (1.0,) * 7
SLOW = (*(1.0,) * 6, 0.6)
WARM_UP = 0.25  # share of the work before the steady state


def shardmill(folder: Path, servers: Sequence[Running], shards: int) -> Outcome:
    """The real thing."""
    count = shards * SHARD
    write_prompts(folder / "prompts.jsonl", count)
    settings = settings_for(folder, [server.url for server in servers], shards={"size": SHARD})
    with run_of(settings), Meter(servers) as meter:
        said = run_jobs(settings, [f"{number:05d}" for number in range(shards)], JOBS)
    return Outcome(
        meter.samples,
        answers=sum(one["answers"] for one in said),
        cpu_seconds=sum(one["cpu"] + one["start_cpu"] for one in said),
        most_memory_kb=max(one["memory_kb"] for one in said),
        stats=said,
    )


def rates(outcome: Outcome, requests: int) -> tuple[float, float]:
    """Tokens per second (of real time) in steady state and over the whole run.

    Args:
        requests: how many the run sends in all; once the servers have got them, the steady state is over.
    """
    samples = outcome.samples
    total = [sum(sample.tokens) for sample in samples]
    first, last = total[0], total[-1]
    begins = next(n for n, tokens in enumerate(total) if tokens > first)
    ends = next(n for n, tokens in enumerate(total) if tokens >= last)
    sent = samples[0].received + requests
    # Requests that servers have got but keep waiting still fill them.
    steady_end = next((n for n, sample in enumerate(samples) if sample.received >= sent), ends)
    steady_start = next(n for n, tokens in enumerate(total) if tokens - first >= WARM_UP * (last - first))
    return _rate(samples, steady_start, max(steady_end, steady_start + 1)), _rate(samples, max(0, begins - 1), ends)


def _rate(samples: Sequence[Sample], start: int, end: int) -> float:
    span = samples[end].at - samples[start].at
    return (sum(samples[end].tokens) - sum(samples[start].tokens)) / span


def measure(speeds: Sequence[float], shards: int, speedup: float, wanted: set[str]) -> dict[str, dict[str, float]]:
    """One repetition of one scenario: each client on fresh servers, the ideal first."""
    found: dict[str, dict[str, float]] = {}
    ideal = 0.0
    for name in ("ideal", "shardmill", "pinned"):
        if name not in wanted and name != "ideal":
            continue
        with (
            tempfile.TemporaryDirectory(prefix="shardmill-bench-") as folder,
            stand_ins(Path(folder), speeds, scale=1 / speedup) as servers,
        ):
            urls, requests = [server.url for server in servers], shards * SHARD
            if name == "ideal":
                with Meter(servers) as meter:
                    clients.closed_loop(urls, seconds=IDEAL_SECONDS)
                ideal = clients.loop_rate(meter.samples)
                found[name] = {"tokens_per_second": ideal / speedup}
                print(f"  ideal      {ideal / speedup:,.0f} tokens/s in server time", flush=True)
                continue
            if name == "shardmill":
                outcome = shardmill(Path(folder), servers, shards)
            else:
                with Meter(servers) as meter:
                    cpu = clients.pinned(urls, requests, window=48)
                outcome = Outcome(meter.samples, requests, cpu)
        steady, whole = rates(outcome, requests)
        found[name] = {
            "steady": steady / ideal,
            "whole": whole / ideal,
            "tail_loss": (steady - whole) / ideal,
            "cpu_ms": 1000 * outcome.cpu_seconds / max(1, outcome.answers),
            "memory_mb": outcome.most_memory_kb / 1024,
        }
        show(name, found[name], outcome)
    return found


def show(name: str, figures: dict[str, float], outcome: Outcome) -> None:
    seconds = outcome.samples[-1].at - outcome.samples[0].at
    print(
        f"  {name:10} steady {figures['steady']:.3f}  whole {figures['whole']:.3f}  tail loss "
        f"{figures['tail_loss']:.3f}  {figures['cpu_ms']:.2f} ms CPU per request  {outcome.answers} answers in "
        f"{seconds:.0f} s  load average {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    KEPT.append((name, outcome))


IDEAL_SECONDS = 12.0
KEPT: list[tuple[str, Outcome]] = []


def plot(path: Path) -> None:
    """Requests running at all servers over time, a panel per run. Needs matplotlib, which the pipeline does not."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(KEPT), 1, figsize=(9, 2.2 * len(KEPT)), sharex=True, squeeze=False)
    for (name, outcome), axis in zip(KEPT, axes[:, 0], strict=True):
        start = outcome.samples[0].at
        times = [sample.at - start for sample in outcome.samples]
        axis.stackplot(times, *zip(*(sample.running for sample in outcome.samples), strict=True))
        axis.set_ylabel("running")
        axis.set_title(name, loc="left", fontsize=9)
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", type=int, default=14, help="shards of 1,000 prompts (default 14)")
    parser.add_argument("--speedup", type=float, default=40.0, help="how many times faster than real time (default 40)")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", default="shardmill,pinned", help="clients to run beside the ideal")
    options = parser.parse_args()
    lines = []
    for scenario, speeds in (("seven equal servers", EVEN), ("one of seven at 0.6", SLOW)):
        print(f"{scenario}: {options.shards} shards, {options.speedup:g} times real time", flush=True)
        runs = [
            measure(speeds, options.shards, options.speedup, set(options.only.split(",")))
            for _ in range(options.repeat)
        ]
        for name in runs[0]:
            if name == "ideal":
                continue
            median = {key: statistics.median(run[name][key] for run in runs) for key in runs[0][name]}
            lines.append(
                f"{scenario}, {name}: whole-run utilisation: {median['whole']:.3f}x, "
                f"{median['cpu_ms']:.2f} ms CPU per request; steady-state utilisation: {median['steady']:.3f}x"
            )
    if options.plot:
        plot(options.plot)
    print("\n".join(lines))


if __name__ == "__main__":
    begun = time.monotonic()
    main()
    print(f"({time.monotonic() - begun:.0f} s)", file=sys.stderr)
