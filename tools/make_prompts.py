"""Write a prompts file of any size, to try a run's plan: python tools/make_prompts.py 902087 prompts.jsonl.

The same number always gives the same file. The questions are real ones in form, and no two are alike.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO

TASKS = (
    "Explain to a beginner how {topic} works, with one example from {place}.",
    "Write a short plan for someone who wants to learn about {topic} while living in {place}.",
    "What are three common mistakes about {topic}, and how would you correct each of them?",
    "A teacher in {place} has {number} minutes to introduce {topic}. What should the lesson hold?",
    "Compare {topic} with something from daily life in {place}.",
    "Someone says that {topic} will not matter in {number} years. Argue for and against.",
)
TOPICS = (
    "speculative decoding", "binary search", "the water cycle", "compound interest", "photosynthesis", "recursion",
    "plate tectonics", "supply and demand", "public-key cryptography", "fermentation", "the immune system", "entropy",
    "hash tables", "the scientific method", "orbital mechanics", "machine translation", "vaccination", "soil erosion",
)  # fmt: skip
PLACES = ("a fishing village", "a large city", "a mountain hut", "a research station", "a small farm", "a port town")


def prompts(count: int) -> Iterator[str]:
    """`count` prompts, each ending in a number of its own so that no two are equal."""
    for number in range(count):
        task = TASKS[number % len(TASKS)]
        topic = TOPICS[number // len(TASKS) % len(TOPICS)]
        place = PLACES[number // (len(TASKS) * len(TOPICS)) % len(PLACES)]
        text = task.format(topic=topic, place=place, number=5 + number % 90)
        yield f"{text} (Question {number + 1}.)"


def _opened(path: Path | None) -> AbstractContextManager[IO[str]]:
    if path is None:
        return nullcontext(sys.stdout)
    if path.suffix == ".gz":
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=1)
    return path.open("w", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a prompts file of any size.")
    parser.add_argument("count", type=int, help="number of prompts")
    parser.add_argument("path", nargs="?", type=Path, help="file to write, .gz if wanted (default: standard output)")
    options = parser.parse_args()
    if options.count < 1:
        parser.error("count must be at least 1")
    with _opened(options.path) as handle:
        for number, prompt in enumerate(prompts(options.count), 1):
            handle.write(json.dumps({"id": f"q{number:07d}", "prompt": prompt}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
