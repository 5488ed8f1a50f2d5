"""A stand-in for a SGLang server: its HTTP API and its faults, without a model.

    python -m tests.sglang.standin --model-path M --port P [SGLang's launch options] [--standin-... options]

For what the real server on CPU (build_env.py) cannot show: speculative decoding and its silent caps, thousands of
answers per second, slow GPUs, and servers that fail in a chosen way at a chosen request (faults.py). Answers are a
pure function of the request (answers.py), so a checker can derive them again. test_standin_against_real.py holds it
to the real thing.

Its own endpoints: POST /_standin/faults (turn faults on), GET /_standin/stats (what has been received and answered).
The record (`--record FILE`) gets a line when a request arrives and one when it ends: number, key (of prompt, seed and
thinking mode: equal keys are equal requests), rid, status, finish_reason. It is written at once and
survives kill -9.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from . import answers, bodies, launch
from .batch import Batch, Job
from .faults import FaultError, Faults, Hits, change_answer, change_plan
from .reports import Reports, log
from .wire import TEXT, Connection

_FREE_OF_KEY = ("/health", "/health_generate", "/metrics")


@dataclass(slots=True)
class Call:
    """One chat request on its way."""

    number: int
    rid: str
    key: bytes
    connection: Connection
    request: dict[str, Any]
    plan: answers.Plan
    prompt: int
    hits: Hits
    job: Job | None = None


class Server:
    """State and request handlers of one stand-in process."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.version: str = args.standin_version
        self.settings = launch.server_args(args)
        self.started = time.time()
        self.faults = Faults(args.faults)
        self.counters = bodies.Counters()
        self.statuses: Counter[int] = Counter()
        self.received = 0
        self.ready = self.draining = False
        self.calls: dict[str, Call] = {}
        scale = args.standin_time_scale / args.standin_speed / 1000
        base, per_job, prefill = args.step_ms
        self.batch = Batch(
            capacity=args.effective,
            pool=args.pool,
            base=base * scale,
            per_job=per_job * scale,
            prefill=prefill * scale,
            on_finish=self._on_finish,
        )
        self.record = (
            os.open(args.standin_record, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if args.standin_record else -1
        )
        self.loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._rids = itertools.count(uuid.uuid4().int >> 1)
        self.reports = Reports(self)
        self._routes: dict[tuple[str, str], Callable[[Connection], None]] = {
            ("POST", "/v1/chat/completions"): self.chat,
            ("POST", "/abort_request"): self.abort_request,
            ("POST", "/flush_cache"): self.flush_cache,
            ("GET", "/flush_cache"): self.flush_cache,
            ("GET", "/_standin/stats"): self.stats,
            ("GET", "/_standin/faults"): self.show_faults,
            ("POST", "/_standin/faults"): self.set_faults,
        }
        self._routes |= self.reports.routes()
        self._paths = {path for _method, path in self._routes}

    # Requests

    def handle(self, connection: Connection) -> None:
        """Route one request."""
        path = connection.path
        handler = self._routes.get((connection.method, path))
        if handler is None:
            known = path in self._paths
            detail = "Method Not Allowed" if known else "Not Found"
            return connection.respond(405 if known else 404, orjson.dumps({"detail": detail}))
        key = self.args.api_key
        free = not key or path in _FREE_OF_KEY or path.startswith("/_standin/")
        if not free and connection.headers.get("authorization") != f"Bearer {key}":
            return connection.respond(401, b'{"error":"Unauthorized"}')
        return handler(connection)

    def chat(self, connection: Connection) -> None:
        """Check a chat request as SGLang does and put it into the batch, unless a fault has other plans."""
        if "application/json" not in connection.headers.get("content-type", ""):
            wrong = bodies.invalid("value_error", "'header', 'content-type'", "Unsupported Media Type")
            return self._refuse(connection, wrong)
        try:
            request = orjson.loads(connection.body)
        except orjson.JSONDecodeError as error:
            return self._refuse(connection, bodies.invalid("json_invalid", f"'body', {error.pos}", "JSON decode error"))
        wrong = bodies.check_request(request)
        if wrong:
            return self._refuse(connection, wrong)
        messages = request["messages"]
        prompt = answers.prompt_tokens(messages, request.get("tools"))
        most = request.get("max_completion_tokens", request.get("max_tokens"))
        wrong = bodies.check_length(prompt, most, self.args.context)
        if wrong:
            return self._refuse(connection, wrong)
        # SGLang gives a request no more than context and KV pool leave, and says so only by "length".
        room = max(1, min(self.args.context, self.args.pool) - 1 - prompt)
        return self._start(connection, request, prompt, room if most is None else min(most, room))

    def _start(self, connection: Connection, request: dict[str, Any], prompt: int, most: int) -> None:
        messages = request["messages"]
        thinking = (request.get("chat_template_kwargs") or {}).get("enable_thinking", True) is not False
        key = answers.key_of(messages, request.get("seed"), thinking)
        self.received += 1
        hits: Hits = {}
        if self.faults.active:
            hits = self.faults.hits(self.received, "\n".join(answers.text_of(m.get("content")) for m in messages))
        endless = bool(request.get("ignore_eos"))
        chosen = answers.plan(key, thinking, self.args.lengths, most, ignore_eos=endless)
        if hits:
            chosen = change_plan(chosen, hits, most)
        rid = request.get("rid") or f"{next(self._rids) & (2**128 - 1):032x}"
        call = Call(self.received, rid, key, connection, request, chosen, prompt, hits)
        if self.record >= 0:
            self._write(call, {"event": "received", "seed": request.get("seed"), "prompt_tokens": prompt})
        if hits and self._refused_by_fault(call):
            return
        limit = self.args.max_queued_requests
        busy = len(self.batch.running) >= self.batch.capacity
        if limit is not None and busy and len(self.batch.waiting) + 1 > limit:
            return self._end(call, 503, bodies.error("The request queue is full.", "503", 503))
        call.job = Job(call, chosen.tokens, prompt)
        self.calls[rid] = call
        connection.on_lost = lambda: self._client_gone(call)
        self.batch.add(call.job, self.loop.time())
        self.arm()

    def _refused_by_fault(self, call: Call) -> bool:
        """Faults that end a request before it reaches the batch."""
        hits = call.hits
        for name in ("crash", "poison"):
            if name in hits:
                self.loop.call_later(hits[name].get("linger", 0.0), self._crash)
        if "silent" in hits:
            call.connection.on_lost = lambda: self._record_end(call, 0, "unanswered", 0)
            return True
        if "refuse" in hits:
            self._end(call, 503, bodies.error("The request queue is full.", "503", 503))
            return True
        if "error" in hits:
            status = hits["error"].get("status", 500)
            self._end(call, status, bodies.error("Internal server error", "InternalServerError", status))
            return True
        return False

    def _on_finish(self, job: Job) -> None:
        call: Call = job.payload
        self.calls.pop(call.rid, None)
        if call.connection.transport is not None:
            self._answer(call, call.plan)

    def _answer(self, call: Call, chosen: answers.Plan) -> None:
        """Write the answer and send it."""
        answer = answers.render(chosen, with_ids=bool(call.request.get("return_token_ids")))
        prompt = call.prompt
        if call.hits:
            answer = change_answer(answer, call.hits)
            if "under_report" in call.hits:
                prompt = min(prompt, call.hits["under_report"].get("tokens", prompt // 2))
        parsed = bool(self.args.reasoning_parser) and call.request.get("separate_reasoning") is not False
        body = bodies.chat(self.version, call.rid, call.request, answer, prompt=prompt, separate=parsed)
        if "misplaced" in call.hits:
            body["choices"][0]["message"]["content"] = None
        self.counters.requests += 1
        self.counters.prompt_tokens += call.prompt
        self.counters.generation_tokens += answer.completion_tokens
        if "reset" in call.hits:
            call.connection.break_off(orjson.dumps(body))
            return self._record_end(call, 0, "reset", answer.completion_tokens)
        return self._end(call, 200, body, answer.finish, answer.completion_tokens)

    def _end(self, call: Call, status: int, body: Any, finish: str | None = None, tokens: int = 0) -> None:
        self._record_end(call, status, finish, tokens)
        call.connection.respond(status, orjson.dumps(body))

    def _record_end(self, call: Call, status: int, finish: str | None, tokens: int) -> None:
        self.statuses[status] += 1
        if self.record >= 0:
            done = {"event": "finished", "status": status, "finish_reason": finish, "completion_tokens": tokens}
            self._write(call, done)

    def _refuse(self, connection: Connection, body: dict[str, Any]) -> None:
        """A request that is wrong in itself."""
        self.statuses[body["code"]] += 1
        connection.respond(body["code"], orjson.dumps(body))

    def _client_gone(self, call: Call) -> None:
        """SGLang aborts a request when its client has gone."""
        self.calls.pop(call.rid, None)
        if call.job:
            tokens = self.batch.cancel(call.job, self.loop.time())
            self.counters.aborted += 1
            self._record_end(call, 0, "disconnected", tokens)
            self.arm()

    def _write(self, call: Call, what: dict[str, Any]) -> None:
        what |= {"time": time.time(), "number": call.number, "rid": call.rid, "key": call.key.hex()}
        if call.hits:
            what["faults"] = list(call.hits)
        os.write(self.record, orjson.dumps(what) + b"\n")

    # Time

    def arm(self) -> None:
        """Keep one timer, set to the next finished request."""
        at = self.batch.next_finish()
        if at is None:
            return
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(max(at, self.loop.time() + 0.001), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.batch.advance(self.loop.time())
        self.arm()

    # What may be done to it

    def abort_request(self, connection: Connection) -> None:
        """Abort every request whose rid begins with the given one, provided that one with exactly this rid exists."""
        try:
            wanted = orjson.loads(connection.body or b"{}")
        except orjson.JSONDecodeError as error:
            return self._refuse(connection, bodies.invalid("json_invalid", f"'body', {error.pos}", "JSON decode error"))
        rid, everything = wanted.get("rid") or "", bool(wanted.get("abort_all"))
        connection.respond(200, b"", TEXT)
        if everything or rid in self.calls:
            for call in [c for c in self.calls.values() if everything or c.rid.startswith(rid)]:
                self._abort(call)
            self.arm()
        return None

    def _abort(self, call: Call) -> None:
        self.calls.pop(call.rid, None)
        assert call.job is not None
        tokens = self.batch.cancel(call.job, self.loop.time())
        self.counters.aborted += 1
        if call.connection.transport is not None:
            self._answer(call, answers.cut(call.plan, tokens, "abort"))

    def flush_cache(self, connection: Connection) -> None:
        text = (
            "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
            "the operation will not be performed.)\n"
        )
        connection.respond(200, text.encode(), TEXT)

    def stats(self, connection: Connection) -> None:
        """Counts since the start: chat requests received, and how they ended (status 0: no whole answer was sent)."""
        self.reports.load()
        body = {
            "received": self.received,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "running": len(self.batch.running),
            "waiting": len(self.batch.waiting),
            "tokens": self.batch.tokens_total(),
            "faults_shown": self.faults.shown,
        }
        connection.respond(200, orjson.dumps(body))

    def show_faults(self, connection: Connection) -> None:
        connection.respond(200, orjson.dumps(self.faults.active))

    def set_faults(self, connection: Connection) -> None:
        """Replace the faults by those of the body."""
        try:
            self.faults.replace(orjson.loads(connection.body))
        except (FaultError, orjson.JSONDecodeError) as error:
            return connection.respond(400, orjson.dumps({"error": str(error)}))
        self.apply_faults()
        return self.show_faults(connection)

    def apply_faults(self) -> None:
        """Start or end the faults that concern the whole server."""
        hang = "hang" in self.faults.active
        if hang and not self.reports.frozen:
            self.reports.frozen = self.reports.load()
        elif not hang:
            self.reports.frozen = None
        self.batch.freeze(hang, self.loop.time())
        self.arm()

    def _crash(self) -> None:
        log(f"Subprocess scheduler_0 (pid={os.getpid()}) crashed with exit code -9. Triggering SIGQUIT for cleanup...")
        os.kill(os.getpid(), signal.SIGKILL)

    async def drain(self) -> None:
        """What SIGTERM starts: unhealthy at once, gone when the last request is answered, however long that takes."""
        self.draining = True
        while self.calls:
            log(f"Gracefully exiting... Remaining number of requests {len(self.calls)}.")
            await asyncio.sleep(0.2)


async def serve(args: Namespace, lines: list[str]) -> int:
    """Run one stand-in until SIGTERM; returns the exit status."""
    log(f"server_args={launch.server_args(args)}")
    await asyncio.sleep(args.standin_boot_delay)
    for line in lines:
        log(line)
    log(
        f"max_total_num_tokens={args.pool}, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        f"max_running_requests={args.effective}, context_len={args.context}, available_gpu_mem=14.20 GB"
    )
    loop = asyncio.get_running_loop()
    server = Server(args)
    try:
        listener = await loop.create_server(lambda: Connection(server.handle), args.host, args.port, backlog=4096)
    except OSError as error:
        log(f"ERROR:    {error}")
        return 1
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    port = listener.sockets[0].getsockname()[1]
    log(f"INFO:     Uvicorn running on http://{args.host}:{port} (Press CTRL+C to quit)")
    server.ready = True
    server.apply_faults()
    server.reports.report()
    log("The server is fired up and ready to roll!")
    await stop.wait()
    await server.drain()
    return 0


def main() -> int:
    args = launch.parse(sys.argv[1:])
    lines = launch.resolve(args)
    try:
        return asyncio.run(serve(args, lines))
    except FaultError as error:
        print(f"standin: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
