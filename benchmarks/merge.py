"""The merge against `zstdcat shards | zstd -T0 -3` on the same shards: python benchmarks/merge.py [SHARDS] [REPEATS].

Prints MB/s of uncompressed data for both and their ratio, alternating the two so that both meet the same machine.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from shardmill.config import Config
from shardmill.files import write_json
from shardmill.ids import IdsDigest
from shardmill.load_config import load_config
from shardmill.merge import merge
from shardmill.shard_files import write_part

PROMPTS_PER_SHARD = 1000
ANSWER_WORDS = 1200  # about 8 kB


def make_run(folder: Path, shards: int, prompts_per_shard: int = PROMPTS_PER_SHARD) -> Config:
    """A finished run of synthetic answers, as the merge finds it."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("{}\n")
    config = load_config(
        {
            "run": {"name": "bench", "results": str(folder)},
            "prompts": {"path": str(prompts)},
            "model": {"source": str(folder)},
        }
    )
    layout = config.layout
    words = Path(__file__).read_text().split() + [f"word{i}" for i in range(4000)]
    draw = random.Random(0)
    entries, every = [], IdsDigest()
    for number in range(shards):
        name = f"{number:05d}"
        first = number * prompts_per_shard + 1
        records = [
            {"id": f"p{line}", "line": line, "messages": [{"role": "assistant", "content": _text(draw, words)}]}
            for line in range(first, first + prompts_per_shard)
        ]
        part = write_part(layout.completions(name), records)
        none = write_part(layout.rejects(name), [])
        for record in records:
            every.add(record["id"])
        entries.append(
            {"name": name, "first_line": first, "prompts": len(records), "unusable": 0, "sha256": "", "digest": ""}
        )
        write_json(
            layout.stats(name),
            {
                "shard": name,
                "prompts": len(records),
                "accepted": len(records),
                "rejected": 0,
                "unusable": 0,
                "completions": part,
                "rejects": none,
                "verdicts": {"ok": len(records)},
                "finish_reasons": {},
                "usage": {},
                "retries": 0,
                "requests_sent": 0,
                "seconds": 0.0,
                "finished_at": 0.0,
            },
        )
    total = shards * prompts_per_shard
    write_json(
        layout.prompt_index,
        {
            "records": total,
            "usable": total,
            "unusable": 0,
            "path": str(prompts),
            "size_bytes": 0,
            "digest": "",
            "ids_digest": every.hexdigest(),
            "shards": entries,
        },
    )
    return config


def _text(draw: random.Random, words: list[str]) -> str:
    return " ".join(draw.choices(words, k=ANSWER_WORDS))


def main(shards: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = make_run(folder, shards)
        size = 0
        ours, theirs = [], []
        for _ in range(repeats):
            begun = time.perf_counter()
            size = merge(config)["dataset"]["bytes"]
            ours.append(size / 1e6 / (time.perf_counter() - begun))
            begun = time.perf_counter()
            command = f"zstdcat {config.layout.root}/completions/*.zst | zstd -q -T0 -3 -f -o {folder}/reference.zst"
            subprocess.run(command, shell=True, check=True)
            theirs.append(size / 1e6 / (time.perf_counter() - begun))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(f"{size / 1e6:.0f} MB in {shards} shards, {repeats} repeats, medians:")
        print(f"merge with proof and read-back: {statistics.median(ours):.0f} MB/s")
        print(f"zstdcat | zstd -T0 -3:          {statistics.median(theirs):.0f} MB/s")
        print(f"ratio: {ratio:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40, int(sys.argv[2]) if len(sys.argv) > 2 else 5)
