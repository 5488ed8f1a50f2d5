"""Working folders for whole runs on SGLang: the real one on CPU, or the stand-in behind a Python that pretends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.pipeline import Workspace, free_ports, merged

from . import build_env, fake_python
from .servers import tiny_model

# More threads than free cores make a token take 100 times as long; binding to cores fails in containers.
CPU_VARIABLES = {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
SERVERS = 2


def _settings(sglang: dict[str, Any], model: Path) -> dict[str, Any]:
    return {
        "shards": {"size": 10},
        "model": {"source": str(model), "ram_disk": False},
        "engine": {
            "kind": "sglang",
            "llamacpp": None,
            "sglang": {
                "nccl_port": free_ports(SERVERS),
                "reasoning_parser": "qwen3",
                "max_running_requests": 8,
                **sglang,
            },
        },
        "servers": {"count": SERVERS, "start_timeout": 600, "stop_timeout": 5, "linger": 5},
        "quality": {"actions": {"looping": "accept", "too_short": "accept"}, "min_supervised_tokens": 1},
    }


def _workspace(folder: Path, model: Path, sglang: dict[str, Any], settings: dict[str, Any]) -> Workspace:
    made = Workspace(folder, model)
    made.configure(**merged(_settings(sglang, model), settings))
    return made


def real_workspace(folder: Path, sglang: dict[str, Any] | None = None, **settings: Any) -> Workspace:
    """A folder whose servers are the real SGLang with the tiny model, on CPU."""
    model = tiny_model()
    # Its launch flags are read once for all tests, not once for each folder.
    (folder / "results").mkdir(parents=True, exist_ok=True)
    flags = build_env.DEFAULT_FOLDER / "flags"
    flags.mkdir(exist_ok=True)
    (folder / "results" / ".cache").symlink_to(flags)
    own = {
        "python": str(build_env.python_of()),
        "device": "cpu",
        "max_total_tokens": 20000,
        "extra_environment": CPU_VARIABLES,
        **(sglang or {}),
    }
    return _workspace(folder, model, own, settings)


def standin_workspace(
    folder: Path,
    *options: str,
    version: str = "0.5.23",
    sglang: dict[str, Any] | None = None,
    **settings: Any,
) -> Workspace:
    """A folder whose servers are stand-ins with these `--standin-...` options, launched as the real one is."""
    model = folder.parent / "standin-model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    python = fake_python.write(folder.parent, version, *options)
    os.makedirs(folder, exist_ok=True)
    own = {"python": str(python), "context_length": 32768, **(sglang or {})}
    return _workspace(folder, model, own, settings)
