"""SGLang's own environment, built from exact pins on local disk: found, checked, and rebuilt where it is broken.

It lies outside the run's folder, because it belongs to the machine: `<base>/sglang-<version>-<hash>`, where the hash
is that of the pins and of the Python that makes it. `shardmill.json` in it is written last of all, twice: Snakemake
removes its copy, the rule's output, before it runs the rule, and that must not make a whole environment look broken.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import psutil

from .config import Config
from .errors import UserError
from .files import read_json, read_json_or_none, sha256_hex, write_json
from .logs import get_logger
from .model.locks import FileLock

log = get_logger(__name__)

ENVS = Path(__file__).resolve().parents[2] / "envs"
RECORD = "shardmill.json"
_OWN_RECORD = ".shardmill.json"
# Importing PyTorch from a network disk takes minutes, in each of a server's processes, and sometimes never ends.
NETWORK_DISKS = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "afs", "panfs", "wekafs"})
_CHECK = "import importlib.metadata, sglang, torch; print(importlib.metadata.version('sglang'))"
_CHECK_SECONDS = 600.0
_TAIL_LINES = 8


def environment_record(config: Config) -> Path | None:
    """The file that says the environment is whole; None where none is to be built."""
    settings = config.engine.sglang
    if config.engine.kind != "sglang" or not settings.is_built:
        return None
    return environment_folder(config) / RECORD


def built_python(config: Config) -> Path:
    """The Python of the built environment, whether it is there or not."""
    return environment_folder(config) / "bin" / "python"


def environment_folder(config: Config) -> Path:
    """Folder of the environment that this configuration asks for."""
    settings = config.engine.sglang
    chosen = settings.environment_folder
    base = Path(os.path.abspath(Path(chosen).expanduser())) if chosen else _local_base()
    return base / f"sglang-{settings.build_version}-{_recipe(settings.build_version)[:10]}"


def pins(version: str) -> Path:
    """The lock file of a version.

    Raises:
        UserError: if there is none.
    """
    path = ENVS / f"sglang-{version}.lock"
    if not path.is_file():
        known = sorted(found.name.removeprefix("sglang-").removesuffix(".lock") for found in ENVS.glob("sglang-*.lock"))
        hint = f"write one of {', '.join(known)}, or name a Python that has it in engine.sglang.python"
        raise UserError(f"there are no pins for {version}", where="engine.sglang.version", hint=hint)
    return path


def environment_problem(config: Config) -> str | None:
    """Why an environment that looks finished must not be used, by looks alone; None if it may be, or is not there."""
    record = environment_record(config)
    if record is None or not os.path.lexists(record):
        return None
    return _problem(config, record)


def _problem(config: Config, record: Path) -> str | None:
    folder, value = record.parent, read_json_or_none(record)
    if not isinstance(value, dict):
        return "its record is missing or damaged"
    if value.get("recipe") != _recipe(config.engine.sglang.build_version):
        return "it was made from other pins"
    if not os.access(folder / "bin" / "python", os.X_OK):
        return "its Python is gone"
    version = value.get("version")
    if not list(folder.glob(f"lib/python*/site-packages/sglang-{version}.dist-info/RECORD")):
        return f"sglang {version} is gone from it"
    return None


def clear_broken_environment(config: Config) -> list[str]:
    """Take back the record of an environment that is broken, so that it is built anew; returns what to tell."""
    problem, record = environment_problem(config), environment_record(config)
    if problem is None or record is None:
        return []
    for path in (record, record.with_name(_OWN_RECORD)):
        with contextlib.suppress(OSError):
            path.unlink()
    return [f"SGLang's environment is made anew: {problem} ({record.parent})"]


def build_environment(config: Config) -> Path:
    """Make the environment, unless a whole one is there; returns its folder. Two builders wait for each other.

    Raises:
        UserError: if something cannot be installed, or what was installed does not import.
    """
    version = config.engine.sglang.build_version
    lock_file, folder = pins(version), environment_folder(config)
    if disk := _network_disk(folder):
        log.warning("%s is on a network disk (%s): servers may start slowly or hang there", folder, disk)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        own = folder / _OWN_RECORD
        if _problem(config, own) is None:
            log.info("SGLang %s is there: %s", version, folder)
            write_json(folder / RECORD, read_json(own))
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        log.info("building SGLang %s in %s (several GB, minutes)", version, folder)
        _install(folder, lock_file)
        found = _run_step("importing it", [folder / "bin" / "python", "-c", _CHECK], timeout=_CHECK_SECONDS)
        record = {"recipe": _recipe(version), "version": found.split()[-1], "python": sys.version.split()[0]}
        write_json(own, record)
        write_json(folder / RECORD, record)
        log.info("SGLang %s is built: %s", version, folder)
    return folder


def _install(folder: Path, lock_file: Path) -> None:
    try:
        uv = shutil.which("uv")
        venv.create(folder, with_pip=uv is None, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        hint = "is the package python3-venv installed, and the disk writable?"
        raise UserError(f"no virtual environment can be made ({error})", where=str(folder), hint=hint) from None
    python = folder / "bin" / "python"
    common = ["--quiet", "--no-deps", "--require-hashes", "-r", lock_file]
    if uv:
        command = [uv, "pip", "install", "--python", python, *common]
    else:
        command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--only-binary", ":all:", *common]
    _run_step(f"installing {lock_file.name}", command)


def _run_step(step: str, command: list[str | Path], *, timeout: float | None = None) -> str:
    """Run one step and return what it printed.

    Raises:
        UserError: with the end of what it printed.
    """
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    hint = "see to it and run the same command again: what is half built is found and made anew"
    try:
        done = subprocess.run(
            list(map(str, command)),
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{step} did not end within {timeout:.0f} s", where="engine.sglang", hint=hint) from None
    if done.returncode:
        log.error("%s%s", done.stdout, done.stderr)
        tail = " | ".join(line.strip() for line in (done.stdout + done.stderr).splitlines()[-_TAIL_LINES:])
        raise UserError(f"{step} failed: {tail[-600:]}", where="engine.sglang", hint=hint)
    return done.stdout


@functools.cache
def _recipe(version: str) -> str:
    """Hash of all that decides what an environment holds; without pins, of the version alone."""
    path = ENVS / f"sglang-{version}.lock"
    text = path.read_text(encoding="utf-8") if path.is_file() else version
    return sha256_hex(f"{sys.version_info[:2]}\n{text}".encode())


@functools.cache
def _local_base() -> Path:
    """The first of the usual places that is on local disk."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    private = f"shardmill-{os.getuid()}"
    places = [Path(cache).expanduser() / "shardmill", Path("/var/tmp") / private, Path(tempfile.gettempdir()) / private]
    return next((place for place in places if _network_disk(place) is None), places[0])


def _network_disk(path: Path) -> str | None:
    """Kind of the network disk that `path` lies on, or None."""
    real = os.path.realpath(path)
    best, kind = "", ""
    for part in psutil.disk_partitions(all=True):
        mount = part.mountpoint.rstrip("/")
        if (real == mount or real.startswith(mount + "/")) and len(mount) >= len(best):
            best, kind = mount, part.fstype
    return kind if kind in NETWORK_DISKS or kind.startswith("fuse.") else None
