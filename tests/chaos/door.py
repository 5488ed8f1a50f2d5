"""A recording, misbehaving front door before a real server: who asked what when, and what was answered."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests


@dataclass
class Asked:
    """One request for a completion that came to the door.

    Args:
        key: (all messages as JSON, seed).
        at: when, seconds since the epoch.
        answer: content and thought that were passed back whole; None if none was.
    """

    key: tuple[str, int]
    at: float
    answer: tuple[str, str] | None = None


@dataclass
class Door:
    """Before the server at `target`; `fault` is one of `schedule.DOOR` or empty."""

    target: str
    url: str = ""
    fault: str = ""
    delays: dict[str, float] = field(default_factory=dict)  # seconds by last user turn, before it is passed on
    asked: list[Asked] = field(default_factory=list)


def key_of(messages: list[dict[str, object]], seed: int) -> tuple[str, int]:
    """What names a request: its conversation without thoughts, and its seed."""
    plain = [[message["role"], message["content"]] for message in messages]
    return json.dumps(plain, ensure_ascii=False), seed


@contextlib.contextmanager
def open_door(target: str, beside: Door | None = None) -> Iterator[Door]:
    """Put a door before the server at `target`; a second one `beside` the first shares its records."""
    door = Door(target, asked=beside.asked if beside else [])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if door.fault == "answer 503":
                return self._send(503, b"{}")
            if door.fault == "cut connections":
                return self._cut()
            self._pass(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = json.loads(body)
            asked = Asked(key_of(request["messages"], request["seed"]), time.time())
            door.asked.append(asked)
            time.sleep(door.delays.get(request["messages"][-1]["content"], 0.0))
            match door.fault:
                case "answer 503":
                    self._send(503, b'{"error": {"message": "overloaded"}}')
                case "cut connections":
                    self._cut()
                case "garbage answers":
                    self._send(200, b'{"choices": [{"mess')
                case "swallow requests":
                    while door.fault == "swallow requests":
                        time.sleep(0.05)
                    self._cut()
                case _:
                    self._pass(body, asked)

        def _pass(self, body: bytes | None, asked: Asked | None = None) -> None:
            try:
                answer = requests.request(
                    self.command, door.target + self.path, data=body, headers={"Content-Type": "application/json"}
                )
            except requests.RequestException:
                return self._cut()
            if asked and door.fault == "cut connections":
                return self._cut()
            if asked and answer.status_code == 200:
                message = answer.json()["choices"][0]["message"]
                asked.answer = (message.get("content") or "", message.get("reasoning_content") or "")
            self._send(answer.status_code, answer.content, answer.headers.get("Content-Type", "application/json"))

        def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def _cut(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    door.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield door
    finally:
        door.fault = "cut connections"
        server.shutdown()
        server.server_close()
        thread.join()
