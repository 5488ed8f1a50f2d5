"""The configurations for GPU nodes: valid, known to the parser of their SGLang, and planned as they promise."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmill.config import Config
from shardmill.engine_env import environment_folder, pins
from shardmill.engines.base import ServerPlace
from shardmill.engines.sglang import SGLang
from shardmill.engines.sglang_flags import KNOWN_VERSIONS, recorded_flags
from shardmill.errors import UserError
from shardmill.load_config import load_config
from shardmill.show_servers import describe_servers
from tests.pipeline import SNAKEMAKE, merged

ROOT = Path(__file__).resolve().parent.parent
NODES = sorted((ROOT / "configs").glob("qwen3.6-27b-*.yaml"))
OVERLAY = ROOT / "configs" / "with-sglang-0.5.11.yaml"
MAIN = ROOT / "configs" / "qwen3.6-27b-7xb200.yaml"


def read(path: Path, *, old: bool = False) -> Config:
    settings: dict[str, Any] = yaml.safe_load(path.read_text())
    return load_config(merged(settings, yaml.safe_load(OVERLAY.read_text())) if old else settings)


@pytest.mark.parametrize("path", NODES, ids=lambda path: path.stem)
@pytest.mark.parametrize("old", [False, True], ids=["0.5.23", "0.5.11"])
def test_every_launch_flag_is_known_to_its_version(path: Path, old: bool) -> None:
    config = read(path, old=old)
    version = config.engine.sglang.build_version
    assert version == ("0.5.11" if old else "0.5.23")
    assert pins(version).read_text().count(f"sglang=={version} ") == 1
    known, seen = recorded_flags(version), set()
    for name in config.server_names:
        number = int(name)
        where = ServerPlace(name, config.servers.host, config.servers.port + number, (str(number),), "key-12345")
        launch = SGLang().launch_as(config, where, Path("/models/m"), version)
        flags = [word.partition("=")[0].removeprefix("--") for word in launch.command if word.startswith("--")]
        assert set(flags) <= known.flags.keys() and len(set(flags)) == len(flags)
        assert "key-12345" not in " ".join(launch.command) and "key-12345" in "".join(launch.files.values())
        seen |= {where.port, *launch.ports}
    assert len(seen) == 2 * config.server_count, "ports and nccl ports of one node collide"


@pytest.mark.parametrize("path", NODES, ids=lambda path: path.stem)
def test_what_decides_the_answers_is_the_same_on_every_node(path: Path) -> None:
    config, main = read(path), read(MAIN)
    for part in ("sampling", "thinking", "prompts", "shards"):
        assert getattr(config, part) == getattr(main, part)
    assert config.model.source == main.model.source and config.engine.sglang.speculative.algorithm == "EAGLE"
    assert config.engine.sglang.max_running_requests is not None, "left out, SGLang lowers it without a word"
    assert config.model.source.endswith("@main"), "a commit that nobody has seen must not be written down"


def test_every_line_of_the_main_configuration_is_explained() -> None:
    lines = [line for line in MAIN.read_text().splitlines() if ":" in line and not line.lstrip().startswith("#")]
    plain = {"run", "prompts", "shards", "model", "engine", "sglang", "kind", "servers", "sampling", "thinking"}
    plain |= {"quality", "output", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty"}
    above = dict(zip(MAIN.read_text().splitlines()[1:], MAIN.read_text().splitlines(), strict=False))
    for line in lines:
        key = line.split(":")[0].strip()
        assert key in plain or "#" in line or above[line].lstrip().startswith("#"), f"not explained: {line}"


def test_the_original_run_is_planned_as_903_shards(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    subprocess.run([sys.executable, ROOT / "tools" / "make_prompts.py", "902087", prompts], check=True)
    command = [SNAKEMAKE, "-s", ROOT / "Snakefile", "-n", "--cores", "7", "--configfile", MAIN]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    table = done.stdout.split("job ", 1)[1].split("total", 1)[0]
    jobs = {line.split()[0]: int(line.split()[1]) for line in table.splitlines()[2:] if line.strip()}
    assert jobs["generate"] == 903 and jobs["serve"] == 7 and jobs["engine_environment"] == 1
    assert jobs["download"] == jobs["merge"] == 1
    assert not (tmp_path / "results").exists(), "a plan makes nothing"


def test_the_launch_commands_can_be_read_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "show_servers.py", "--configfile", MAIN]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    parts = done.stdout.strip().split("\n\n")
    assert len(parts) == 7 and not list(tmp_path.iterdir())
    python = environment_folder(read(MAIN)) / "bin" / "python"
    for number, part in enumerate(parts):
        head, _, text = part.partition("\n")
        assert head == f"# server {number}: http://127.0.0.1:{30000 + number}, GPU {number}"
        words = shlex.split(text.replace("\\\n", " "))
        assert words[0] == f"CUDA_VISIBLE_DEVICES={number}" and str(python) in words
        for flag, value in (("--port", 30000 + number), ("--nccl-port", 28500 + number), ("--tp-size", 1)):
            assert words[words.index(flag) + 1] == str(value)


def test_the_api_key_is_never_shown(tmp_path: Path) -> None:
    settings = merged(yaml.safe_load(MAIN.read_text()), {"run": {"results": str(tmp_path)}})
    config = load_config(settings)
    config.layout.api_key.parent.mkdir(parents=True)
    config.layout.api_key.write_text("open-sesame-12345")
    assert "--config" in describe_servers(config) and "open-sesame" not in describe_servers(config)


def test_a_version_without_pins_is_refused_by_name() -> None:
    with pytest.raises(
        UserError, match=r"engine\.sglang\.version: there are no pins for 9\.9\.9; write one of 0\.5\.11"
    ):
        pins("9.9.9")
    assert all(pins(version).is_file() for version in KNOWN_VERSIONS)
