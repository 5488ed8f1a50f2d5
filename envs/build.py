"""Build a virtual environment from a hashed lock file: python envs/build.py VENV LOCK. Standard library only."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path


def main(folder: Path, lock: Path) -> None:
    """Create `folder` where it is missing or broken, and install exactly what `lock` names."""
    if sys.version_info < (3, 11):  # noqa: UP036 (any Python may start this)
        sys.exit(f"error: Python 3.11 or newer is needed, this is {sys.version.split()[0]}; set PYTHON=python3.12, say")
    python = folder / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import sys"], check=False).returncode:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"making {folder}", flush=True)
        try:
            venv.create(folder, with_pip=True)
        except subprocess.CalledProcessError:
            sys.exit("error: this Python cannot make virtual environments; install its venv package (python3-venv)")
    print(f"installing {lock} (about a minute the first time)", flush=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "-r", lock]
    if uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--quiet", "--python", python, "--require-hashes", "-r", lock]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\nerror: {lock} could not be installed; is the package index reachable?")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
