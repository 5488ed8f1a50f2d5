"""Merging the shards into the dataset, with the proof that nothing is missing and nothing is double.

The proof: every prompt of the input is either a completion or a reject. Counts add up shard by shard
and in all, the sets of ids are equal (by an order-independent digest), every part's content hash is
what the shard's statistics say, and the merged file was read back before it took its name.
"""

from __future__ import annotations

import hashlib
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import zstandard

from . import __version__
from .config import Config
from .contract import Contract
from .errors import UserError
from .files import atomic_writer, iter_lines, iter_zstd_chunks, read_json, read_json_or_none, sha256_file, write_json
from .ids import IdsDigest
from .logs import get_logger

log = get_logger(__name__)

# Every line is written with its id first; a JSON string as orjson writes it has no raw control characters.
_ID_LINE = re.compile(rb'^\{"id":("(?:[^"\\]|\\.)*")', re.MULTILINE)


@dataclass
class Part:
    """Running totals of one merged file."""

    records: int = 0
    bytes: int = 0
    ids: IdsDigest = field(default_factory=IdsDigest)
    content: Any = field(default_factory=hashlib.sha256)


def merge(config: Config) -> dict[str, Any]:
    """Write dataset, rejects and manifest; returns the manifest.

    Raises:
        UserError: naming the shard and both numbers where the proof fails.
    """
    layout = config.layout
    index = read_json(layout.prompt_index)
    stats = [_shard_stats(config, entry) for entry in index["shards"]]
    dataset = _write_merged(config, layout.dataset, _accepted_parts(config, stats))
    rejects = _write_merged(config, layout.dataset_rejects, _reject_parts(config, stats, index))
    manifest = _manifest(config, index, stats, dataset, rejects)
    _prove(manifest, index)
    write_json(layout.manifest, manifest)
    return manifest


def _shard_stats(config: Config, entry: dict[str, Any]) -> dict[str, Any]:
    """A shard's statistics, checked against the prompt index."""
    name = entry["name"]
    path = config.layout.stats(name)
    hint = f"remove {config.layout.completions(name)} and run again"
    try:
        stats = read_json(path)
    except FileNotFoundError:
        raise UserError("its statistics are missing", where=f"shard {name}", hint=hint) from None
    if stats["prompts"] != entry["prompts"]:
        problem = f"answers {stats['prompts']} prompts, but its prompt file holds {entry['prompts']}"
        raise UserError(problem, where=f"shard {name}", hint=hint)
    if stats["accepted"] + stats["rejected"] != stats["prompts"]:
        problem = (
            f"{stats['accepted']} completions and {stats['rejected']} rejects do not make {stats['prompts']} prompts"
        )
        raise UserError(problem, where=f"shard {name}", hint=hint)
    return stats


def _accepted_parts(
    config: Config, stats: list[dict[str, Any]]
) -> Iterator[tuple[Iterable[bytes], Callable[[], None]]]:
    for shard in stats:
        yield _checked_chunks(config.layout.completions(shard["shard"]), shard["shard"], shard["completions"])


def _reject_parts(
    config: Config, stats: list[dict[str, Any]], index: dict[str, Any]
) -> Iterator[tuple[Iterable[bytes], Callable[[], None]]]:
    """Rejected answers and unusable input lines of each shard, merged in input order."""
    unusable = _unusable_by_shard(config, index)
    for shard in stats:
        name = shard["shard"]
        chunks, check = _checked_chunks(config.layout.rejects(name), name, shard["rejects"])
        if name not in unusable:
            yield chunks, check
            continue
        lines = [line + b"\n" for line in iter_lines(chunks)]
        records = [(orjson.loads(line)["line"], line) for line in lines] + unusable[name]
        check()
        yield [line for _, line in sorted(records)], lambda: None


