"""Build the environment in which the tests run the real, unmodified SGLang server on CPU.

    python tests/sglang/build_env.py [FOLDER]      # default: .cache/sglang-cpu under the repository root

FOLDER gets `venv/` and, as the very last step, `stamp.json` with a hash of the recipe (the steps below, the
requirement files, the stand-in for sgl_kernel). A matching stamp makes the command a no-op; anything else, a
build that was cut short included, is removed and built again. Needs about 2.8 GB of disk where PyTorch comes as a CPU
build.

PyTorch is installed first and by pip, because pip follows the machine's own configuration (a local wheel folder, an
index of CPU builds); without such a configuration PyPI's Linux wheel of PyTorch brings several GB of CUDA libraries,
which do no harm. `--torch-backend cpu` lets uv take the CPU build instead. The rest is installed by uv where it exists.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / ".cache" / "sglang-cpu"
REQUIREMENTS = HERE / "requirements.txt"
NO_DEPS = HERE / "requirements-nodeps.txt"
KERNEL_STANDIN = HERE / "sgl_kernel_standin.py"
CHECK = (
    "import sgl_kernel, torch, transformers, sglang;"
    "from sglang.srt.entrypoints import http_server;"
    "print('sglang', sglang.__version__, 'torch', torch.__version__)"
)


class BuildError(Exception):
    """The environment could not be built; the message says which step failed and why."""


def recipe_hash() -> str:
    """Hash of everything that decides what the environment holds."""
    digest = hashlib.sha256(inspect.getsource(_fill).encode())
    for file in (REQUIREMENTS, NO_DEPS, KERNEL_STANDIN):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def python_of(folder: Path = DEFAULT_FOLDER) -> Path:
    """The interpreter of the environment in `folder` (whether it has been built or not)."""
    return folder / "venv" / "bin" / "python"


def is_built(folder: Path = DEFAULT_FOLDER) -> bool:
    """True if `folder` holds a finished environment made by the present recipe."""
    try:
        stamp = json.loads((folder / "stamp.json").read_text())
    except (OSError, ValueError):
        return False
    return stamp.get("recipe") == recipe_hash() and python_of(folder).exists()


def build(folder: Path = DEFAULT_FOLDER, *, uv: str | None = None, torch_backend: str | None = None) -> Path:
    """Make sure that `folder` holds the environment; returns its interpreter. Raises BuildError."""
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one_builder(folder):
        if is_built(folder):
            return python_of(folder)
        started = time.monotonic()
        (folder / "stamp.json").unlink(missing_ok=True)
        (folder / ".gitignore").write_text("*\n")
        shutil.rmtree(folder / "venv", ignore_errors=True)
        python = _fill(folder, uv or shutil.which("uv"), torch_backend)
        versions = _run("import check", [python, "-c", CHECK], env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"})
        stamp = {"recipe": recipe_hash(), "versions": versions.strip().splitlines()[-1]}
        partial = folder / "stamp.json.partial"
        partial.write_text(json.dumps(stamp, indent=1) + "\n")
        partial.rename(folder / "stamp.json")
        print(f"{stamp['versions']} in {folder}, {time.monotonic() - started:.0f} s")
        return python


def _fill(folder: Path, uv: str | None, torch_backend: str | None) -> Path:
    """Create the venv and install everything into it."""
    python = python_of(folder)
    base = getattr(
        sys, "_base_executable", sys.executable
    )  # a venv made from a venv's python breaks when that one goes
    _run("create venv", [base, "-m", "venv", folder / "venv"])
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    uv_pip = [uv, "pip", "install", "--quiet", "--python", python] if uv else pip
    torch = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
    if torch_backend and not uv:
        raise BuildError("--torch-backend is an option of uv, and no uv was found: install uv or leave the option out")
    _run("install torch", [*uv_pip, f"--torch-backend={torch_backend}", torch] if torch_backend else [*pip, torch])
    _run("install requirements", [*uv_pip, "-r", REQUIREMENTS])
    _run("install sglang", [*uv_pip, "--no-deps", "-r", NO_DEPS])
    site = Path(
        _run("find site-packages", [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    )
    # torchvision registers shape functions for its C++ operators at import. Those operators are built against one exact
    # build of torch and are absent beside the CPU one; SGLang uses torchvision's Python image transforms only.
    (site / "torchvision" / "_meta_registrations.py").write_text("")
    shutil.copyfile(KERNEL_STANDIN, site / "sgl_kernel.py")
    return python


@contextlib.contextmanager
def _only_one_builder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: a second builder waits for the first and then finds its work done."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(step: str, command: list[str | Path], env: dict[str, str] | None = None) -> str:
    """Run one step and return its output; a failure becomes a BuildError with the end of what it printed."""
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, env=env)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise BuildError(f"{step} failed (exit {done.returncode}):\n{tail}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the CPU environment of the real SGLang server, for tests.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--uv", help="uv program to use (default: the one on PATH; without one, pip installs all)")
    parser.add_argument("--torch-backend", help="let uv choose this build of PyTorch, for instance cpu")
    parser.add_argument("--check", action="store_true", help="build nothing; exit 0 if the environment is up to date")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if args.check:
        return 0 if is_built(folder) else 1
    try:
        build(folder, uv=args.uv, torch_backend=args.torch_backend)
    except BuildError as error:
        print(f"build_env: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
