"""The RAM disk: where a model's copy lies, who owns it, how much room there is, and who uses it."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import psutil

from ..config import Config
from ..errors import UserError
from ..files import canonical_json, sha256_hex
from ..layout import slug
from .local import absolute_path
from .locks import FileLock
from .source import LocalSource, parse_source

SHARED_MEMORY = Path("/dev/shm")
KEY = "model.ram_disk"


def ram_disk_root(config: Config) -> Path | None:
    """The RAM disk to use: /dev/shm for `true` where there is one, the folder that is named, or None."""
    choice = config.model.ram_disk
    if choice is True:
        return SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    return Path(os.path.abspath(Path(choice).expanduser())) if isinstance(choice, str) else None


def staged_folder(config: Config) -> Path | None:
    """Folder of this model's copy, `<root>/shardmill-<uid>/<slug>-<hash>`; None where staging is off.

    The hash is that of all that decides which files are copied. A relative path counts as what it
    means here, so that two runs' `model/` folders are not taken for one.
    """
    root = ram_disk_root(config)
    if root is None:
        return None
    source = parse_source(config.model.source)
    text = str(absolute_path(source)) if isinstance(source, LocalSource) else config.model.source
    key = sha256_hex(canonical_json([text, sorted(config.model.files), config.model.trust_remote_code]))
    return root / f"shardmill-{os.getuid()}" / f"{slug(text.rsplit('#', 1)[0])}-{key[:12]}"


def owner_problem(path: Path) -> str | None:
    """Why a folder at a name that anyone could guess must not be used; None if it is ours, or not there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if stat.S_ISLNK(found.st_mode):
        return f"is a symlink of user {found.st_uid}"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.getuid():
        return f"belongs to user {found.st_uid}, not to you ({os.getuid()})"
    if found.st_mode & 0o022:
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def staging_owner_problem(folder: Path) -> str | None:
    """`owner_problem` for the copy's folder and the one above it."""
    for path in (folder.parent, folder):
        if problem := owner_problem(path):
            return f"{path} {problem}"
    return None


def make_staging_folder(folder: Path) -> None:
    """Make the copy's folder, for its owner alone.

    Raises:
        UserError: somebody else's folder or link is in the way, or it cannot be made.
    """
    try:
        # The root is the user's word; what is below it is ours to be careful with.
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for path in (folder.parent, folder):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            _close_to_others(path)
            if problem := owner_problem(path):
                hint = f"remove it, or set `{KEY}` to a folder of your own"
                raise UserError(f"{problem}, so no model is put there", where=str(path), hint=hint)
    except OSError as error:
        hint = f"set `{KEY}` to a folder that you can write to, or to false"
        raise UserError(f"cannot make this folder ({error.strerror})", where=str(folder), hint=hint) from None


def _close_to_others(path: Path) -> None:
    """Take a folder of ours from the others' reach; Snakemake makes the folders of outputs as the umask says."""
    with contextlib.suppress(OSError):  # whatever is wrong with it, `owner_problem` says so
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) != 0o700:
                os.fchmod(descriptor, 0o700)
        finally:
            os.close(descriptor)


def room(root: Path) -> int:
    """Bytes that can be written to the RAM disk.

    A tmpfs promises its size but takes memory only when it is written to: beyond what the machine
    has, the kernel starts to kill processes. So for a tmpfs the available memory counts as well.
    """
    found = os.statvfs(root)
    free = found.f_bavail * found.f_frsize
    return min(free, psutil.virtual_memory().available) if _is_tmpfs(root) else free


def _is_tmpfs(path: Path) -> bool:
    real = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
    deepest = max(mounts, key=lambda mount: len(Path(mount.mountpoint).parts), default=None)
    return deepest is not None and deepest.fstype in ("tmpfs", "ramfs")


def boot_id() -> str:
    """A name of this boot of the machine: what lies in RAM does not outlive it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"boot-{psutil.boot_time():.0f}"


def stage_lock(folder: Path) -> FileLock:
    """Held while a copy is made, checked or removed: a second one waits."""
    return FileLock(folder.with_name(f"{folder.name}.lock"), waiting=f"waiting for another run that stages {folder}")


class UseLock:
    """A server's hold on the staged copy: while it is held, the copy is neither changed nor removed.

    Take it before `staging_problem` is asked, and keep it for the server's life; `pass_fds=[fd]` for
    each of `descriptors` lets an engine hold it on its own, should its supervisor be killed. Where
    staging is off, it holds nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._lock: FileLock | None = None
        if folder is not None:
            make_staging_folder(folder)
            waiting = f"waiting for a run that changes {folder}"
            self._lock = FileLock(_use_file(folder), shared=True, waiting=waiting)

    @property
    def descriptors(self) -> list[int]:
        return [self._lock.fileno()] if self._lock else []

    def close(self) -> None:
        """Let go of the copy."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> UseLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def use_lock(config: Config) -> UseLock:
    """A hold on this model's staged copy, for a `with` block or until `close`.

    Raises:
        UserError: the place belongs to somebody else.
    """
    return UseLock(staged_folder(config))


def exclusive_use(folder: Path, what: str) -> FileLock:
    """The right to change or remove a copy.

    Args:
        folder: the copy.
        what: what cannot be done otherwise, for the message.

    Raises:
        UserError: a live server uses it.
    """
    try:
        return FileLock(_use_file(folder), wait=False)
    except BlockingIOError:
        hint = "stop the run that uses it; its servers end by themselves a minute later (`servers.linger`)"
        raise UserError(f"a live server uses this copy, so it cannot be {what}", where=str(folder), hint=hint) from None


def _use_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.use")
