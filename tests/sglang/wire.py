"""The least HTTP/1.1 that a load generator needs: keep-alive, Content-Length, one request at a time per connection.

Written by hand because a web framework costs more per request than everything else the stand-in does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
_MAX_HEAD = 65536
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class Connection(asyncio.Protocol):
    """One client connection. `handle(connection)` is called per request and answers now or later by `respond`.

    While it is called, `method`, `path`, `query`, `headers` (lower-case names) and `body` describe the request.
    `on_lost` may be set to learn that the client has gone before its answer.
    """

    def __init__(self, handle: Callable[[Connection], None]) -> None:
        self._handle = handle
        self._buffer = bytearray()
        self._need = -1  # bytes of head and body of the request being read, once the head is complete
        self._head = 0
        self._busy = False
        self.transport: asyncio.Transport | None = None
        self.on_lost: Callable[[], None] | None = None
        self.method = self.path = self.query = ""
        self.headers: dict[str, str] = {}
        self.body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        lost, self.on_lost = self.on_lost, None
        if lost:
            lost()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._busy:
            self._next_request()

    def _next_request(self) -> None:
        """Read one request from the buffer, if a whole one is there, and hand it on."""
        if self._need < 0 and not self._read_head():
            return
        if len(self._buffer) < self._need:
            return
        self.body = bytes(self._buffer[self._head : self._need])
        del self._buffer[: self._need]
        self._need = -1
        self._busy = True
        self._handle(self)

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD:
                self.drop()
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        try:
            self.method, target, _version = lines[0].split(" ")
            self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
            length = int(self.headers.get("content-length", 0))
        except ValueError:
            self._fail(b"Invalid HTTP request received.")
            return False
        if "chunked" in self.headers.get("transfer-encoding", ""):
            self._fail(b"The stand-in reads bodies with a Content-Length only.")
            return False
        self.path, _, self.query = target.partition("?")
        self._head, self._need = end + 4, end + 4 + length
        if self.headers.get("expect") == "100-continue" and self.transport:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _fail(self, message: bytes) -> None:
        self._busy = True
        self.headers = {"connection": "close"}
        self.respond(400, message, TEXT)

    def head(self, status: int, length: int, kind: str) -> bytes:
        """Response head for a body of `length` bytes."""
        close = "Connection: close\r\n" if self.headers.get("connection", "").lower() == "close" else ""
        return (
            f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\nserver: uvicorn\r\ncontent-length: {length}\r\n"
            f"content-type: {kind}\r\n{close}\r\n"
        ).encode()

    def respond(self, status: int, body: bytes, kind: str = JSON) -> None:
        """Answer the current request and go on to the next one. A client that has gone is not an error."""
        self.on_lost = None
        if self.transport is None:
            return
        self.transport.write(self.head(status, len(body), kind) + body)
        if self.headers.get("connection", "").lower() == "close":
            self.transport.close()
            return
        self._busy = False
        if self._buffer:
            self._next_request()

    def break_off(self, body: bytes) -> None:
        """Send the head and the first half of a body, then reset the connection."""
        self.on_lost = None
        if self.transport is not None:
            self.transport.write(self.head(200, len(body), JSON) + body[: len(body) // 2])
            self.drop()

    def drop(self) -> None:
        """Close without an answer."""
        self.on_lost = None
        if self.transport is not None:
            self.transport.abort()
