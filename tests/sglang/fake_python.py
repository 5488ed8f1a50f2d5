"""A Python "with SGLang" for the tests: the adapter launches it as it launches the real one, and the stand-in answers.

`write(FOLDER, version, *options)` makes an executable that answers the question for the version, prints the `--help` of
that version, and runs the stand-in (with further `--standin-...` options) for `-m sglang.launch_server`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, version: str = "0.5.23", *options: str) -> Path:
    """Make the executable; returns its path, for `engine.sglang.python`."""
    path = folder / f"python-sglang-{version}"
    words = [sys.executable, str(Path(__file__).resolve()), version, *options]
    quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    path.write_text(f'#!/bin/sh\nexec {quoted} -- "$@"\n')
    path.chmod(0o755)
    return path


def main(arguments: list[str]) -> None:
    split = arguments.index("--")
    version, *options = arguments[:split]
    asked = arguments[split + 1 :]
    if asked[0] == "-c":
        print(version)
        return
    assert asked[:2] == ["-m", "sglang.launch_server"], asked
    words = _with_config(asked[2:])
    known = version if version in ("0.5.11", "0.5.23") else "0.5.23"
    sys.argv = ["standin", "--standin-version", known, *options, *words]
    sys.path.insert(0, str(ROOT))
    runpy.run_module("tests.sglang.standin", run_name="__main__")


def _with_config(words: list[str]) -> list[str]:
    """As SGLang does: the settings of the `--config` file before all others, in this process alone."""
    if "--config" not in words:
        return words
    at = words.index("--config")
    settings = yaml.safe_load(Path(words[at + 1]).read_text())
    given = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    return given + words[:at] + words[at + 2 :]


if __name__ == "__main__":
    main(sys.argv[1:])
