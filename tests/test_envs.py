"""The environments name the same versions."""

from __future__ import annotations

import runpy
from pathlib import Path

ENVS = Path(__file__).resolve().parent.parent / "envs"


def test_the_conda_environment_has_the_versions_of_the_lock() -> None:
    made = runpy.run_path(str(ENVS / "pin_conda.py"))["conda_environment"]()
    assert (ENVS / "pipeline.yaml").read_text() == made
    assert "zstandard==" in made


def test_every_locked_package_has_a_hash() -> None:
    for lock in ENVS.glob("*.lock"):
        entries = [part for part in lock.read_text().split("\n") if "==" in part and not part.startswith((" ", "#"))]
        assert entries, lock
        assert all(line.rstrip().endswith("\\") for line in entries), lock
