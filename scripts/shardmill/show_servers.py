"""What would be started, in words that can be pasted into a shell, for whoever wants to read it first."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from .config import Config
from .engines.base import Launch, ServerPlace
from .engines.registry import engine_for
from .errors import UserError
from .model.staging import entry_path, staged_folder
from .place import MARK_VARIABLE, launch_at, place

# One flag per line reads better than a paragraph.
_BREAK = " \\\n    "
_HIDDEN = "***"


def describe_servers(config: Config) -> str:
    """Every server's launch command with its environment variables. Needs no GPU, no model and no engine.

    Raises:
        UserError: if the settings cannot work, as a start would say it.
    """
    parts = []
    for name in config.server_names:
        where = _place(config, name)
        gpus = f", GPU {','.join(where.gpus)}" if where.gpus else ""
        head = f"# server {name}: {where.url}{gpus}"
        parts.append(f"{head}\n{_command(config, where)}")
    return "\n\n".join(parts)


def _place(config: Config, name: str) -> ServerPlace:
    """Its place; on a machine without these GPUs, their numbers as they stand in the configuration."""
    try:
        return place(config, name)
    except UserError:
        servers, number = config.servers, int(name)
        gpus = servers.gpus[number * servers.gpus_per_server : (number + 1) * servers.gpus_per_server]
        return ServerPlace(name, servers.host, servers.port + number, tuple(map(str, gpus)))


def _command(config: Config, where: ServerPlace) -> str:
    if config.engine.kind == "external":
        return "# runs already; nothing is started"
    launch = _launch(config, where, _model(config))
    variables = [f"{key}={shlex.quote(value)}" for key, value in launch.environment.items() if key != MARK_VARIABLE]
    text = _BREAK.join([" ".join(variables), *_by_flag(launch.command)])
    return text.replace(where.api_key, _HIDDEN) if where.api_key else text


def _launch(config: Config, where: ServerPlace, model: Path) -> Launch:
    """The launch as the version that will be there wants it, even if it is not there yet."""
    engine = engine_for(config)
    if engine.kind != "sglang":
        return launch_at(config, where, engine.launch(config, where, model))
    from .engines.sglang import SGLang
    from .engines.sglang_version import wanted_version

    return launch_at(config, where, SGLang().launch_as(config, where, model, wanted_version(config)))


def _model(config: Config) -> Path:
    """Where the model lies, or will lie."""
    try:
        return entry_path(config)
    except (UserError, OSError):
        folder = staged_folder(config)
        return folder / "model" if folder else Path(os.path.abspath(config.model.source))


def _by_flag(command: list[str]) -> list[str]:
    """The words of a command, each flag with its values as one text; what comes before the first flag in one too."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return [" ".join(line) for line in lines if line]
