"""SGLang, the production engine.

Field, flag and metric names: SGLang's own (`python -m sglang.launch_server --help`, its docs on the OpenAI API and on
production metrics), as measured with 0.5.23 and read from 0.5.11.
"""

from __future__ import annotations

import dataclasses
import math
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

from ..config import Config
from ..layout import slug
from ..logs import get_logger
from .base import Answer, BootReport, Fault, Launch, Load, ServerPlace
from .openai import OpenAI, get, get_json, pick_lines
from .sglang_boot import judge_boot, read_boot
from .sglang_errors import refine_fault
from .sglang_launch import launch_words, server_environment
from .sglang_version import check_version, flags_of, is_known, python_path, unknown_version

log = get_logger(__name__)

# Requests at one server that does not say how many it can run: what SGLang itself falls back to.
_DEFAULT_WINDOW = 48
_TOLD: set[str] = set()
_PREFIX = re.compile(r"^\[[0-9: -]+( [A-Z]+[0-9]+)*\] ")
_TROUBLE = re.compile(
    r"Error\b|\bException\b|\bout of memory\b|\bcrashed\b|\bCUDA error\b|\bNCCL\b.*\b(error|fail)|\berror:|\bfailed\b",
    re.IGNORECASE,
)
# All the settings on one line, about single requests, or of no consequence.
_NOISE = re.compile(
    r"server_args=|ServerArgs\(|Ignore import error|During handling of the above|^Traceback|BadRequestError|"
    r"\bWARNING\b|FutureWarning|DeprecationWarning|SGLANG_CPU_OMP_THREADS_BIND|Responses API|SIGQUIT received"
)


class SGLang(OpenAI):
    """Adapter for SGLang's server."""

    kind = "sglang"

    def launch(self, config: Config, place: ServerPlace, model: Path) -> Launch:
        version = check_version(config)
        if not is_known(version) and version not in _TOLD:
            _TOLD.add(version)
            log.warning(unknown_version(version))
        return self.launch_as(config, place, model, version)

    def launch_as(self, config: Config, place: ServerPlace, model: Path, version: str) -> Launch:
        """The launch as the given version wants it, whatever is installed here.

        Raises:
            UserError: naming each flag or value that this version does not know.
        """
        words = launch_words(config, place, model, served_name(config))
        command = [str(python_path(config)), "-m", "sglang.launch_server", *flags_of(config, version).words(words)]
        files: dict[str, str] = {}
        if place.api_key:
            # Read by the server itself, so that no other user of the machine sees the key in the process list.
            secret = str(config.layout.server_secret(place.name).absolute())
            files[secret] = f"api-key: {orjson.dumps(place.api_key).decode()}\n"
            command += ["--config", secret]
        ports = (config.engine.sglang.nccl_port + int(place.name),)
        return Launch(command, server_environment(config), files, ports)

    def load(self, place: ServerPlace, *, timeout: float) -> Load | None:
        response = get(place, "/metrics", timeout=timeout)
        if response is None or response.status_code != 200:
            return None
        value = read_metrics(response.text)
        if "num_running_reqs" not in value:
            return None
        # The gauges are as old as the last line of the log; where the scheduler publishes its load, that is newer.
        now = _loads(get_json(place, "/v1/loads", timeout=timeout)) if "realtime_tokens_total/decode" in value else {}
        details = {name: value[key] for name, key in _DETAILS.items() if value.get(key)}
        prompt = [value[key] for key in _PROMPT_COUNTERS if key in value]
        return Load(
            running=int(now.get("num_running_reqs", value["num_running_reqs"])),
            queued=int(now.get("num_waiting_reqs", value.get("num_queue_reqs", 0))),
            prompt_tokens=sum(prompt) if prompt else value.get("prompt_tokens_total", 0.0),
            # The first one moves with every token, the second, all that 0.5.11 has, when a request finishes.
            completion_tokens=value.get("realtime_tokens_total/decode", value.get("generation_tokens_total", 0.0)),
            capacity=int(now["max_running_requests"]) if "max_running_requests" in now else None,
            details=details,
        )

    def boot_report(self, config: Config, place: ServerPlace, model: Path | None, log_tail: str) -> BootReport:
        boot = read_boot(place, log_tail)
        return judge_boot(config, boot, model) if boot else BootReport(errors=("it does not answer /server_info",))

    def version(self, place: ServerPlace) -> str:
        info = get_json(place, "/server_info", timeout=30)
        return f"sglang {info.get('version', '')}".strip() if isinstance(info, dict) else ""

    def window(self, config: Config) -> int:
        if config.engine.kind == "external":
            return config.engine.external.window
        return config.engine.sglang.max_running_requests or _DEFAULT_WINDOW

    def request_body(
        self,
        config: Config,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        seed: int,
        overrides: dict[str, Any],
    ) -> dict[str, Any]:
        body = super().request_body(config, messages, tools, seed, overrides)
        if config.engine.kind == "sglang":
            body["model"] = served_name(config)
        body.setdefault("separate_reasoning", True)
        # SGLang aborts by prefix of this, so all are of one length; it also names the request in the server's log.
        body.setdefault("rid", uuid.uuid4().hex)
        if config.output.token_ids:
            body.setdefault("return_token_ids", True)  # 0.5.11 ignores it
        return body

    def read_answer(self, status: int, body: bytes) -> Answer | Fault:
        result = super().read_answer(status, body)
        if isinstance(result, Fault):
            return refine_fault(result, status, body)
        choice = orjson.loads(body)["choices"][0]
        return dataclasses.replace(
            result,
            prompt_token_ids=_token_ids(choice.get("prompt_token_ids")),
            completion_token_ids=_token_ids(choice.get("response_token_ids")),
        )

    def telling_lines(self, log_tail: str) -> list[str]:
        plain = "\n".join(_PREFIX.sub("", line) for line in log_tail.splitlines())
        return pick_lines(plain, lambda line: bool(_TROUBLE.search(line)) and not _NOISE.search(line))


