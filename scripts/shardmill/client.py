"""The HTTP client: `requests` with connection reuse, one thread per request in flight.

No timeout is shorter than the longest legal answer: a client that gives up early makes the server
generate the same answer twice. Instead a call can be cut from outside (`Call.abort`) by whoever knows
from the server's own figures that no answer will come.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

CONNECT_TIMEOUT = 5.0
_current = threading.local()


class Call:
    """One request in flight, and the handle to cut it off."""

    def __init__(self) -> None:
        self.sent = False
        self.aborted = False
        self._connection: Any = None

    def attach(self, connection: Any) -> None:
        self._connection = connection
        self.sent = True
        if self.aborted:
            self.abort()

    def abort(self) -> None:
        """Close the connection under the request: its thread gets a `ConnectionError` at once."""
        self.aborted = True
        sock = getattr(self._connection, "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class _Tracked:
    """A connection that tells the current call which socket carries it, and notices a vanished peer."""

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        sock = self.sock  # type: ignore[attr-defined]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)

    def getresponse(self) -> Any:
        call = getattr(_current, "call", None)
        if call is not None:
            call.attach(self)
        return super().getresponse()  # type: ignore[misc]


class _TrackedHTTP(_Tracked, HTTPConnection):
    pass


class _TrackedHTTPS(_Tracked, HTTPSConnection):
    pass


class _HTTPPool(HTTPConnectionPool):
    ConnectionCls = _TrackedHTTP


class _HTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _TrackedHTTPS


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}


class Client:
    """A session shared by all threads of a job.

    Args:
        connections: connections kept open per server.
    """

    def __init__(self, connections: int) -> None:
        self._session = requests.Session()
        # Proxy settings of the environment are for the outside world, never for a server of the pool.
        self._session.trust_env = False
        adapter = _Adapter(pool_connections=64, pool_maxsize=connections, max_retries=0)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)

    def post(self, url: str, body: bytes, *, api_key: str | None, call: Call) -> tuple[int, bytes]:
        """POST a JSON body; returns the status and the body of the response, whatever the status.

        Raises:
            requests.RequestException: if no whole response came; `call.sent` tells whether the server
                may have seen the request.
        """
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        _current.call = call
        try:
            response = self._session.post(
                url, data=body, headers=headers, timeout=(CONNECT_TIMEOUT, None), allow_redirects=False
            )
            return response.status_code, response.content
        finally:
            _current.call = None

    def close(self) -> None:
        self._session.close()
