"""The HTTP client: the transport of `requests` with connection reuse, one thread per request in flight.

No timeout is shorter than the longest legal answer: a client that gives up early makes the server
generate the same answer twice. Instead a call can be cut from outside (`Call.abort`) by whoever knows
from the server's own figures that no answer will come.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.structures import CaseInsensitiveDict
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

CONNECT_TIMEOUT = 5.0
_current = threading.local()
_owners = threading.Lock()  # guards which call a connection belongs to; held for no more than a system call


class Call:
    """One request in flight, and the handle to cut it off.

    `sent` says whether the server may have seen the whole request.
    """

    def __init__(self) -> None:
        self.sent = False
        self.aborted = False
        self.answering = False  # the head of an answer was read
        self._connection: _Tracked | None = None
        self._socket: socket.socket | None = None

    def attach(self, connection: _Tracked, sock: socket.socket | None) -> None:
        """Tie the call to the connection that carries it from now on.

        Raises:
            ConnectionAbortedError: if the call was cut off before.
        """
        with _owners:
            if self.aborted:
                raise ConnectionAbortedError("cut off before it was sent")
            connection.owner = self
            self._connection, self._socket = connection, sock

    def has_news(self) -> bool:
        """Whether an answer, or the end of the connection, has come that its thread has not dealt with yet.

        A machine that is short of CPU may leave it there for long; the request is not lost for that.
        """
        with _owners:
            if self.answering:
                return True
            if self._connection is None or self._connection.owner is not self or self._socket is None:
                return False
            with contextlib.suppress(OSError, ValueError):
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                return bool(poll.poll(0))
            return True

    def abort(self) -> None:
        """Cut the connection under the request: its thread gets a `RequestException` at once.

        A connection that carries another call's request by now is left alone.
        """
        with _owners:
            self.aborted = True
            if self._connection is None or self._connection.owner is not self or self._socket is None:
                return
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class _Tracked:
    """A connection that tells the current call which socket carries it, and notices a vanished peer."""

    owner: Call | None = None

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        sock = self.sock  # type: ignore[attr-defined]
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        self._attach()

    def request(self, *args: Any, **kwargs: Any) -> None:
        if self.sock is not None:  # type: ignore[has-type]
            # The timeout that urllib3 has set is the connect's; a long body to a busy server may take longer.
            self.timeout = None
        self._attach()
        super().request(*args, **kwargs)  # type: ignore[misc]

    def getresponse(self) -> Any:
        call = getattr(_current, "call", None)
        if call is not None:
            call.sent = True
        response = super().getresponse()  # type: ignore[misc]
        if call is not None:
            call.answering = True
        return response

    def _attach(self) -> None:
        call: Call | None = getattr(_current, "call", None)
        if call is not None:
            call.attach(self, self.sock)  # type: ignore[attr-defined]


class _TrackedHTTP(_Tracked, HTTPConnection):
    pass


class _TrackedHTTPS(_Tracked, HTTPSConnection):
    pass


class _Disowning:
    """A pool whose idle connections belong to no call, so that a late abort cannot hit the next one's request."""

    def _put_conn(self, conn: Any) -> None:
        if conn is not None:
            with _owners:
                conn.owner = None
        super()._put_conn(conn)  # type: ignore[misc]


class _HTTPPool(_Disowning, HTTPConnectionPool):
    ConnectionCls = _TrackedHTTP


class _HTTPSPool(_Disowning, HTTPSConnectionPool):
    ConnectionCls = _TrackedHTTPS


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}


class Client:
    """Connections shared by all threads of a job.

    It uses the transport of `requests` without its sessions: cookies, redirects and settings of the environment have
    no place here, and merging them anew for each request is half of its cost.

    Args:
        connections: connections kept open per server.
        certificate: file with the certificates to trust, in place of the well-known authorities.
    """

    def __init__(self, connections: int, *, certificate: str | None = None) -> None:
        self._verify = certificate or True
        self._adapter = _Adapter(pool_connections=64, pool_maxsize=connections, max_retries=0)

    def post(self, url: str, body: bytes, *, api_key: str | None, call: Call) -> tuple[int, bytes]:
        """POST a JSON body; returns the status and the body of the response, whatever the status.

        Raises:
            requests.RequestException: if no whole response came; `call.sent` tells whether the server
                may have seen the request.
        """
        request = requests.PreparedRequest()
        request.method, request.url, request.body = "POST", url, body
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "User-Agent": "shardmill"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        request.headers = CaseInsensitiveDict(headers)
        _current.call = call
        try:
            response = self._adapter.send(request, timeout=(CONNECT_TIMEOUT, None), verify=self._verify)
            return response.status_code, response.content
        finally:
            _current.call = None

    def close(self) -> None:
        self._adapter.close()
