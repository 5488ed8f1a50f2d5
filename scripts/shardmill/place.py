"""Where a server of the pool runs, and what exactly would be started there."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .config import Config
from .engines.base import Launch, ServerPlace
from .engines.openai import ExternalPlace
from .engines.registry import engine_for
from .errors import UserError
from .files import canonical_json, sha256_hex
from .layout import Layout

# Every process of an engine carries its server's name in this variable, so that whatever a kill -9 of
# supervisor and reaper at once leaves behind can still be found.
MARK_VARIABLE = "SHARDMILL_SERVER"


def place(config: Config, name: str) -> ServerPlace:
    """Where server `name` of the pool runs.

    Raises:
        UserError: if there is no such server, or not that many GPUs.
    """
    if name not in config.server_names:
        raise UserError(f"the pool has {config.server_count} servers, and none named {name!r}", where="servers.count")
    number, servers = int(name), config.servers
    if config.engine.kind == "external":
        base_url = config.engine.external.urls[number].rstrip("/").removesuffix("/v1")
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{base_url!r} is no http URL", where="engine.external.urls")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return ExternalPlace(name, parts.hostname, port, api_key=_api_key(config.layout), base_url=base_url)
    indices = servers.gpus[number * servers.gpus_per_server : (number + 1) * servers.gpus_per_server]
    gpus = tuple(_visible_gpu(index) for index in indices)
    return ServerPlace(name, servers.host, servers.port + number, gpus, _api_key(config.layout))


def _api_key(layout: Layout) -> str | None:
    try:
        return layout.api_key.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None


def _visible_gpu(index: int) -> str:
    """Value for CUDA_VISIBLE_DEVICES: an index into the inherited one, whose values may be UUIDs."""
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if inherited is None:
        return str(index)
    visible = [value.strip() for value in inherited.split(",") if value.strip()]
    if index < 0 or index >= len(visible):
        raise UserError(
            f"GPU {index} is asked for, but CUDA_VISIBLE_DEVICES holds {len(visible)} ({inherited!r})",
            where="servers.gpus",
            hint="GPUs are indices into CUDA_VISIBLE_DEVICES, from 0",
        )
    return visible[index]


def server_mark(layout: Layout, name: str) -> str:
    """Value of `MARK_VARIABLE` for a server."""
    return os.path.abspath(layout.ready(name))


def prepare(config: Config, where: ServerPlace, model: Path) -> Launch:
    """The engine's launch, its GPUs and its mark included.

    Raises:
        UserError: if the settings cannot work with the installed engine.
    """
    return launch_at(config, where, engine_for(config).launch(config, where, model))


def launch_at(config: Config, where: ServerPlace, launch: Launch) -> Launch:
    """A launch with its server's GPUs and mark."""
    environment = {MARK_VARIABLE: server_mark(config.layout, where.name)}
    if where.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(where.gpus)
    return dataclasses.replace(launch, environment=environment | launch.environment)


def launch_digest(config: Config, where: ServerPlace, model: Path, model_digest: str) -> str:
    """Hash of all that makes a running server the one that this configuration would start."""
    if config.engine.kind == "external":
        parts: list[Any] = ["external", where.url, config.engine.external.flavor, config.engine.external.model]
        parts.append(where.api_key)
    else:
        launch = prepare(config, where, model)
        # The pipeline's own Python may be another one for the Snakefile than for its jobs.
        command = ["python" if word == sys.executable else word for word in launch.command]
        parts = [config.engine.kind, command, launch.environment, where.url, config.model.source, model_digest]
        parts += [launch.files] if launch.files else []
    return sha256_hex(canonical_json(parts))
