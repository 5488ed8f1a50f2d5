"""Merging the shards into the dataset, with the proof that nothing is missing and nothing is double.

The proof: every prompt of the input is either a completion or a reject. Counts add up shard by shard
and in all, the sets of ids are equal (by an order-independent digest), every part's content hash is
what the shard's statistics say, and the merged file was read back before it took its name.
"""

from __future__ import annotations

import hashlib
import os
import platform
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import orjson
import zstandard

from . import __version__
from .config import Config
from .contract import Contract
from .errors import UserError
from .files import atomic_writer, iter_lines, iter_zstd_chunks, read_json, read_json_or_none, write_json
from .ids import IdsDigest
from .redaction import public_settings
from .shard_files import set_aside

ID_HEAD = b'{"id":"'
READ_BACK_BYTES = 1 << 18


@dataclass(frozen=True)
class Source:
    """One part of a merged file: a shard's file, what its statistics say of it, and input lines to weave in.

    `remade` is the file whose absence has the shard written again.
    """

    path: Path
    shard: str
    part: dict[str, Any]
    remade: Path
    extra: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass
class Block:
    """A part as read, checked against its shard's statistics."""

    chunks: list[bytes]
    ids: IdsDigest
    records: int


def merge(config: Config) -> dict[str, Any]:
    """Write dataset, rejects and manifest; returns the manifest.

    Raises:
        UserError: naming the shard and both numbers where the proof fails.
    """
    layout = config.layout
    index = read_json(layout.prompt_index)
    stats = [_shard_stats(config, entry) for entry in index["shards"]]
    # Neither file takes its name before both are written, read back and proven.
    with atomic_writer(layout.dataset) as dataset_file, atomic_writer(layout.dataset_rejects) as rejects_file:
        dataset = _write_merged(config, layout.dataset, dataset_file, _accepted_sources(config, stats))
        rejects = _write_merged(config, layout.dataset_rejects, rejects_file, _reject_sources(config, stats, index))
        manifest = _manifest(config, index, stats, dataset, rejects)
        _prove(manifest, index)
    write_json(layout.manifest, manifest, sealed=True)
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


def _accepted_sources(config: Config, stats: list[dict[str, Any]]) -> list[Source]:
    completions = config.layout.completions
    return [Source(completions(s["shard"]), s["shard"], s["completions"], completions(s["shard"])) for s in stats]


def _reject_sources(config: Config, stats: list[dict[str, Any]], index: dict[str, Any]) -> list[Source]:
    """Rejected answers, and the unusable input lines among them."""
    unusable, layout = _unusable_by_shard(config, index), config.layout
    names = [s["shard"] for s in stats]
    return [
        Source(layout.rejects(name), name, s["rejects"], layout.completions(name), unusable.get(name, []))
        for name, s in zip(names, stats, strict=True)
    ]


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


def _read_part(source: Source) -> Block:
    """Read a part and check that it is what its shard wrote; if it is not, have it written again.

    Raises:
        UserError: if it is missing, damaged or changed.
    """
    try:
        return _checked(source)
    except UserError as error:
        if not source.remade.exists():
            raise
        hint = f"{source.remade.name} was set aside as {set_aside(source.remade)}; run the same command again, "
        raise UserError(error.what, where=str(source.path), hint=hint + "which writes it from the journal") from None