def _unusable_by_shard(config: Config, index: dict[str, Any]) -> dict[str, list[tuple[int, bytes]]]:
    """Input lines that could not be used, as reject records by shard."""
    path = config.layout.prompt_rejects
    found: dict[str, list[tuple[int, bytes]]] = {}
    if not path.exists():
        return found
    firsts = [entry["first_line"] for entry in index["shards"]]
    names = [entry["name"] for entry in index["shards"]]
    position = 0
    with open(path, "rb") as handle:
        for raw in handle:
            reject = orjson.loads(raw)
            while position + 1 < len(firsts) and reject["line"] >= firsts[position + 1]:
                position += 1
            record = {"id": None, **reject, "reason": f"unusable:{reject['reason']}"}
            found.setdefault(names[position], []).append(
                (reject["line"], orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
            )
    return found


def _checked_chunks(path: Path, shard: str, part: dict[str, Any]) -> tuple[Iterable[bytes], Callable[[], None]]:
    """A part's content, and the check to make once it has been read."""
    seen = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        try:
            for chunk in iter_zstd_chunks(path):
                seen.update(chunk)
                yield chunk
        except FileNotFoundError:
            raise UserError("is missing", where=str(path), hint="run the same command again") from None

    def check() -> None:
        if seen.hexdigest() != part["content_sha256"]:
            raise UserError(
                f"its content is not what shard {shard} wrote (hash differs)",
                where=str(path),
                hint="remove it and run again; its answers are in the journal",
            )

    return chunks(), check


def _write_merged(
    config: Config, path: Path, parts: Iterable[tuple[Iterable[bytes], Callable[[], None]]]
) -> dict[str, Any]:
    """One zstd frame of all parts in order, read back before it takes its name."""
    total = Part()
    compressor = zstandard.ZstdCompressor(level=config.output.zstd_level, threads=-1, write_checksum=True)
    try:
        with atomic_writer(path) as handle:
            with compressor.stream_writer(handle, closefd=False) as stream:
                for chunks, check in parts:
                    _copy_part(chunks, stream.write, total)
                    check()
            handle.flush()
            _read_back(Path(handle.name), path, total)
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(
            f"cannot be written ({error.strerror})", where=str(path), hint="make room and run again"
        ) from error
    return {
        "file": path.name,
        "records": total.records,
        "bytes": total.bytes,
        "compressed_bytes": path.stat().st_size,
        "sha256": sha256_file(path),
        "content_sha256": total.content.hexdigest(),
        "ids_digest": total.ids.hexdigest(),
    }


def _copy_part(chunks: Iterable[bytes], write: Callable[[bytes], Any], total: Part) -> None:
    """Pass a part on, whole lines at a time, and count what passes."""
    rest = b""
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        block, rest = (rest + chunk[:cut], chunk[cut:]) if cut else (b"", rest + chunk)
        if block:
            _count(block, total)
            write(block)
    if rest:
        raise UserError("a part ends in the middle of a line", hint="run the same command again")


def _count(block: bytes, total: Part) -> None:
    ids = _ID_LINE.findall(block)
    for raw in ids:
        total.ids.add(orjson.loads(raw))
    total.records += block.count(b"\n")
    total.bytes += len(block)
    total.content.update(block)


def _read_back(written: Path, path: Path, total: Part) -> None:
    content = hashlib.sha256()
    for chunk in iter_zstd_chunks(written):
        content.update(chunk)
    if content.digest() != total.content.digest():
        raise UserError("read back different from what was written", where=str(path), hint="see to the disk; run again")


def _manifest(
    config: Config, index: dict[str, Any], stats: list[dict[str, Any]], dataset: dict[str, Any], rejects: dict[str, Any]
) -> dict[str, Any]:
    layout = config.layout
    sums: dict[str, Counter[str]] = {key: Counter() for key in ("verdicts", "finish_reasons", "usage")}
    for shard in stats:
        for key, counter in sums.items():
            counter.update(shard[key])
    locked = Contract.read(layout)
    return {
        "run": config.run.name,
        "shardmill": __version__,
        "counts": {
            "input": index["records"],
            "usable": index["usable"],
            "unusable": index["unusable"],
            "accepted": dataset["records"],
            "rejected": rejects["records"] - index["unusable"],
            "shards": len(stats),
            "requests_sent": sum(shard["requests_sent"] for shard in stats),
            "retries": sum(shard["retries"] for shard in stats),
        },
        **{key: dict(counter) for key, counter in sums.items()},
        "prompts": {key: index[key] for key in ("path", "size_bytes", "digest", "ids_digest")},
        "dataset": dataset,
        "rejects": rejects,
        "model": read_json_or_none(layout.model_manifest),
        "model_digest": locked.model_digest if locked else None,
        "engine": _engine(config),
        "answers": locked.answers if locked else None,
        "config": config.model_dump(),
        "shards": [
            {
                "name": shard["shard"],
                **{
                    key: shard[key] for key in ("prompts", "accepted", "rejected", "unusable", "completions", "rejects")
                },
                "prompts_sha256": entry["sha256"],
                "seconds": shard["seconds"],
                "finished_at": shard["finished_at"],
            }
            for shard, entry in zip(stats, index["shards"], strict=True)
        ],
        "times": {
            "first_shard_finished": min((shard["finished_at"] for shard in stats), default=None),
            "last_shard_finished": max((shard["finished_at"] for shard in stats), default=None),
            "merged": round(time.time(), 3),
        },
        "host": platform.node(),
        "python": platform.python_version(),
    }


def _engine(config: Config) -> dict[str, Any]:
    """What served the model, as the servers said when they became ready."""
    specs = (read_json_or_none(config.layout.server_info(name)) for name in config.server_names)
    return {"kind": config.engine.kind, "servers": [spec for spec in specs if spec]}


def _prove(manifest: dict[str, Any], index: dict[str, Any]) -> None:
    """The counts and the sets of ids of input and output are equal.

    Raises:
        UserError: with both numbers.
    """
    counts = manifest["counts"]
    hint = "nothing was published; run the same command again, and report this if it stays"
    if counts["accepted"] + counts["rejected"] + counts["unusable"] != counts["input"]:
        problem = (
            f"{counts['accepted']} completions, {counts['rejected']} rejects and {counts['unusable']} unusable records "
            f"do not make the {counts['input']} of the input"
        )
        raise UserError(problem, where="merge", hint=hint)
    ids = IdsDigest.of_hex(manifest["dataset"]["ids_digest"], counts["accepted"])
    ids.merge(IdsDigest.of_hex(manifest["rejects"]["ids_digest"], counts["rejected"]))
    if ids.hexdigest() != index["ids_digest"]:
        raise UserError("the ids of the output are not the ids of the input", where="merge", hint=hint)
