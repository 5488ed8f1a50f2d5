"""The llama.cpp server as a program: `python -m shardmill.engines.llamacpp_server`.

Settings come as JSON in the environment variable SHARDMILL_LLAMACPP, or in a file (`--settings`); the
api key, if any, in SHARDMILL_API_KEY: never on the command line, which all users of a machine can read.

SIGTERM keeps its default action: an orderly stop of this server deadlocks while a request is in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

# This module imports nothing heavy: it is read at every start of a server.
SETTINGS_VARIABLE = "SHARDMILL_LLAMACPP"
API_KEY_VARIABLE = "SHARDMILL_API_KEY"


def serve(settings: dict[str, Any], api_key: str | None) -> Any:
    """Start the server, in threads of this process; returns the object that keeps it alive.

    Raises:
        RuntimeError: if it does not start; llama.cpp has printed why.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.model_alias = {"shardmill"}
    params.hostnames = [settings["host"]]
    params.port = settings["port"]
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["slots"] * settings["context_length"]  # the total over all slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.n_threads_http = settings["http_threads"]
    params.cache_ram_mib = 0  # 8 GB by default
    params.endpoint_metrics = params.endpoint_props = True
    params.use_jinja = True
    params.reasoning_format = xllamacpp.common_reasoning_format.COMMON_REASONING_FORMAT_DEEPSEEK
    params.fit_params = False  # rather fail than serve with less context than was asked for
    params.ui = False
    params.verbosity = 2  # warnings and errors; the next level is ten lines per request
    if settings.get("chat_template"):
        params.chat_template = Path(settings["chat_template"]).read_text(encoding="utf-8")
    if api_key:
        params.api_keys = [api_key]
    return xllamacpp.Server(params)


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve a GGUF model with llama.cpp.")
    parser.add_argument("--settings", type=Path, help=f"JSON file; default: the environment's {SETTINGS_VARIABLE}")
    options = parser.parse_args()
    text = options.settings.read_text() if options.settings else os.environ[SETTINGS_VARIABLE]
    settings, api_key = json.loads(text), os.environ.get(API_KEY_VARIABLE)
    try:
        server = serve(settings, api_key)
    except ImportError as error:
        print(f"error: llama.cpp cannot be loaded: {error} (is the system package libgomp1 installed?)", flush=True)
        return 1
    except (RuntimeError, OSError) as error:
        print(f"llama.cpp did not start: {error}", flush=True)  # why is in its own lines
        return 1
    print(f"listening on {server.listening_address}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
