"""The monitor as a web page: the page, its data, and /metrics, from a small server for one or a few people.

No external assets; a strict Content-Security-Policy, so that no text of a run can ever run as code; and no answer to
a foreign Host header, so that a web site cannot read a run through a visitor's browser (DNS rebinding).
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

import orjson

from ..errors import UserError
from .observer import Observer
from .prometheus import metrics_text

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Looks:
    """Snapshots that all clients share, so that many of them cost no more than one."""

    def __init__(self, observer: Observer, every: float) -> None:
        self._observer, self._every = observer, every
        self._lock = threading.Lock()
        self._taken = -1e9
        self._snapshot: dict[str, Any] = {}

    def snapshot(self) -> dict[str, Any]:
        """The latest look; a new one if that is too old."""
        with self._lock:
            if time.monotonic() - self._taken > self._every:
                self._snapshot = self._observer.snapshot()
                self._snapshot["curves"] = self._observer.curves(self._snapshot["at"])
                self._snapshot["every"] = self._every
                self._taken = time.monotonic()
            return self._snapshot


def serve(
    observer: Observer, host: str, port: int, *, every: float = 2.0, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until Ctrl-C.

    Args:
        port: 0 for any free one.
        ready: called with the URL; left out: it is printed.

    Raises:
        UserError: if the port is taken.
    """
    try:
        server = make_server(Looks(observer, max(0.5, every)), host, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot listen on {host}:{port} ({reason})", where="--serve", hint="take another port"
        ) from None
    shown = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
    url = f"http://{shown}:{server.server_port}/"
    if ready:
        ready(url)
    else:
        print(f"{url} (metrics: {url}metrics); Ctrl-C ends it", file=sys.stderr, flush=True)
    with server:
        server.serve_forever(poll_interval=0.2)


def make_server(looks: Looks, host: str, port: int) -> ThreadingHTTPServer:
    """The HTTP server, listening but not serving yet."""
    is_local = host in ("127.0.0.1", "localhost", "::1")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:
            if is_local and not _is_local_name(self.headers.get("Host", "")):
                self._send(403, "text/plain; charset=utf-8", b"ask for localhost\n")
                return
            path = self.path.partition("?")[0]
            if path == "/":
                nonce = secrets.token_urlsafe(16)
                page = _page().replace("NONCE", nonce).encode()
                self._send(200, "text/html; charset=utf-8", page, nonce=nonce)
            elif path == "/data.json":
                self._send(200, "application/json", orjson.dumps(looks.snapshot()))
            elif path == "/metrics":
                self._send(200, METRICS_TYPE, metrics_text(looks.snapshot()).encode())
            else:
                self._send(404, "text/plain; charset=utf-8", b"there are /, /data.json and /metrics\n")

        do_HEAD = do_GET

        def _send(self, status: int, kind: str, body: bytes, nonce: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            source = f"'nonce-{nonce}'" if nonce else "'none'"
            policy = f"default-src 'none'; script-src {source}; style-src {source}; connect-src 'self'"
            self.send_header("Content-Security-Policy", f"{policy}; base-uri 'none'; frame-ancestors 'none'")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    return server


def _is_local_name(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.lower() in ("localhost", "127.0.0.1", "[::1]")


@cache
def _page() -> str:
    return files(__package__).joinpath("page.html").read_text(encoding="utf-8")
