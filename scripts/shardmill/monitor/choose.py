"""Which run to look at, and with which settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..config import Config
from ..errors import UserError
from ..files import read_json_or_none
from ..layout import Layout
from ..load_config import load_config
from ..overrides import merge
from ..owner import owner_is_alive

HINT = "name a run with --run, or its configuration with --configfile"


def choose_run(*, configfile: str | None, run: str | None, default: str = "config.yaml") -> Config:
    """The configuration of the run to look at.

    In this order: the file and the run that are named; the named run by what it recorded itself; the run of
    `config.yaml`, if it ever began; the live run, else the youngest, among the others in the same results folder.

    Raises:
        UserError: if there is none, or a file cannot be read.
    """
    settings = _read(Path(default)) if Path(default).exists() else {}
    if configfile is not None:
        own = _read(Path(configfile))
        if "source" not in (own.get("model") or {}):
            merge(settings, own)
            own = settings
        return _named(load_config(own), run)
    if run is None and settings:
        config = load_config(settings)
        if config.layout.root.exists():
            return config
        return _youngest(config.run.results)
    results = (settings.get("run") or {}).get("results", "results")
    return recorded(results, run) if run is not None else _youngest(results)


def recorded(results: str, run: str) -> Config:
    """The configuration that a run recorded, from its manifest or a server's specification.

    Raises:
        UserError: if there is no such run.
    """
    layout = Layout(results, run)
    if not layout.root.is_dir():
        known = ", ".join(sorted(path.name for path in _runs(results))) or "none"
        raise UserError(f"no such run in {results}/; there are: {known}", where=f"run {run}", hint=HINT)
    specs = sorted(layout.root.glob("servers/*.spec.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [*specs, layout.manifest]:
        value = read_json_or_none(path)
        if isinstance(value, dict) and isinstance(value.get("config"), dict):
            value["config"].setdefault("run", {}).update(name=run, results=results)
            return load_config(value["config"])
    raise UserError("it recorded no configuration yet", where=f"run {run}", hint="name it with --configfile")


def _youngest(results: str) -> Config:
    runs = _runs(results)
    if not runs:
        raise UserError(f"no run in {results}/ yet", hint=HINT)
    live = [path for path in runs if owner_is_alive(Layout(results, path.name))]
    newest = max(live or runs, key=lambda path: path.stat().st_mtime)
    return recorded(results, newest.name)


def _runs(results: str) -> list[Path]:
    folder = Path(results)
    return [path.parent for path in folder.glob("*/run.json")] if folder.is_dir() else []


def _named(config: Config, run: str | None) -> Config:
    if run is None:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"name": run})})


def _read(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot be read ({reason})", where=str(path)) from None
    if not isinstance(value, dict):
        raise UserError("holds no settings", where=str(path))
    return value
