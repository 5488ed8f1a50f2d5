"""Files of a model, described: size, hash, and whether they are still what they were."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Lock
from typing import Any

import orjson

from ..errors import UserError
from ..files import canonical_json, read_json_or_none, sha256_hex
from ..logs import get_logger
from .show import Progress

logger = get_logger(__name__)

BLOCK_BYTES = 8 << 20
FileEntry = dict[str, Any]


def model_digest(files: Iterable[FileEntry]) -> str:
    """One hash for a set of files: SHA-256 of canonical JSON of their sorted (name, size, sha256)."""
    return sha256_hex(canonical_json(sorted([entry["name"], entry["size"], entry["sha256"]] for entry in files)))


def now_text() -> str:
    """The time in UTC, to the second, as manifests hold it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def stat_problem(path: Path, entry: FileEntry) -> str | None:
    """Why a file is not the one that `entry` describes, going by size and mtime alone; None if it is."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return f"{entry['name']} is missing"
    except OSError as error:
        return f"{entry['name']} cannot be read ({error.strerror})"
    if found.st_size != entry["size"]:
        return f"{entry['name']} has {found.st_size} bytes, not {entry['size']}"
    if found.st_mtime_ns != entry["mtime_ns"]:
        return f"{entry['name']} was changed after it was written"
    return None


def first_problem(folder: Path, files: Iterable[FileEntry]) -> str | None:
    """The first file of `files` that is not as described; None if all are."""
    return next((problem for entry in files if (problem := stat_problem(folder / entry["name"], entry))), None)


def describe_file(folder: Path, name: str, *, on_bytes: Callable[[int], None] | None = None) -> FileEntry:
    """Size, mtime and SHA-256 of a file, following symlinks.

    Raises:
        UserError: it cannot be read, or changes while it is being read.
    """
    path = folder / name
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as handle:
            before = os.fstat(handle.fileno())
            block = memoryview(bytearray(min(BLOCK_BYTES, before.st_size + 1)))
            while count := handle.readinto(block):
                digest.update(block[:count])
                if on_bytes:
                    on_bytes(count)
            after = os.fstat(handle.fileno())
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise UserError("changed while it was read", where=str(path), hint="run again when nothing writes to it")
    return {"name": name, "size": after.st_size, "sha256": digest.hexdigest(), "mtime_ns": after.st_mtime_ns}


def describe_files(folder: Path, names: list[str], known: Iterable[FileEntry], *, threads: int) -> list[FileEntry]:
    """`describe_file` for many at once; what `known` describes and is untouched is not read again."""
    remembered = {entry["name"]: entry for entry in known}
    kept = [remembered[n] for n in names if n in remembered and not stat_problem(folder / n, remembered[n])]
    todo = sorted(set(names) - {entry["name"] for entry in kept})
    sizes = sum((folder / name).stat().st_size for name in todo)
    made = hash_files(folder, todo, sizes, "hashing the model", threads=threads)
    keys = ("name", "size", "sha256", "mtime_ns")
    return sorted(({key: entry[key] for key in keys} for entry in [*kept, *made]), key=lambda entry: entry["name"])


def hash_files(folder: Path, names: list[str], total: int, label: str, *, threads: int) -> list[FileEntry]:
    """`describe_file` for all of `names` (`total` bytes), in threads and with progress."""
    progress, stop = Progress(logger, label, total), Event()
    counter = ByteCounter(stop)
    return run_parallel(
        lambda name: describe_file(folder, name, on_bytes=counter.add),
        names,
        threads=threads,
        tick=lambda: progress.update(counter.value),
        stop=stop,
    )


class Stopped(Exception):
    """A thread ended because another one failed, which is what will be reported."""


class ByteCounter:
    """Bytes dealt with so far, added up by many threads, and the place where they notice that they must end.

    Args:
        stop: once it is set, `add` raises Stopped.
    """

    def __init__(self, stop: Event | None = None) -> None:
        self._lock = Lock()
        self._value = 0
        self._stop = stop

    def add(self, count: int) -> None:
        if self._stop and self._stop.is_set():
            raise Stopped
        with self._lock:
            self._value += count

    @property
    def value(self) -> int:
        return self._value


def run_parallel(
    work: Callable[[Any], Any],
    items: list[Any],
    *,
    threads: int,
    tick: Callable[[], None],
    stop: Event,
) -> list[Any]:
    """`work` on every item in threads, in order; the first error sets `stop` and is raised once all have ended."""
    with ThreadPoolExecutor(max_workers=max(1, min(threads, len(items)))) as pool:
        futures = [pool.submit(work, item) for item in items]
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                tick()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def index_names(folder: Path, names: Iterable[str]) -> set[str]:
    """Files that the weights' index (`*.safetensors.index.json` or `*.bin.index.json`) asks for."""
    found: set[str] = set()
    for name in names:
        if name.endswith((".safetensors.index.json", ".bin.index.json")) and "/" not in name:
            index = read_json_or_none(folder / name)
            weight_map = index.get("weight_map") if isinstance(index, dict) else None
            if isinstance(weight_map, dict):
                # The index of a format that was not taken is none of our business.
                suffix = ".safetensors" if ".safetensors." in name else ".bin"
                wanted = {part for part in weight_map.values() if isinstance(part, str)}
                found |= wanted if any(other.endswith(suffix) for other in names) else set()
    return found


def chat_template(folder: Path, names: Iterable[str]) -> dict[str, str] | None:
    """Where the model's own chat template lies and its SHA-256; None where no file of it holds one.

    Read in the order that transformers reads: chat_template.jinja, then chat_template.json, then
    the field of tokenizer_config.json. A template inside a GGUF file is covered by the file's hash.
    """
    names = set(names)
    if "chat_template.jinja" in names:
        return _template_entry("chat_template.jinja", (folder / "chat_template.jinja").read_bytes())
    for name in ("chat_template.json", "tokenizer_config.json"):
        content = read_json_or_none(folder / name) if name in names else None
        template = content.get("chat_template") if isinstance(content, dict) else None
        if template:
            text = template.encode() if isinstance(template, str) else orjson.dumps(template)
            return _template_entry(name, text)
    return None


def _template_entry(name: str, text: bytes) -> dict[str, str]:
    return {"file": name, "sha256": sha256_hex(text)}
