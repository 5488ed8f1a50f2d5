"""The process that downloads a repo from the hub: `python -m shardmill.model.fetch '<job as JSON>'`.

It is a process of its own so that its parent can kill it when no byte comes any more, whatever it hangs
in, and start it again; it goes on to the byte where the last one stopped. It talks to the hub through
huggingface_hub's session (HF_ENDPOINT, HF_TOKEN, proxies, redirects without the token), but keeps the
partial files itself: huggingface_hub 2.x gives each process a partial file of its own and removes it
on failure, so it cannot resume.

On stdout it writes one JSON object a line, each with an `event`: `started`, `commit` (commit), `progress`
(done, total, work: bytes on disk, bytes in all, bytes received or hashed by this process), `error`
(what, hint, retry) and `done`. It ends when its stdin is closed, that is, when its parent is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import orjson

from ..errors import UserError
from ..files import read_json_or_none, sha256_hex, write_json
from .hub_errors import Retryable, explain, is_transient
from .hub_files import FetchJob, RemoteFile, list_repo, safe_target, select, state_file
from .inventory import BLOCK_BYTES, ByteCounter, FileEntry, now_text, run_parallel, stat_problem
from .show import human_bytes

WORKERS = 8
CHUNK_BYTES = 256 << 10
TRIES = 3
_WAIT_S = 1.0


def main(arguments: list[str]) -> int:
    """Run the job given as the only argument."""
    job = FetchJob.from_json(arguments[0])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Before the first event, because loading it can take longer than a download may stand still.
    importlib.import_module("huggingface_hub.hf_api")
    tell("started")
    try:
        Fetch(job).run()
    except Exception as error:
        what, hint, retry = explain(error, job)
        tell("error", what=what, hint=hint, retry=retry)
        return 1
    tell("done")
    return 0


def tell(event: str, **fields: Any) -> None:
    """Write one event to the parent."""
    with _tell_lock:
        sys.stdout.buffer.write(orjson.dumps({"event": event, **fields}) + b"\n")
        sys.stdout.buffer.flush()


_tell_lock = threading.Lock()


def _end_with_parent() -> None:
    # Straight from the descriptor: a thread inside sys.stdin's buffer would block the interpreter's exit.
    while os.read(0, 1024):
        pass
    os._exit(1)


class Fetch:
    """One attempt to complete a commit's folder."""

    def __init__(self, job: FetchJob) -> None:
        self.job = job
        self.store = Path(job.store)
        self.stop = threading.Event()
        self.work = ByteCounter(self.stop)
        self.done = ByteCounter()
        self._state_lock = threading.Lock()
        self._entries: dict[str, FileEntry] = {}
        self._reported: tuple[int, int] | None = None

    def run(self) -> None:
        self.commit, listed = list_repo(self.job)
        tell("commit", commit=self.commit)
        self.folder = self.store / self.commit
        self.parts = self.store / f"{self.commit}.part"
        files = select(listed, self.job)
        self.total = sum(file.size for file in files)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.parts.mkdir(exist_ok=True)
        self._load_state(files)
        self._check_room(files)
        run_parallel(self._complete, files, threads=WORKERS, tick=self._report, stop=self.stop)
        self._save_state(complete=True)
        shutil.rmtree(self.parts, ignore_errors=True)
        self._report()

    def _report(self) -> None:
        if (now := (self.done.value, self.work.value)) != self._reported:
            self._reported = now
            tell("progress", done=now[0], total=self.total, work=now[1])

    def _load_state(self, files: list[RemoteFile]) -> None:
        state = read_json_or_none(state_file(self.store, self.commit))
        wanted = {file.name for file in files}
        known = state.get("files", []) if isinstance(state, dict) else []
        self._entries = {entry["name"]: entry for entry in known if entry["name"] in wanted}
        self._obtained_at = state["obtained_at"] if known and state["complete"] else None

    def _save_state(self, *, complete: bool) -> None:
        if not complete:
            self._obtained_at = None  # something was missing or wrong
        state = {
            "repo": self.job.repo,
            "commit": self.commit,
            "complete": complete,
            "obtained_at": self._obtained_at or now_text(),
            "files": sorted(self._entries.values(), key=lambda entry: entry["name"]),
        }
        write_json(state_file(self.store, self.commit), state)

    def _part(self, file: RemoteFile) -> Path:
        return self.parts / f"{sha256_hex(file.name.encode())[:16]}.part"

    def _check_room(self, files: list[RemoteFile]) -> None:
        """Refuse before the first byte what cannot fit."""
        there = sum(_size_or_zero(self.folder / file.name) or _size_or_zero(self._part(file)) for file in files)
        free = shutil.disk_usage(self.store).free
        if self.total - there > free:
            raise UserError(
                f"the model needs {human_bytes(self.total - there)} more on the disk of {self.store}, "
                f"where {human_bytes(free)} are free",
                hint="make room, or set `run.results` to a larger disk",
            )

    def _complete(self, file: RemoteFile) -> None:
        """Make sure of one file: keep it if it is right, otherwise download it."""
        target = safe_target(self.folder, file.name)
        entry = self._entries.get(file.name)
        if entry is not None and stat_problem(target, entry) is None:
            self.done.add(file.size)
            return
        if target.is_file() and not target.is_symlink() and target.stat().st_size == file.size:
            hashes = Hashes(file)
            hashes.add_file(target, file.size, self.work)
            if hashes.problem() is None:
                self.done.add(file.size)
                self._record(file, target, hashes.sha256)
                return
        download = Download(self, file, self._part(file))
        hashes = download.run()
        os.replace(download.part, target)
        self._record(file, target, hashes.sha256)

    def _record(self, file: RemoteFile, target: Path, sha256: str) -> None:
        with self._state_lock:
            mtime = target.stat().st_mtime_ns
            self._entries[file.name] = {"name": file.name, "size": file.size, "sha256": sha256, "mtime_ns": mtime}
            self._save_state(complete=False)


