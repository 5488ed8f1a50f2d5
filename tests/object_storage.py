"""A real S3 server in a process of its own (moto's), and a proxy before it with a bad day."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests

from tests.pipeline import eventually, free_ports

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
}
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
BROKEN = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"


@dataclass
class Storage:
    """The server, and how its proxy behaves.

    Attributes:
        url: of the proxy.
        faults: what the next requests meet, one after the other: `503`, `500`, `cut` (the connection ends in
            mid-request, nothing arrives), `half` (half of an answer's body, then the end).
        is_away: no request gets an answer.
        requests: (method, path) of what reached the server.
    """

    server: str
    url: str = ""
    faults: list[str] = field(default_factory=list)
    is_away: bool = False
    requests: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        return KEYS | {"AWS_ENDPOINT_URL": self.url}

    def next_fault(self) -> str | None:
        with self.lock:
            return self.faults.pop(0) if self.faults else None


@contextlib.contextmanager
def object_storage(folder: Path, bucket: str = "bucket") -> Iterator[Storage]:
    """An empty bucket."""
    port = free_ports(1)
    with (folder / "moto.txt").open("wb") as sink:
        command = [str(Path(sys.executable).with_name("moto_server")), "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        storage = Storage(f"http://127.0.0.1:{port}")
        eventually(lambda: _answers(storage.server), "the S3 server answers", 120)
        requests.put(f"{storage.server}/{bucket}", timeout=30).raise_for_status()
        with _proxy(storage):
            yield storage
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.RequestException:
        return False


@contextlib.contextmanager
def _proxy(storage: Storage) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = storage.next_fault()
            if storage.is_away or fault == "cut":
                self.close_connection = True
                return None
            if fault in ("503", "500"):
                return self._send(int(fault), {}, SLOW_DOWN if fault == "503" else BROKEN)
            storage.requests.append((self.command, self.path))
            headers = {key: value for key, value in self.headers.items() if key.lower() not in ("host", "expect")}
            answer = requests.request(
                self.command, storage.server + self.path, data=body, headers=headers, timeout=60, stream=True
            )
            content = answer.raw.read()
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in ("content-length", "connection")}
            return self._send(answer.status_code, kept, content, half=fault == "half" and self.command == "GET")

        def _send(self, status: int, headers: dict[str, str], body: bytes, *, half: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("date", "server", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if half else body)
            self.close_connection = self.close_connection or half

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    storage.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
