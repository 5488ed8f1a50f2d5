"""Time and memory of the training view on synthetic completions:

    python benchmarks/training.py --completions 10000 --folder /tmp/bench

The answers are lines of Python's standard library (code and prose) in random order; the tokenizer is a byte-level BPE
of 32,000 tokens trained on the same files. The dataset is made once per folder. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from tests.test_training import QWEN, SPECIAL, View, message, qwen_words


def library_lines() -> list[str]:
    """Lines of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [line for path in files for line in path.read_text(errors="ignore").splitlines(keepends=True)]


def make_model(folder: Path, lines: list[str], vocabulary: int = 32_000) -> Path:
    """A model folder with a tokenizer of a real one's size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = qwen_words()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*SPECIAL, "<think>", "</think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    made.chat_template = QWEN
    made.save_pretrained(folder)
    return folder


def main() -> None:
    """Make the dataset once, then the view in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--completions", type=int, default=10_000)
    parser.add_argument("--characters", type=int, default=8_000, help="of an answer, its thought included")
    parser.add_argument("--formats", default="conversations,tokens")
    parser.add_argument("--ids", action="store_true", help="completions with token ids of the engine's")
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    if not (arguments.folder / "results").exists():
        child = os.fork()
        if child == 0:
            _make_dataset(arguments.folder, arguments.completions, arguments.characters, with_ids=arguments.ids)
            os._exit(0)
        os.waitpid(child, 0)
    shutil.rmtree(arguments.folder / "results" / "t" / "dataset" / "training", ignore_errors=True)
    view = View(arguments.folder, arguments.folder / "model", None)
    started, cpu = time.monotonic(), time.process_time()
    report = view.make(formats=arguments.formats.split(","))
    line = {
        "completions": report["completions"],
        "formats": arguments.formats,
        "engine_ids": report["notes"].get("token_ids_of_the_engine", 0),
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "tokens": report["length"]["total"],
        "mean_length": report["length"]["mean"],
        "files": {name: part["bytes"] for name, part in report["files"].items()},
    }
    sys.stdout.write(json.dumps(line) + "\n")


def _make_dataset(folder: Path, count: int, size: int, *, with_ids: bool) -> None:
    lines = library_lines()
    model = make_model(folder / "model", lines)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rng = random.Random(1)
    chosen = tokenizer if with_ids else None
    View(folder, model, (_record(number, lines, rng, size, chosen) for number in range(count)))


def _record(
    number: int, lines: list[str], rng: random.Random, size: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    def text(wanted: int) -> str:
        said = ""
        while len(said) < wanted:
            said += rng.choice(lines)
        return said.strip() or "pass"

    asked, thought, answer = text(300), text(size * 3 // 4), text(size // 4)
    record = {
        "id": f"r{number:07}",
        "messages": [message("user", asked), message("assistant", answer, reasoning_content=thought)],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 100, "completion_tokens": 2300},
    }
    if tokenizer:
        prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        said = f"<think>\n{thought}\n</think>\n\n{answer}<|im_end|>"
        record["token_ids"] = {"prompt": tokenizer.encode(prompt).ids, "completion": tokenizer.encode(said).ids}
    return record


if __name__ == "__main__":
    main()
