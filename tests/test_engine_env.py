"""SGLang's own environment: built from pins, found again, and made anew where it is broken. Small wheels stand in."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shardmill import engine_env
from shardmill.config import Config
from shardmill.engine_env import (
    build_environment,
    clear_broken_environment,
    environment_folder,
    environment_problem,
    environment_record,
)
from shardmill.errors import UserError
from shardmill.load_config import load_config
from tests.pipeline import Workspace, copy_code

VERSION = "0.5.23"


def wheel(folder: Path, name: str, version: str, code: str) -> str:
    """Make a wheel; returns its line in a lock file."""
    files = {
        f"{name}/__init__.py": code,
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}\n"
        for path, text in files.items()
    )
    files[f"{name}-{version}.dist-info/RECORD"] = record + f"{name}-{version}.dist-info/RECORD,,\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(zipfile.ZipInfo(inside), text)
    return f"{name} @ {path.as_uri()} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def write_pins(folder: Path, code: str = "") -> Path:
    lines = [wheel(folder, "torch", "2.0", ""), wheel(folder, "sglang", VERSION, code)]
    path = folder / f"sglang-{VERSION}.lock"
    path.write_text("".join(lines))
    return path


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "envs"
    folder.mkdir()
    monkeypatch.setattr(engine_env, "ENVS", folder)
    engine_env._recipe.cache_clear()
    yield write_pins(folder)
    engine_env._recipe.cache_clear()


def config(tmp_path: Path, **sglang: Any) -> Config:
    settings = {"environment_folder": str(tmp_path / "local"), **sglang}
    return load_config(
        {
            "prompts": {"path": "p"},
            "model": {"source": "m"},
            "engine": {"kind": "sglang", "sglang": settings},
            "servers": {"gpus": [0]},
        }
    )


def test_it_is_built_once_and_found_again(tmp_path: Path, pins: Path) -> None:
    asked = config(tmp_path)
    record = environment_record(asked)
    assert record and not record.exists() and environment_problem(asked) is None
    folder = build_environment(asked)
    assert record == folder / "shardmill.json" and record.exists() and environment_problem(asked) is None
    python = engine_env.built_python(asked)
    done = subprocess.run(
        [python, "-c", "import sglang; print(sglang.__file__)"], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(folder))
    marker = folder / "marker"
    marker.touch()
    # Snakemake takes its copy of the record away before it runs the rule; that alone breaks nothing.
    record.unlink()
    build_environment(asked)
    assert marker.exists() and record.exists() and clear_broken_environment(asked) == []


def test_what_is_broken_is_found_and_made_anew(tmp_path: Path, pins: Path) -> None:
    asked = config(tmp_path)
    folder = build_environment(asked)
    own, record = folder / ".shardmill.json", folder / "shardmill.json"
    whole = record.read_text()
    package = next(folder.glob("lib/python*/site-packages/sglang-*.dist-info"))
    for damage, why in (
        (lambda: record.write_text("{"), "its record is missing or damaged"),
        (lambda: record.write_text(whole.replace("recipe", "other")), "it was made from other pins"),
        (lambda: package.rename(tmp_path / "away"), f"sglang {VERSION} is gone from it"),
        ((folder / "bin" / "python").unlink, "its Python is gone"),
    ):
        damage()
        (told,) = clear_broken_environment(asked)
        assert told == f"SGLang's environment is made anew: {why} ({folder})"
        assert not record.exists() and not own.exists(), "it looks half built from here on"
        own.write_text(whole)
        record.write_text(whole)
    own.unlink()
    record.unlink()
    (folder / "marker").touch()
    build_environment(asked)
    assert environment_problem(asked) is None and not (folder / "marker").exists()


def test_other_pins_make_another_environment(tmp_path: Path, pins: Path) -> None:
    first = environment_folder(config(tmp_path))
    write_pins(pins.parent, "answer = 42\n")
    engine_env._recipe.cache_clear()
    assert first != environment_folder(config(tmp_path))


def test_what_does_not_install_or_import_is_said_in_one_line(tmp_path: Path, pins: Path) -> None:
    text = pins.read_text()
    pins.write_text(text.replace("--hash=sha256:", "--hash=sha256:0")[:-2] + "\n")
    engine_env._recipe.cache_clear()
    with pytest.raises(
        UserError, match=r"installing sglang-0\.5\.23\.lock failed: .*what is half built is found"
    ) as caught:
        build_environment(config(tmp_path))
    assert "\n" not in str(caught.value)
    write_pins(pins.parent, "raise ImportError('no CUDA here')\n")
    engine_env._recipe.cache_clear()
    with pytest.raises(UserError, match=r"importing it failed: .*no CUDA here"):
        build_environment(config(tmp_path))
    record = environment_record(config(tmp_path))
    assert record and not record.exists()


def test_a_named_python_needs_no_environment(tmp_path: Path) -> None:
    assert environment_record(config(tmp_path, python="/usr/bin/python3")) is None


def test_the_rule_builds_it_where_it_is_missing_or_broken(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", tmp_path / "no-model")
    workspace.code = copy_code(tmp_path / "code")
    write_pins(workspace.code / "envs")
    sglang = {"environment_folder": str(tmp_path / "local"), "reasoning_parser": "qwen3"}
    workspace.configure(engine={"kind": "sglang", "llamacpp": None, "sglang": sglang})
    workspace.write_prompts([{"prompt": "What?"}])
    assert workspace.run("-n").jobs["engine_environment"] == 1
    # The path is the same for the same Python and pins; the copied code has pins of its own.
    asked = "from shardmill import engine_env, load_config; import yaml; print(engine_env.environment_record("
    asked += "load_config.load_config(yaml.safe_load(open('config.yaml')))))"
    done = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=workspace.folder,
        env={"PYTHONPATH": str(workspace.code / "scripts")},
        check=True,
        capture_output=True,
        text=True,
    )
    record = done.stdout.strip()
    workspace.finish(record)
    assert Path(record).exists() and "engine_environment" not in workspace.run("-n").jobs
    python = Path(record).parent / "bin" / "python"
    python.unlink()
    result = workspace.finish(record)
    assert "SGLang's environment is made anew: its Python is gone" in result.output and python.exists()
