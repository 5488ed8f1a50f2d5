"""What a stand-in says of itself: health, load, settings, metrics and its log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson

from . import bodies
from .wire import METRICS, TEXT, Connection

if TYPE_CHECKING:
    from .standin import Server

REPORT = 0.5  # seconds between throughput readings


def log(line: str) -> None:
    """One line in SGLang's log format, to stderr."""
    print(time.strftime("[%Y-%m-%d %H:%M:%S] ") + line, file=sys.stderr, flush=True)


class Reports:
    """The endpoints that only read. `frozen` is the load that a hung scheduler showed last."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.throughput = 0.0
        self.frozen: bodies.Load | None = None
        self._last = (server.loop.time(), 0)

    def routes(self) -> dict[tuple[str, str], Callable[[Connection], None]]:
        """Handlers by method and path, as the version and the options offer them."""
        found: dict[tuple[str, str], Callable[[Connection], None]] = {
            ("GET", "/health"): self.health,
            ("GET", "/health_generate"): self.health,
            ("GET", "/server_info"): self.server_info,
            ("GET", "/get_server_info"): self.server_info,
            ("GET", "/model_info"): self.model_info,
            ("GET", "/get_model_info"): self.model_info,
            ("GET", "/v1/models"): self.models,
            ("GET", "/v1/loads"): self.loads,
        }
        if self.server.version == "0.5.11":
            found["GET", "/get_load"] = self.get_load
        if self.server.args.enable_metrics:
            found["GET", "/metrics"] = self.metrics
        return found

    def report(self) -> None:
        """Measure throughput and log a decode line, as SGLang does every few steps."""
        now = self.server.loop.time()
        self.server.batch.advance(now)
        self.server.arm()
        total = self.server.batch.tokens_total()
        (before, tokens), self._last = self._last, (now, total)
        running = len(self.server.batch.running)
        if running and not self.server.batch.frozen:
            self.throughput = (total - tokens) / (now - before)
            load = self.load()
            spec = (
                f"accept len: {load.accept_length:.2f}, accept rate: {load.accept_rate:.2f}, "
                if load.accept_length
                else ""
            )
            log(
                f"Decode batch, #running-req: {running}, #token: {load.held_tokens}, "
                f"token usage: {load.held_tokens / load.pool:.2f}, {spec}cuda graph: True, "
                f"gen throughput (token/s): {self.throughput:.2f}, #queue-req: {load.waiting}"
            )
        elif not running and self.server.version != "0.5.11":  # 0.5.11 shows its last value when idle
            self.throughput = 0.0
        self.server.loop.call_later(REPORT, self.report)

    def load(self) -> bodies.Load:
        """The present load; that of the moment it stopped if the scheduler hangs."""
        if self.frozen:
            return self.frozen
        batch = self.server.batch
        batch.advance(self.server.loop.time())
        self.server.arm()
        accept = rate = None
        if self.server.args.speculative_algorithm:
            accept = self.server.args.standin_accept_length
            rate = (accept - 1) / (self.server.args.speculative_num_steps or 3)
        return bodies.Load(
            time=time.time(),
            running=len(batch.running),
            waiting=len(batch.waiting),
            waiting_tokens=sum(job.prompt for job in batch.waiting),
            held_tokens=batch.tokens_held(),
            pool=self.server.args.pool,
            capacity=batch.capacity,
            throughput=self.throughput,
            prompt_tokens=batch.prompt_total,
            decode_tokens=batch.tokens_total(),
            accept_length=accept,
            accept_rate=rate,
        )

    def health(self, connection: Connection) -> None:
        """A one-token generation: 1 s in real time, less when time is scaled; 503 while starting or draining."""
        bad = not self.server.ready or self.server.draining or "unhealthy" in self.server.faults.active
        if bad:
            return connection.respond(503, b"", TEXT)
        self.server.loop.call_later(min(1.0, self.server.args.standin_time_scale), connection.respond, 200, b"", TEXT)
        return None

    def server_info(self, connection: Connection) -> None:
        """Answered by the scheduler, so a hung one leaves the question open."""
        if self.server.batch.frozen:
            return
        longest = min(self.server.args.context, self.server.args.pool) - 6
        connection.respond(
            200, orjson.dumps(bodies.server_info(self.server.version, self.server.settings, self.load(), longest))
        )

    def model_info(self, connection: Connection) -> None:
        connection.respond(200, orjson.dumps(bodies.model_info(self.server.settings)))

    def models(self, connection: Connection) -> None:
        name = self.server.args.served_model_name
        connection.respond(200, orjson.dumps(bodies.models(name, int(self.server.started), self.server.args.context)))

    def loads(self, connection: Connection) -> None:
        connection.respond(200, orjson.dumps(bodies.loads(self.server.version, self.load(), time.time())))

    def get_load(self, connection: Connection) -> None:
        connection.respond(200, orjson.dumps(bodies.get_load(self.load())))

    def metrics(self, connection: Connection) -> None:
        text = bodies.metrics(
            self.server.version, self.server.args.served_model_name, self.load(), self.server.counters
        )
        connection.respond(200, text.encode(), METRICS)