class Hashes:
    """The hashes of a file as it comes in: SHA-256 for the manifest, and git's where the hub has no other."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        # A git blob's id is the SHA-1 of "blob <size>\0" and the content.
        self._git = None if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)

    def add(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        if self._git:
            self._git.update(data)

    def add_file(self, path: Path, size: int, work: ByteCounter) -> None:
        """Add the first `size` bytes of a file."""
        with open(path, "rb", buffering=0) as handle:
            block = memoryview(bytearray(BLOCK_BYTES))
            while size and (count := handle.readinto(block[: min(size, BLOCK_BYTES)])):
                self.add(block[:count])
                work.add(count)
                size -= count

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def problem(self) -> str | None:
        """How the content differs from what the hub lists; None if it does not."""
        kind, expected = ("sha256", self._file.sha256) if self._file.sha256 else ("git sha1", self._file.git_sha1)
        found = self._git.hexdigest() if self._git else self.sha256
        return None if found == expected else f"{kind} is {found}, the hub lists {expected}"


class Download:
    """One file on its way into its partial file, from wherever that stands."""

    def __init__(self, fetch: Fetch, file: RemoteFile, part: Path) -> None:
        self.fetch, self.file, self.part = fetch, file, part
        self.position = 0

    def run(self) -> Hashes:
        """Download until the hash is right.

        Raises:
            UserError: twice the wrong content.
            Retryable: the network or the hub fails again and again.
        """
        for fresh in (False, True):
            descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "r+b", buffering=0) as handle:
                self._resume_from(handle, 0 if fresh else os.fstat(descriptor).st_size)
                self._receive_all(handle)
                os.fsync(descriptor)
            if (problem := self.hashes.problem()) is None:
                return self.hashes
            # The first time a partial file of before may be at fault: a power loss can leave holes.
            self._move_to(0)
            self.part.unlink()
        raise UserError(
            f"{self.file.name} came damaged twice: its {problem}",
            hint="run again; if it stays, the hub or a proxy on the way alters the file",
        )

    def _resume_from(self, handle: Any, size: int) -> None:
        """Start behind the first `size` bytes of the partial file, which are hashed again."""
        if size > self.file.size:
            size = 0
        handle.truncate(size)
        self.hashes = Hashes(self.file)
        self.hashes.add_file(self.part, size, self.fetch.work)
        self._move_to(size)
        handle.seek(size)

    def _move_to(self, position: int) -> None:
        self.fetch.done.add(position - self.position)
        self.position = position

    def _receive_all(self, handle: Any) -> None:
        tries, last = 0, -1
        while self.position < self.file.size:
            tries = tries + 1 if self.position <= last else 0
            last = self.position
            try:
                self._receive(handle)
            except Exception as error:
                if not is_transient(error) or tries + 1 >= TRIES:
                    raise
                time.sleep(_WAIT_S)

    def _receive(self, handle: Any) -> None:
        """One request for the rest of the file."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        job = self.fetch.job
        url = hf_hub_url(job.repo, self.file.name, repo_type=job.kind, revision=self.fetch.commit)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if self.position:
            headers["Range"] = f"bytes={self.position}-"
        with get_session().stream("GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            if self.position and not _starts_at(response, self.position):
                self._resume_from(handle, 0)
            for chunk in response.iter_bytes(CHUNK_BYTES):
                self._keep(handle, chunk)
        if self.position < self.file.size:
            raise Retryable(f"{self.file.name} ended after {self.position} of {self.file.size} bytes")

    def _keep(self, handle: Any, chunk: bytes) -> None:
        if self.position + len(chunk) > self.file.size:
            raise UserError(f"{self.file.name} is longer than the {self.file.size} bytes that the hub lists")
        view = memoryview(chunk)
        while view:
            view = view[handle.write(view) :]
        self.hashes.add(chunk)
        self.fetch.work.add(len(chunk))
        self._move_to(self.position + len(chunk))


def _starts_at(response: Any, position: int) -> bool:
    """Whether an answer to a Range request is that range, and not the whole file from the start."""
    content_range = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return response.status_code == 206 and bool(content_range) and int(content_range[1]) == position


def _size_or_zero(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
