"""How many requests at once the servers should run: throughput against requests in flight, on the run's own prompts.

The requests are real ones of the run, on all its servers at once, in a closed loop: whenever one is answered the next
is sent. Their number grows level by level and never falls, so nothing is cut off until the end; the answers that were
finished are thrown away, since what counts is the time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import orjson
import requests

from .client import Call, Client
from .config import Config
from .conversation import without_thoughts
from .economics.estimate import knee
from .engines.base import Answer
from .engines.registry import engine_for
from .errors import UserError
from .files import read_json, write_json
from .logs import get_logger
from .pool import ServerPool, ServerView
from .prompts.shards import read_shard

log = get_logger(__name__)

SETTLE_PART = 0.3  # of a level's time, before its measurement begins
MOST_PROMPTS = 2000
LOAD_TIMEOUT = 10.0
SETTING = {
    "sglang": "engine.sglang.max_running_requests",
    "llamacpp": "engine.llamacpp.slots",
    "external": "engine.external.window",
}


def levels_up_to(most: int) -> list[int]:
    """Requests in flight to try: powers of two, one and a half times those from 8 on, and the most."""
    found = {most} | {2**n for n in range(12)} | {3 * 2**n for n in range(2, 11)}
    return sorted(level for level in found if level <= most)


class Calibration:
    """Loads the servers of a run, level by level."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.stop = threading.Event()
        self._engine = engine_for(config)
        self._pool = ServerPool(config, self._engine)
        self._lock = threading.Lock()
        self._calls: set[Call] = set()
        self._answered_tokens = 0
        self._failure: str | None = None
        self._prompts = self._endless_prompts()

    def run(self) -> dict[str, Any]:
        """Measure all levels; writes and returns the report.

        Raises:
            UserError: if no server is ready, or they answer nothing.
        """
        servers = [server for server, slots in zip(self._pool.servers, self._pool.slots(), strict=True) if slots]
        if not servers:
            raise UserError(f"no server is ready: {self._pool.explain()}", where="calibrate")
        most = max(self._pool.slots())
        self._client = Client(connections=most)
        threads: list[threading.Thread] = []
        measured: list[dict[str, Any]] = []
        try:
            for level in levels_up_to(most):
                missing = level - len(threads) // len(servers)
                for server in servers * missing:
                    threads.append(threading.Thread(target=self._keep_asking, args=(server, len(threads)), daemon=True))
                    threads[-1].start()
                measured.append(self._measure(level, servers))
                log.info("calibrate: %d in flight: %.1f tokens/s per server", level, measured[-1]["tokens_per_second"])
        finally:
            self.stop.set()
            with self._lock:
                calls = list(self._calls)
            for call in calls:
                call.abort()
            for thread in threads:
                thread.join()
            self._client.close()
        return self._report(measured, len(servers), most)

    def _measure(self, level: int, servers: list[ServerView]) -> dict[str, Any]:
        seconds = self.config.economics.calibration_seconds
        self._wait(seconds * SETTLE_PART)
        begun, before = time.monotonic(), self._tokens(servers)
        self._wait(seconds * (1 - SETTLE_PART))
        rate = (self._tokens(servers) - before) / (time.monotonic() - begun) / len(servers)
        return {
            "in_flight": level,
            "tokens_per_second": round(rate, 2),
            "tokens_per_request_second": round(rate / level, 2),
        }

    def _wait(self, seconds: float) -> None:
        self.stop.wait(seconds)
        if self._failure:
            raise UserError(self._failure, where="calibrate")
        if self.stop.is_set():
            raise UserError("stopped", where="calibrate")

    def _tokens(self, servers: list[ServerView]) -> float:
        """Tokens so far by the servers' own count; by the finished answers where they keep none."""
        loads = [self._engine.load(server.place, timeout=LOAD_TIMEOUT) for server in servers]
        counted = [load.completion_tokens for load in loads if load and load.completion_tokens is not None]
        return sum(counted) if len(counted) == len(servers) else float(self._answered_tokens)

    def _keep_asking(self, server: ServerView, number: int) -> None:
        for attempt in itertools.count():
            if self.stop.is_set():
                return
            try:
                self._ask(server, seed=1_000_000 * number + attempt)
            except requests.RequestException as error:
                if not self.stop.is_set():
                    self._failure = f"server {server.place.name} broke off: {error}"
                return
            except UserError as error:
                self._failure = str(error)
                return

    def _ask(self, server: ServerView, seed: int) -> None:
        with self._lock:
            prompt = next(self._prompts)
        messages = without_thoughts(prompt["messages"])
        overrides = prompt.get("sampling") or {}
        body = self._engine.request_body(self.config, messages, prompt.get("tools"), seed & 0x7FFFFFFF, overrides)
        call = Call()
        with self._lock:
            self._calls.add(call)
        try:
            if self.stop.is_set():
                return
            url = f"{server.place.url}/v1/chat/completions"
            status, raw = self._client.post(url, orjson.dumps(body), api_key=server.place.api_key, call=call)
        finally:
            with self._lock:
                self._calls.discard(call)
        result = self._engine.read_answer(status, raw)
        if isinstance(result, Answer):
            with self._lock:
                self._answered_tokens += result.usage["completion_tokens"]
        elif not result.is_final:
            raise UserError(f"{result.kind}: {result.message}", where=f"server {server.place.name}")

    def _endless_prompts(self) -> Iterator[dict[str, Any]]:
        """Prompts of the run's first shards, again and again; each time with another seed."""
        layout, found = self.config.layout, []
        for entry in read_json(layout.prompt_index)["shards"]:
            found += read_shard(layout, entry["name"], entry)
            if len(found) >= MOST_PROMPTS:
                break
        if not found:
            raise UserError("there are no prompts to ask", where="calibrate")
        return itertools.cycle(found)

    def _report(self, measured: list[dict[str, Any]], servers: int, most: int) -> dict[str, Any]:
        try:
            point, rises = knee([(level["in_flight"], level["tokens_per_second"]) for level in measured])
        except ValueError:
            raise UserError("the servers made no tokens", where="calibrate") from None
        key = SETTING[self.config.engine.kind]
        if rises:
            advice = f"still rising at {most}, all that the servers run at once: raise `{key}` and calibrate again"
        elif point < most:
            advice = f"{point} in flight reach 95 % of the best rate: `{key}: {point}` answers each request sooner"
        else:
            advice = f"`{key}: {most}` is right"
        # What the run will get: its dispatch keeps as many in flight as the servers run.
        report = {
            "engine": self.config.engine.kind,
            "servers": servers,
            "levels": measured,
            "knee": point,
            "tokens_per_second": measured[-1]["tokens_per_second"],
            "advice": advice,
            "measured_at": time.time(),
        }
        write_json(self.config.layout.calibration, report)
        return report
