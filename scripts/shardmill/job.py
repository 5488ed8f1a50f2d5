"""The one entry of all scripts: under Snakemake, or by hand for debugging.

python scripts/generate.py --configfile config.yaml --shard 00003
"""

from __future__ import annotations

import argparse
import signal
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import yaml

from . import logs
from .config import Config
from .errors import UserError
from .load_config import load_config, read_settings


@dataclass(frozen=True)
class Job:
    """What a script is asked to do."""

    config: Config
    wildcards: SimpleNamespace
    log: str | None


def enter(snakemake: Any | None, *wildcards: str) -> Job:
    """Read the job's configuration and wildcards, and set up logging.

    Args:
        snakemake: the object that Snakemake puts into a script's globals, or None by hand.
        wildcards: names of the wildcards that the script needs; by hand they are options.
    """
    if snakemake is None:
        return _enter_by_hand(wildcards)
    log = str(snakemake.log[0]) if snakemake.log else None
    logs.configure(log)
    values = {name: snakemake.wildcards[name] for name in wildcards}
    return Job(load_config(dict(snakemake.config)), SimpleNamespace(**values), log)


def stop_on_signals(stop: threading.Event) -> None:
    """Let SIGINT and SIGTERM ask for an orderly stop."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stop.set())


def _enter_by_hand(wildcards: tuple[str, ...]) -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configfile", default="config.yaml")
    for name in wildcards:
        parser.add_argument(f"--{name}", required=True)
    arguments = vars(parser.parse_args())
    logs.configure(None)
    try:
        settings = read_settings(arguments.pop("configfile"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"cannot be read ({error})", where="--configfile") from error
    return Job(load_config(settings), SimpleNamespace(**arguments), None)
