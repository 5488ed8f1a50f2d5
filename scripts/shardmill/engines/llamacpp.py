"""llama.cpp, the embedded engine: its native server out of the `xllamacpp` wheel, in a process of its own.

Names of fields and metrics: the README of llama.cpp's server (tools/server).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import orjson

from ..config import Config
from ..errors import UserError
from .base import Answer, Fault, Launch, Load, ServerPlace
from .llamacpp_server import API_KEY_VARIABLE, SETTINGS_VARIABLE
from .openai import OpenAI, get_json, get_metrics, pick_lines

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]

_PENALTY_WINDOW = 1 << 16  # tokens
_LOG_PREFIX = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} ")
_TROUBLE = re.compile(r"^E |\b(error|exception|GGML_ASSERT|terminate called|abort\w*|fatal)\b|Error:", re.IGNORECASE)
# About single requests, or said at every start.
_NOISE = re.compile(r"send_error|got exception|unauthorized|security: no API key|--cache-idle-slots")


class LlamaCpp(OpenAI):
    """Adapter for llama.cpp's server."""

    kind = "llamacpp"
    # On a laptop's CPU a whole thought takes minutes; the judge of the answers sees a missing one as well.
    proves_thinking = False

    def launch(self, config: Config, place: ServerPlace, model: Path) -> Launch:
        if importlib.util.find_spec("xllamacpp") is None:
            raise UserError("the package xllamacpp is not installed", where="engine.kind", hint="run `make env`")
        settings = config.engine.llamacpp
        template = config.model.chat_template
        values = {
            "model": os.path.abspath(model),
            "host": place.host,
            "port": place.port,
            "slots": settings.slots,
            "context_length": settings.context_length,
            "threads": settings.threads,
            # Each request holds an HTTP thread; /metrics must never queue behind them.
            "http_threads": 2 * settings.slots + (config.dispatch.queue or 0) + 32,
            "chat_template": os.path.abspath(template) if template else None,
        }
        environment = {
            SETTINGS_VARIABLE: orjson.dumps(values).decode(),
            # Waiting OpenMP threads must sleep: spinning ones cost ten times the speed on few cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": str(_PACKAGE_ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        if place.api_key:
            environment[API_KEY_VARIABLE] = place.api_key
        return Launch([sys.executable, "-m", "shardmill.engines.llamacpp_server"], environment)

    def load(self, place: ServerPlace, *, timeout: float) -> Load | None:
        metrics = get_metrics(place, timeout=timeout)
        if metrics is None or "llamacpp:requests_processing" not in metrics:
            return None
        properties = get_json(place, "/props", timeout=timeout)
        slots = properties.get("total_slots") if isinstance(properties, dict) else None
        value = {name.removeprefix("llamacpp:"): figure for name, figure in metrics.items()}
        return Load(
            running=int(value["requests_processing"]),
            queued=int(value.get("requests_deferred", 0)),
            prompt_tokens=value.get("prompt_tokens_total", 0.0) + value.get("prompt_tokens_cached_total", 0.0),
            # Moves when a request finishes; `decode_calls` moves with every token.
            completion_tokens=value.get("tokens_predicted_total"),
            capacity=slots,
            details={"decode_calls": value.get("n_decode_total", 0.0)},
        )

    def verify(self, config: Config, place: ServerPlace, *, timeout: float) -> str | None:
        """What the running server does otherwise than it was told: it lowers its context to the model's own limit."""
        if config.engine.kind == "external":
            return None
        asked = config.engine.llamacpp.context_length
        properties = get_json(place, "/props", timeout=timeout)
        try:
            context = int(properties["default_generation_settings"]["n_ctx"])
        except (TypeError, KeyError, ValueError):
            return "it does not tell its context length"
        if context < asked:
            return f"engine.llamacpp.context_length is {asked}, but the model allows {context}; write less"
        return None

    def version(self, place: ServerPlace) -> str:
        return f"xllamacpp {importlib.metadata.version('xllamacpp')}"

    def window(self, config: Config) -> int:
        return config.engine.external.window if config.engine.kind == "external" else config.engine.llamacpp.slots

    def _sampling_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        fields = dict(values)
        fields["top_k"] = max(0, fields["top_k"])  # 0 is "all" here
        fields["repeat_penalty"] = fields.pop("repetition_penalty")
        # Penalties look at the whole text, as everywhere else; llama.cpp's default is the last 64 tokens.
        fields["repeat_last_n"] = _PENALTY_WINDOW
        return fields

    def read_answer(self, status: int, body: bytes) -> Answer | Fault:
        result = super().read_answer(status, body)
        if isinstance(result, Fault):
            if b"exceed_context_size_error" in body:
                return Fault("too_long", result.message)
            if status == 500 and re.search(r"\b(jinja|template)\b", result.message, re.IGNORECASE):
                return Fault("template_error", result.message)
            if status == 500 and re.search(r"failed to parse (tools|messages)", result.message, re.IGNORECASE):
                return Fault("bad_request", result.message)
        return result

    def telling_lines(self, log_tail: str) -> list[str]:
        lines = [_LOG_PREFIX.sub("", line) for line in log_tail.splitlines() if not _NOISE.search(line)]
        return pick_lines("\n".join(lines), lambda line: bool(_TROUBLE.search(line)))
