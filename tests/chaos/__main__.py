"""Many chaotic runs: a line for each, and counts in all that docs/reliability.md can quote."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.pipeline import copy_code

from . import schedule
from .run import Outcome, Stage, can_mount, run


def work(seeds: list[int], folder: str, code: str, mounts: bool, queue: multiprocessing.Queue) -> None:
    """A worker: its share of the seeds, on a stage of its own."""
    with Stage(Path(folder), Path(code)) as stage:
        for seed in seeds:
            plan = schedule.make(seed)
            if plan.small_disk and not mounts:
                continue
            try:
                queue.put(run(plan, stage))
            except Exception as error:
                outcome = Outcome(seed)
                outcome.problems.append(f"the test itself failed: {type(error).__name__}: {error}")
                queue.put(outcome)
    queue.put(None)


def outcomes(seeds: list[int], workers: int) -> Iterator[Outcome]:
    """Run them all over several processes, in no particular order."""
    queue: multiprocessing.Queue = multiprocessing.Queue()
    with tempfile.TemporaryDirectory(prefix="chaos-stage-") as folder:
        code = copy_code(Path(folder) / "code")  # what is tested stays the same, whoever edits meanwhile
        mounts = can_mount(Path(folder) / "disk")
        processes = []
        for number in range(workers):
            (Path(folder) / str(number)).mkdir()
            arguments = (seeds[number::workers], str(Path(folder) / str(number)), str(code), mounts, queue)
            processes.append(multiprocessing.Process(target=work, args=arguments))
            processes[-1].start()
        running = workers
        while running:
            outcome = queue.get()
            if outcome is None:
                running -= 1
            else:
                yield outcome
        for process in processes:
            process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description="Whole runs under seeded faults.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next has the next")
    parser.add_argument("--workers", type=int, default=1, help="runs at once")
    parser.add_argument("--report", type=Path, help="append the outcomes to this file, as JSON lines")
    parser.add_argument("--sum", type=Path, help="only sum up a report")
    options = parser.parse_args()
    if options.sum:
        return summary([json.loads(line) for line in options.sum.read_text().splitlines()])
    records = []
    for outcome in outcomes([*range(options.seed, options.seed + options.runs)], options.workers):
        found = outcome.found
        record = {
            "seed": outcome.seed,
            "faults": outcome.done,
            "starts": outcome.starts,
            "seconds": round(outcome.seconds, 1),
            "completions": found.completions,
            "rejects": found.rejects,
            "answers": found.entries,
            "damaged_lines": found.damaged,
            "problems": outcome.problems,
            "errors": outcome.errors,
        }
        records.append(record)
        if options.report:
            with options.report.open("a") as handle:
                handle.write(json.dumps(record) + "\n")
        word = "FAILED" if outcome.problems else "ok"
        print(f"seed {outcome.seed}: {word}, {outcome.starts} starts, {outcome.seconds:.0f} s: {outcome.done}")
        for problem in outcome.problems:
            print(f"    {problem}")
        sys.stdout.flush()
    return summary(records)


def summary(records: list[dict]) -> int:
    """Print what happened in all; returns 1 if a run failed."""
    failed = [record["seed"] for record in records if record["problems"]]
    faults = Counter(kind for record in records for kind in record["faults"])
    print(f"\n{len(records)} runs, {len(failed)} failed: {failed}")
    print(f"{sum(faults.values())} faults, {sum(r['starts'] for r in records)} starts of the command")
    print(
        f"{sum(r['completions'] for r in records)} completions, {sum(r['rejects'] for r in records)} rejects checked\n"
    )
    for kind, count in faults.most_common():
        print(f"| {kind} | {count} |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
