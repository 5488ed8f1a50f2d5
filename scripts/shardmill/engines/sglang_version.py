"""The installed SGLang: which Python runs it, which version it has, which launch flags that version knows."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

from ..config import Config
from ..engine_env import built_python
from ..errors import UserError
from ..files import read_json_or_none, sha256_hex, write_json
from ..logs import get_logger
from ..model.locks import FileLock
from .sglang_flags import KNOWN_VERSIONS, FlagTable, recorded_flags

log = get_logger(__name__)

_VERSION_SECONDS = 120.0  # for `import importlib.metadata`: on a network disk even that takes its time
_HELP_SECONDS = 600.0  # for `--help`, which imports all of PyTorch
_ASK_VERSION = "import importlib.metadata as m; print(m.version('sglang'))"
_NEVER_MEASURED = "; it is started as the newest known one would be"


def python_path(config: Config) -> Path:
    """The Python that runs the servers, whether it is there or not; a folder is taken for a virtual environment."""
    named = config.engine.sglang.python
    if named is None:
        return built_python(config)
    path = Path(os.path.abspath(Path(named).expanduser()))  # never resolved: a venv's python is a symlink out of it
    return path / "bin" / "python" if path.is_dir() else path


def wanted_version(config: Config) -> str:
    """The version that the servers have: the installed one, or, where none is installed yet, the one to be built."""
    python = python_path(config)
    return installed_version(str(python)) if python.exists() else config.engine.sglang.build_version


@functools.cache
def installed_version(python: str) -> str:
    """Version of SGLang in an environment, asked of the package's metadata; no part of SGLang is imported.

    Raises:
        UserError: if there is none, or the Python does not run.
    """
    try:
        done = subprocess.run(
            [python, "-c", _ASK_VERSION],
            check=False,
            capture_output=True,
            text=True,
            timeout=_VERSION_SECONDS,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": ""},
        )
    except subprocess.TimeoutExpired:
        what = f"does not start within {_VERSION_SECONDS:.0f} s"
        raise UserError(
            what, where=python, hint="a Python on a network disk can be that slow; use local disk"
        ) from None
    except OSError as error:
        raise UserError(f"cannot be run ({error.strerror})", where=python, hint=_HINT) from None
    version = done.stdout.strip()
    if done.returncode or not re.fullmatch(r"[0-9][0-9A-Za-z.+-]*", version):
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UserError(f"has no SGLang ({last[:200]})", where=python, hint=_HINT)
    return version


_HINT = "name a Python that has SGLang in engine.sglang.python, or leave that out to have one built"


def check_version(config: Config) -> str:
    """The installed version, checked against the configured one.

    Raises:
        UserError: if the Python is missing or has another version than `engine.sglang.version`.
    """
    settings, python = config.engine.sglang, python_path(config)
    if not python.exists():
        hint = "run snakemake, which builds it" if settings.is_built else _HINT
        raise UserError("there is no such Python", where=str(python), hint=hint)
    version = installed_version(str(python))
    wanted = settings.build_version if settings.is_built else settings.version
    if wanted and not same_version(version, wanted):
        hint = f"install {wanted} there, or write `version: {version!r}` if that is the one you mean"
        raise UserError(f"is {wanted}, but {python} has {version}", where="engine.sglang.version", hint=hint)
    return version


def same_version(one: str, other: str) -> bool:
    """Whether two versions are the same release; a local part (`+cu130`) does not count."""
    return one.partition("+")[0] == other.partition("+")[0]


def is_known(version: str) -> bool:
    """Whether this version was measured, so that its shapes and caps are known."""
    return any(same_version(version, known) for known in KNOWN_VERSIONS)


def unknown_version(version: str) -> str:
    """What is said of a version that was never measured."""
    return f"SGLang {version} is unknown here (known: {', '.join(KNOWN_VERSIONS)}){_NEVER_MEASURED}"


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def flags_of(config: Config, version: str) -> FlagTable:
    """The launch flags of a version: its own `--help`, read once and kept below `run.results`; where that cannot be
    had, as on a laptop, the recorded list.
    """
    python = python_path(config)
    if not python.exists():
        return recorded_flags(version)
    kept = Path(config.run.results) / ".cache" / f"sglang-flags-{version}-{_key(python)}.json"
    if table := _kept_flags(kept):
        return table
    kept.parent.mkdir(parents=True, exist_ok=True)
    # All servers of a pool start at once; one of them reads for all.
    with FileLock(kept.with_suffix(".lock")):
        if table := _kept_flags(kept):
            return table
        text = _help_text(python, config.engine.sglang.extra_environment)
        table = FlagTable.from_help(version, text) if text else None
        if table is None:
            log.warning("%s: its --help cannot be read; its flags are checked against a recorded list", python)
            return recorded_flags(version)
        write_json(kept, table.to_json(), fsync=False)
    return table


def _kept_flags(path: Path) -> FlagTable | None:
    value = read_json_or_none(path)
    return FlagTable.from_json(value) if isinstance(value, dict) else None


def _key(python: Path) -> str:
    """Changes with the environment: where it is and when it was last installed into."""
    roots = [python.parent.parent / "lib", python]
    return sha256_hex("\n".join([str(python), *(str(_mtime(path)) for path in roots)]).encode())[:12]


def _mtime(path: Path) -> int:
    try:
        found = [path, *path.glob("python3*/site-packages")] if path.is_dir() else [path]
        return max(one.stat().st_mtime_ns for one in found)
    except OSError:
        return 0


def _help_text(python: Path, extra: dict[str, str]) -> str | None:
    log.info("reading the launch flags of %s (once)", python)
    environment = os.environ | {"PYTHONPATH": "", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""} | extra
    try:
        done = subprocess.run(
            [python, "-m", "sglang.launch_server", "--help"],
            check=False,
            capture_output=True,
            text=True,
            timeout=_HELP_SECONDS,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