def _checked(source: Source) -> Block:
    seen, ids, records, chunks, rest = hashlib.sha256(), IdsDigest(), 0, [], b""
    try:
        for chunk in iter_zstd_chunks(source.path):
            seen.update(chunk)
            chunks.append(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            records += len(lines)
            for line in lines:
                ids.add(_id_of(line))
    except FileNotFoundError:
        raise UserError("is missing", where=str(source.path), hint="run the same command again") from None
    if seen.hexdigest() != source.part["content_sha256"] or rest or records != source.part["records"]:
        raise UserError(
            f"its content is not what shard {source.shard} wrote (hash differs)",
            where=str(source.path),
            hint="remove it and run again; its answers are in the journal",
        )
    if source.extra:
        lines = [(orjson.loads(line)["line"], line + b"\n") for line in iter_lines(chunks)]
        chunks = [line for _, line in sorted([*lines, *source.extra])]
        records += len(source.extra)
    return Block(chunks, ids, records)


def _id_of(line: bytes) -> str:
    """The id of a record as `shard_files` writes it: first of all, and seldom with an escape."""
    end = line.index(b'"', len(ID_HEAD))
    raw = line[len(ID_HEAD) : end]
    if not line.startswith(ID_HEAD) or b"\\" in raw:
        return orjson.loads(line)["id"]
    return raw.decode()


def _read_ahead(sources: Sequence[Source]) -> Iterator[Block]:
    """The parts in order, a few of them read and checked ahead in threads: zstd and SHA-256 hold no GIL."""
    threads = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="part") as executor:
        waiting: deque[Future[Block]] = deque()
        try:
            for source in sources:
                waiting.append(executor.submit(_read_part, source))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class _ReadBack(threading.Thread):
    """Reads a file back while it is being written, and proves that it unpacks to what went in.

    The frame's own checksum (XXH64 of the content, in every frame that `write_checksum` makes) is checked
    by the decompressor; the count of bytes and the end of the one frame are checked here.
    """

    def __init__(self, path: str) -> None:
        super().__init__(name="read-back", daemon=True)
        self._path = path
        self._written = 0
        self._complete = False
        self._moved = threading.Condition()
        self.unpacked = 0
        self.error: str | None = "it was never read"

    def note(self, written: int, *, complete: bool = False) -> None:
        """Say that this many bytes are in the file now."""
        with self._moved:
            self._written, self._complete = written, complete
            self._moved.notify()

    def run(self) -> None:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            with open(self._path, "rb") as handle:
                while data := self._next(handle):
                    self.unpacked += len(frame.decompress(data))
            self.error = None if frame.eof and not frame.unused_data else "it does not end where its frame ends"
        except (OSError, zstandard.ZstdError) as error:
            self.error = str(error)

    def _next(self, handle: IO[bytes]) -> bytes:
        with self._moved:
            self._moved.wait_for(lambda: self._written > handle.tell() or self._complete)
            room = self._written - handle.tell()
        return handle.read(min(room, READ_BACK_BYTES))


class _Sink:
    """The file under the compressor: hashes what is written, and has it read back at once."""

    def __init__(self, handle: IO[bytes], reader: _ReadBack) -> None:
        self._handle = handle
        self._reader = reader
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._handle.write(data)
        self._handle.flush()
        self.sha256.update(data)
        self.size += len(data)
        self._reader.note(self.size)
        return len(data)


def _write_merged(config: Config, path: Path, handle: IO[bytes], sources: Sequence[Source]) -> dict[str, Any]:
    """One zstd frame of all parts in order, read back at once.

    Args:
        path: the name that it will take.
        handle: the file it is written to until then.
    """
    ids, records, size = IdsDigest(), 0, 0
    compressor = zstandard.ZstdCompressor(level=config.output.zstd_level, threads=-1, write_checksum=True)
    reader = _ReadBack(handle.name)
    reader.start()
    sink = _Sink(handle, reader)
    try:
        with compressor.stream_writer(sink, closefd=False) as stream:  # type: ignore[arg-type]
            for block in _read_ahead(sources):
                for chunk in block.chunks:
                    stream.write(chunk)
                    size += len(chunk)
                records += block.records
                ids.merge(block.ids)
    finally:
        reader.note(sink.size, complete=True)
        reader.join()
    if reader.error or reader.unpacked != size:
        problem = reader.error or f"{reader.unpacked} bytes came back of {size}"
        raise UserError(f"read back wrong: {problem}", where=str(path), hint="see to the disk, then run again")
    return {
        "file": path.name,
        "records": records,
        "bytes": size,
        "compressed_bytes": sink.size,
        "sha256": sink.sha256.hexdigest(),
        "ids_digest": ids.hexdigest(),
    }


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
        "config": public_settings(config),
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
    layout = config.layout
    paths = [layout.server_info(name) for name in config.server_names]
    if config.pools.shards:
        paths = sorted(layout.pools.glob("*/servers/*.info.json"))
    return {"kind": config.engine.kind, "servers": [spec for spec in map(read_json_or_none, paths) if spec]}


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
