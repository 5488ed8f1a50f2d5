"""The mirror: a copy of what a run has finished, kept in object storage while it goes on.

    python -m shardmill.mirror CONFIG.json

A detached process per owner (a run, or a pool's job) looks every `output.mirror_interval` seconds for what is
new, and copies it: each shard's files, the dataset, and of the journals the whole lines that have come, as
objects of their own (`journals/00003.jsonl/<first byte>`), since objects cannot be appended to. It ends after
one more look when it is told to, or when its owner is gone. It writes nothing that the run reads, so its troubles
are never the run's.

A fresh machine gets all of it back before its run begins (`restore`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import logs
from .bucket import Bucket
from .config import Config
from .errors import UserError
from .files import read_json, read_json_or_none, write_json
from .layout import Layout
from .owner import owner_is_alive
from .pool_plan import clear_damaged, holds

log = logs.get_logger(__name__)

SEGMENT_BYTES = 16 << 20
LAST_LOOKS = 3  # attempts to copy what is left when the run ends
_PACKAGE_ROOT = Path(__file__).resolve().parents[1]


class Mirror:
    """Copies what is new.

    Args:
        config: the run's, or a pool's.
    """

    def __init__(self, config: Config) -> None:
        self.layout, self.only = config.layout, config.pools.only
        self._shares = bool(config.pools.shards)
        self._state_file = state_file(self.layout)
        state = read_json_or_none(self._state_file) or {}
        self._files: dict[str, list[int]] = state.get("files", {})  # size and mtime of what is there
        self._offsets: dict[str, int] = state.get("journals", {})  # bytes of each journal that are there
        self.bucket = bucket_of(config)
        self.bucket.uploads = state.get("uploads", {})
        self.bucket.save = self.save

    def save(self, **said: Any) -> None:
        state = {"files": self._files, "journals": self._offsets, "uploads": self.bucket.uploads, "at": time.time()}
        write_json(self._state_file, state | said, fsync=False, indent=False)

    def look(self) -> int:
        """Copy what is new; returns how many objects that were.

        Raises:
            UserError: if the storage refuses; what is left is for the next look.
        """
        copied = 0
        for name, path in self._whole_files():
            copied += self._copy_file(name, path)
        for path in self._own(self.layout.journal("x").parent.glob("*.jsonl")):
            copied += self._copy_journal(path)
        return copied

    def _whole_files(self) -> Iterator[tuple[str, Path]]:
        """Files that are replaced, never changed: the contract first, statistics after what they speak of."""
        layout, root = self.layout, self.layout.root
        paths: list[Path] = []
        if not self.only:
            paths = [layout.contract, layout.fetched_prompts, layout.fetched_record, layout.journal_cut]
        paths.append(layout.canary)
        if self.only or not self._shares:
            for make in (layout.completions, layout.rejects, layout.stats):
                paths += sorted(self._own(make("x").parent.glob("[!.]*")))
        if not self.only:
            paths += sorted(layout.pools.glob("*.json"))
            paths += sorted(path for path in layout.dataset.parent.rglob("[!.]*") if path.is_file())
        for path in paths:
            yield path.relative_to(root).as_posix(), path

    def _own(self, paths: Iterator[Path]) -> Iterator[Path]:
        """Of shards' files those that this process's owner writes."""
        for path in paths:
            shard = path.name.partition(".")[0]
            if (self.only and shard.isdigit() and holds(self.only, shard)) or not self._shares:
                yield path

    def _copy_file(self, name: str, path: Path) -> bool:
        try:
            status = path.stat()
            seen = [status.st_size, status.st_mtime_ns]
            if self._files.get(name) == seen:
                return False
            self.bucket.put_file(name, path)
        except FileNotFoundError:
            return False
        self._files[name] = seen
        return True

    def _copy_journal(self, path: Path) -> int:
        """Copy the whole lines that are not there yet."""
        name, copied = path.relative_to(self.layout.root).as_posix(), 0
        offset = self._offsets.get(name, 0)
        if path.stat().st_size < offset:  # somebody removed it, and it began anew
            offset = 0
        with open(path, "rb") as handle:
            handle.seek(offset)
            while data := handle.read(SEGMENT_BYTES):
                end = data.rfind(b"\n") + 1
                if not end:
                    break
                self.bucket.put_bytes(f"{name}/{offset:015d}", data[:end])
                copied += 1
                offset += end
                self._offsets[name] = offset
                handle.seek(offset)
        return copied


def state_file(layout: Layout) -> Path:
    """What the mirror process knows to be copied, and how it is doing: `at`, `problem`, `is_complete`."""
    return layout.home / "mirror.json"


def bucket_of(config: Config) -> Bucket:
    assert config.output.mirror
    return Bucket(f"{config.output.mirror.rstrip('/')}/{config.run.name}")


def keep(config: Config, stop: threading.Event) -> bool:
    """Mirror a run until `stop` is set or its owner is gone; returns whether all of it was copied."""
    mirror, is_last, problem = Mirror(config), False, "nothing was copied yet"
    looks_left = LAST_LOOKS
    while looks_left:
        is_last = is_last or stop.is_set() or not owner_is_alive(config.layout)
        try:
            if copied := mirror.look():
                log.info("mirror: %d objects copied", copied)
            problem = ""
        except (UserError, OSError) as error:
            if str(error) != problem:
                log.warning("mirror: %s", error)
            problem = str(error)
        mirror.save(problem=problem, is_complete=is_last and not problem)
        if is_last:
            if not problem:
                break
            looks_left -= 1
            time.sleep(2)
        else:
            stop.wait(config.output.mirror_interval)
    return not problem


def start(config: Config) -> subprocess.Popen[bytes] | None:
    """Start the mirror process of a run that this process owns; None where no mirror is wanted."""
    if not config.output.mirror:
        return None
    layout = config.layout
    settings = layout.home / "mirror.config.json"
    write_json(settings, config.model_dump(mode="json"))
    path = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    sink = layout.log("mirror.log")
    sink.parent.mkdir(parents=True, exist_ok=True)
    with sink.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "shardmill.mirror", str(settings)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def finish(config: Config, process: subprocess.Popen[bytes]) -> str | None:
    """Have the mirror copy what is left, and wait for it; returns what went wrong."""
    if process.poll() is None:
        process.terminate()
        process.wait()
    if process.returncode == 0:
        return None
    problem = (read_json_or_none(state_file(config.layout)) or {}).get("problem")
    return f"the mirror is not complete: {problem or 'its process failed'}; see {config.layout.log('mirror.log')}"


def restore(config: Config) -> int:
    """Bring back what a mirror holds of a run that this machine knows nothing of; returns how many files came.

    Nothing is done where the run is here already. The contract comes last: until then the run counts as not here, so
    that a restore that was broken off begins again.

    Raises:
        UserError: if the storage refuses.
    """
    layout = config.layout
    if not config.output.mirror or config.pools.only or layout.contract.exists():
        return 0
    bucket, root = bucket_of(config), layout.root
    there = bucket.list()
    contract = layout.contract.relative_to(root).as_posix()
    if contract not in there:
        return 0
    journals = layout.journal("x").parent.name
    segments = sorted(name for name in there if name.startswith(f"{journals}/") and ".jsonl/" in name)
    offsets = {}
    for journal in sorted({name.rpartition("/")[0] for name in segments}):
        own = [name for name in segments if name.startswith(f"{journal}/")]
        offsets[journal] = _restore_journal(bucket, root / journal, own)
    files = [name for name in there if name not in segments and name != contract]
    for name in [*files, contract]:
        bucket.get_file(name, root / name)
    here = {name: root / name for name in [*files, contract]}
    stamps = {name: [path.stat().st_size, path.stat().st_mtime_ns] for name, path in here.items()}
    write_json(state_file(layout), {"files": stamps, "journals": offsets})
    clear_damaged(layout, [path.stem for path in layout.stats("x").parent.glob("*.json")])
    return len(files) + 1 + len(offsets)


def _restore_journal(bucket: Bucket, path: Path, segments: list[str]) -> int:
    """Put a journal together, as far as its segments follow one upon the other; returns its size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, offset = path.with_name(f".{path.name}.restore.tmp"), 0
    with open(temporary, "wb") as handle:
        for name in segments:
            start = int(name.rpartition("/")[2])
            if start < offset:  # of an earlier machine, and held by a longer one since
                continue
            if start > offset:
                break
            data, _ = bucket.get_bytes(name)
            handle.write(data)
            offset += len(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    return offset


def main(arguments: list[str]) -> int:
    config = Config.model_validate(read_json(arguments[0]))
    logs.configure(str(config.layout.log("mirror.log")), console=False)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return 0 if keep(config, stop) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