def served_name(config: Config) -> str:
    """The name that the servers give their model: the last part of its source. Never with a colon, which would name
    an adapter.
    """
    source = config.model.source.partition("#")[0].rstrip("/")
    return slug(source.rpartition("/")[2].partition("@")[0], length=80)


_DETAILS = {
    "acceptance_length": "spec_accept_length",
    "acceptance_rate": "spec_accept_rate",
    "token_usage": "token_usage",
    "state_usage": "mamba_usage",
    "retracted": "num_retracted_reqs",
}
_PROMPT_COUNTERS = ("realtime_tokens_total/prefill_compute", "realtime_tokens_total/prefill_cache")
_WANTED = ("num_running_reqs", "num_queue_reqs", "prompt_tokens_total", "generation_tokens_total")
_NAMES = frozenset((*_WANTED, *_DETAILS.values(), "realtime_tokens_total"))


def read_metrics(text: str) -> dict[str, float]:
    """The figures that count, by name without `sglang:`, and counters with a mode as `name/mode`.

    Every rank of a server with several GPUs may report; they all see the same requests, so only the first
    counts, while data-parallel parts are summed up.
    """
    found: dict[str, float] = {}
    for name, labels, value in _samples(text):
        if math.isnan(value) or any(labels.get(rank, "0") != "0" for rank in ("tp_rank", "pp_rank", "moe_ep_rank")):
            continue
        key = f"{name}/{labels['mode']}" if "mode" in labels else name
        is_share = name in ("token_usage", "mamba_usage", "spec_accept_length", "spec_accept_rate")
        found[key] = max(found.get(key, 0.0), value) if is_share else found.get(key, 0.0) + value
    return found


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    # Of a thousand lines a dozen are wanted, and this is read once a second.
    lines = [line for line in text.splitlines() if line.startswith("sglang:") and _bare_name(line) in _NAMES]
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                yield sample.name.removeprefix("sglang:"), sample.labels, sample.value
    except ValueError:
        return


def _bare_name(line: str) -> str:
    return re.split(r"[{ ]", line.removeprefix("sglang:"), maxsplit=1)[0]


def _loads(value: Any) -> dict[str, float]:
    """Sums over the data-parallel parts of /v1/loads; empty if it shows none."""
    try:
        parts = value["loads"]
        names = ("num_running_reqs", "num_waiting_reqs", "max_running_requests")
        return {name: sum(part[name] for part in parts) for name in names} if parts else {}
    except (TypeError, KeyError):
        return {}


def _token_ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and all(isinstance(one, int) for one in value) else None
