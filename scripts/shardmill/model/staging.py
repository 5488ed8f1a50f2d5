"""The model's copy on a RAM disk: made in parallel, verified while it is copied, trusted only as recorded."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import UserError
from ..files import read_json_or_none, write_json
from ..logs import get_logger
from . import inventory
from .download import read_manifest
from .inventory import BLOCK_BYTES, ByteCounter, FileEntry, run_parallel, stat_problem
from .ramdisk import (
    KEY,
    boot_id,
    exclusive_use,
    make_staging_folder,
    room,
    stage_lock,
    staged_folder,
    staging_owner_problem,
    use_lock,
)
from .show import Progress, human_bytes
from .source import is_safe_name

__all__ = ["clean", "entry_path", "stage", "staged_file", "staged_folder", "staging_problem", "use_lock"]

logger = get_logger(__name__)

RECORD = "staged.json"
MODEL = "model"
_PAGE_BYTES = 4096
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
Record = dict[str, Any]


def staged_file(config: Config) -> Path | None:
    """The record of a finished copy, `<staged folder>/staged.json`; None where staging is off."""
    folder = staged_folder(config)
    return folder / RECORD if folder else None


def stage(config: Config) -> Record:
    """Copy the model to the RAM disk, or complete, repair or just confirm the copy that is there.

    What is there already is kept if its record or its hash proves it. Two runs that stage the same
    model wait for each other. Returns the record, which is written to `staged.json` last of all:
    `digest`, `source`, `entry` (absolute path in the copy), `files` (name, size, sha256, mtime_ns
    of the copy), `staged_at` and `boot_id`. Where staging is off nothing is done or written, and
    the record has the download's entry.

    Raises:
        UserError: no room, a server uses a copy that would have to change, a downloaded file is no
            longer what it was, or the place belongs to somebody else.
    """
    manifest = read_manifest(config)
    folder = staged_folder(config)
    if folder is None:
        return {key: manifest[key] for key in ("digest", "source", "entry", "files")}
    make_staging_folder(folder)
    try:
        with stage_lock(folder):
            make_staging_folder(folder)
            staged = _Staging(folder, manifest, config.model.copy_threads)
            staged.run()
            return staged.write_record()
    except OSError as error:
        raise _file_error(error, folder) from None


def staging_problem(config: Config) -> str | None:
    """Why the staged copy must not be trusted, for planning; None if it can be, or if there is none.

    Looks at sizes and mtimes only and reads no model file.
    """
    folder = staged_folder(config)
    if folder is None or not os.path.lexists(folder / RECORD):
        return None
    if problem := staging_owner_problem(folder):
        return problem
    record = read_json_or_none(folder / RECORD)
    try:
        if record["boot_id"] != boot_id():
            return "it was staged before this machine was last started"
        if problem := inventory.first_problem(folder / MODEL, record["files"]):
            return problem
        if not Path(record["entry"]).exists():
            return f"{record['entry']} is missing"
        digest = record["digest"]
    except (KeyError, TypeError):
        return f"its {RECORD} is damaged"
    manifest = read_json_or_none(config.layout.model_manifest)
    if isinstance(manifest, dict) and manifest.get("digest") != digest:
        return "it is a copy of another version of the model than this run's"
    return None


def entry_path(config: Config) -> Path:
    """The path that a server is given: in the staged copy, or where the download lies if staging is off.

    Raises:
        UserError: nothing is there.
    """
    record_path = staged_file(config)
    if record_path is None:
        return Path(read_manifest(config)["entry"])
    record = read_json_or_none(record_path)
    if not isinstance(record, dict) or not isinstance(record.get("entry"), str):
        raise UserError("the model has not been staged yet", where=str(record_path), hint="run the staging first")
    return Path(record["entry"])


def clean(config: Config) -> list[str]:
    """Free the RAM disk of this model's copy. Returns the paths removed; none if there was no copy.

    Raises:
        UserError: a live server uses it, or it belongs to somebody else.
    """
    folder = staged_folder(config)
    if folder is None or not os.path.lexists(folder):
        return []
    if problem := staging_owner_problem(folder):
        raise UserError(f"{problem}; it is left alone", where=KEY)
    with stage_lock(folder) as lock, exclusive_use(folder, "removed") as use:
        there = folder.is_dir()  # another clean may have been faster
        try:
            # The record first: what is half removed must not look whole.
            (folder / RECORD).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=not there)
        except OSError as error:
            raise UserError(f"cannot be removed ({error.strerror})", where=str(folder)) from None
        use.remove()
        lock.remove()
    return [str(folder)] if there else []


class _Staging:
    """One pass over a copy, its lock held."""

    def __init__(self, folder: Path, manifest: dict[str, Any], threads: int) -> None:
        self.folder, self.model = folder, folder / MODEL
        self.manifest, self.threads = manifest, threads
        self.source = Path(manifest["folder"])
        self.stop = threading.Event()
        self.counter = ByteCounter(self.stop)
        self.good: dict[str, FileEntry] = {}
        for entry in manifest["files"]:
            if not is_safe_name(entry["name"]):
                raise UserError(f"a file is named {entry['name']!r}, which is not safe to copy", where=str(self.source))

    def run(self) -> None:
        """Bring the copy to what the manifest says."""
        if self.model.is_symlink():
            self.model.unlink()
        self._keep_proven()
        missing = [entry for entry in self.manifest["files"] if entry["name"] not in self.good]
        extra = self._extra_files()
        if not missing and not extra:
            logger.info("the model is on the RAM disk already: %s", self.model)
            return
        with exclusive_use(self.folder, "changed to this run's model"):
            # From here on the copy is not whole, and must not look so.
            (self.folder / RECORD).unlink(missing_ok=True)
            for path in [*extra, *(self.model / entry["name"] for entry in missing)]:
                _remove(path)
            self._check_sources(missing)
            self._check_room(missing)
            self._copy_all(missing)

    def write_record(self) -> Record:
        inside = Path(self.manifest["entry"]).relative_to(self.source)
        record = {
            "digest": self.manifest["digest"],
            "source": self.manifest["source"],
            "entry": str(self.model / inside),
            "files": [self.good[entry["name"]] for entry in self.manifest["files"]],
            "staged_at": inventory.now_text(),
            "boot_id": boot_id(),
        }
        write_json(self.folder / RECORD, record, fsync=False)
        return record

    def _keep_proven(self) -> None:
        """Find what is good: by the record, or else, as after a kill in mid-copy, by its hash."""
        recorded = self._recorded()
        doubtful = []
        for entry in self.manifest["files"]:
            path, known = self.model / entry["name"], recorded.get(entry["name"])
            if not self._is_plain(path) or path.stat().st_size != entry["size"]:
                continue
            if known and known["sha256"] == entry["sha256"] and stat_problem(path, known) is None:
                self.good[entry["name"]] = known
            else:
                doubtful.append(entry)
        found = inventory.hash_files(
            self.model,
            [entry["name"] for entry in doubtful],
            sum(entry["size"] for entry in doubtful),
            "checking the RAM disk",
            threads=self.threads,
        )
        for entry, have in zip(doubtful, found, strict=True):
            if have["sha256"] == entry["sha256"]:
                self.good[entry["name"]] = have

    def _recorded(self) -> dict[str, FileEntry]:
        """What the record of this boot says, by name."""
        record = read_json_or_none(self.folder / RECORD)
        try:
            return {entry["name"]: entry for entry in record["files"]} if record["boot_id"] == boot_id() else {}
        except (KeyError, TypeError):
            return {}

    def _is_plain(self, path: Path) -> bool:
        """A regular file, with no symlink on the way to it."""
        between = [path, *path.parents][: len(path.relative_to(self.folder).parts)]
        return path.is_file() and not any(step.is_symlink() for step in between)

    def _extra_files(self) -> list[Path]:
        """What does not belong: files of another version, temporary ones of a copy that was killed."""
        wanted = {self.model / entry["name"] for entry in self.manifest["files"]}
        found = []
        for folder, folders, names in os.walk(self.model):
            found += [Path(folder, name) for name in names]
            found += [Path(folder, name) for name in folders if Path(folder, name).is_symlink()]
        return [path for path in found if path not in wanted]

    def _check_sources(self, entries: list[FileEntry]) -> None:
        """Refuse before copying what cannot be what was downloaded. Whether it is, its hash will tell."""
        for entry in entries:
            path = self.source / entry["name"]
            size = path.stat().st_size if path.is_file() else None
            if size != entry["size"]:
                state = "is missing" if size is None else f"has {size} bytes, not {entry['size']}"
                hint = "run the download again, which checks and completes it"
                raise UserError(f"{state}, so the model is not as it was downloaded", where=str(path), hint=hint)

    def _check_room(self, entries: list[FileEntry]) -> None:
        # Files take whole pages; folders, record and names take some more.
        needed = sum(-(-entry["size"] // _PAGE_BYTES) * _PAGE_BYTES for entry in entries) + 64 * _PAGE_BYTES
        free = room(self.folder)
        if needed > free:
            raise UserError(
                f"the model needs {human_bytes(needed)} more on the RAM disk, where {human_bytes(free)} are free",
                where=str(self.folder),
                hint=f"free it (`snakemake clean_ram`), give it more memory, or set `{KEY}: false` to read from disk",
            )

    def _copy_all(self, entries: list[FileEntry]) -> None:
        total = sum(entry["size"] for entry in entries)
        logger.info("copying %s to %s with %d threads", human_bytes(total), self.model, self.threads)
        progress = Progress(logger, "copying to the RAM disk", total)
        # The longest first, so that none of them is left for the end.
        order = sorted(entries, key=lambda entry: -entry["size"])
        for entry in order:
            (self.model / entry["name"]).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        copied = run_parallel(
            self._copy,
            order,
            threads=self.threads,
            tick=lambda: progress.update(self.counter.value),
            stop=self.stop,
        )
        progress.finish(total)
        self.good.update({entry["name"]: entry for entry in copied})

    def _copy(self, entry: FileEntry) -> FileEntry:
        """Copy one file under a temporary name, verify it, and give it its own."""
        source, target = self.source / entry["name"], self.model / entry["name"]
        temporary = target.with_name(f".{target.name[:200]}.{os.getpid()}.tmp")
        try:
            found = self._copy_bytes(source, temporary, entry["size"])
            if found != entry["sha256"]:
                raise UserError(
                    f"the content is not what the download recorded (sha256 {found}, not {entry['sha256']})",
                    where=str(source),
                    hint="remove it and run the download again",
                )
            os.replace(temporary, target)
        except OSError as error:
            raise _file_error(error, target) from None
        finally:
            temporary.unlink(missing_ok=True)
        return {**entry, "mtime_ns": target.stat().st_mtime_ns}

    def _copy_bytes(self, source: Path, temporary: Path, size: int) -> str:
        """Copy exactly `size` bytes. Returns their SHA-256."""
        digest = hashlib.sha256()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(source, "rb", buffering=0) as reader, os.fdopen(os.open(temporary, flags, 0o600), "wb", 0) as writer:
            if size:
                # A tmpfs hands out its room late; asked for now, a lack of it is an error and not a SIGBUS.
                _reserve(writer.fileno(), size)
            os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            block, left = memoryview(bytearray(min(BLOCK_BYTES, size + 1))), size
            # One byte more than there should be is asked for, so that a grown file is noticed.
            while count := reader.readinto(block[: min(len(block), left + 1)]):
                if count > left:
                    raise UserError("grew while it was copied", where=str(source), hint="run again")
                digest.update(block[:count])
                _write_all(writer, block[:count])
                left -= count
                self.counter.add(count)
        return digest.hexdigest()


def _reserve(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
            raise


def _write_all(writer: Any, data: memoryview) -> None:
    while data:
        data = data[writer.write(data) :]


def _file_error(error: OSError, path: Path) -> UserError:
    """An error of the file system in a user's words."""
    if error.errno in _NO_ROOM:
        hint = f"free it (`snakemake clean_ram`), or set `{KEY}: false`; the unfinished files were removed"
        return UserError("the RAM disk became full while the model was copied", where=str(path), hint=hint)
    what = f"cannot be copied ({error.strerror or error})"
    return UserError(what, where=str(error.filename or path), hint=f"check the disk, or set `{KEY}: false`")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
