"""The HTTP client against a real server that waits, breaks off, resets, closes, and never reads."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from shardmill import client as client_module
from shardmill.client import Call, Client

PATIENCE = 60


class Server:
    """A server whose paths each do one thing to a request; it keeps count of all it sees."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.connections = 0
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.closed = 0
        self.release = threading.Event()
        self.crowd = threading.Semaphore(0)  # one for each request that has arrived at /wait
        self._context = context
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self.port}"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        self.release.set()
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._context:
                connection = self._context.wrap_socket(connection, server_side=True)
            with self._lock:
                self.connections += 1
                self._open.add(connection)
            with connection, connection.makefile("rb") as stream:
                while self._answer(connection, stream):
                    pass
        with self._lock:
            self._open.discard(connection)
            self.closed += 1

    def _answer(self, connection: socket.socket, stream: Any) -> bool:
        """Serve one request; says whether the connection stays."""
        if not (line := stream.readline()):
            return False
        headers: dict[str, str] = {}
        while (header := stream.readline()) not in (b"\r\n", b""):
            name, _, value = header.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        body = stream.read(int(headers.get("content-length", 0)))
        path = line.split()[1].decode()
        with self._lock:
            self.requests.append((path, headers))
        return getattr(self, path.strip("/").replace("-", "_").partition("/")[0])(connection, stream, path, body)

    def _send(self, connection: socket.socket, body: bytes, status: str = "200 OK", more: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        connection.sendall(head.encode() + body)

    def _begin(self, connection: socket.socket, more: str = "") -> None:
        """A head that promises 1000 bytes, and ten of them."""
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n{more}\r\n".encode() + b"x" * 10)
        self.crowd.release()

    # Paths

    def echo(self, connection: socket.socket, _: Any, path: str, body: bytes) -> bool:
        self._send(connection, hashlib.sha256(body).hexdigest().encode())
        return True

    def status(self, connection: socket.socket, _: Any, path: str, body: bytes) -> bool:
        self._send(connection, b"why", path.rsplit("/", 1)[-1] + " Reason", "Location: /echo\r\n")
        return True

    def size(self, connection: socket.socket, _: Any, path: str, body: bytes) -> bool:
        self._send(connection, b"y" * int(path.rsplit("/", 1)[-1]))
        return True

    def wait(self, connection: socket.socket, _: Any, path: str, body: bytes) -> bool:
        self.crowd.release()
        assert self.release.wait(PATIENCE)
        self._send(connection, b"at last")
        return True

    def half(self, connection: socket.socket, stream: Any, path: str, body: bytes) -> bool:
        self._begin(connection)
        stream.read()
        return False

    def half_closing(self, connection: socket.socket, stream: Any, path: str, body: bytes) -> bool:
        self._begin(connection, "Connection: close\r\n")
        stream.read()
        return False

    def cut(self, connection: socket.socket, _: Any, path: str, body: bytes) -> bool:
        self._begin(connection)
        return False

    def silent(self, connection: socket.socket, _: Any, path: str, body: bytes) -> bool:
        return False

    def reset(self, connection: socket.socket, _: Any, path: str, body: bytes) -> bool:
        if path.endswith("/half"):
            self._begin(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False

    def one_answer(self, connection: socket.socket, _: Any, path: str, body: bytes) -> bool:
        self._send(connection, b"one")
        return False


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(connections=64)
    yield client
    client.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def post(
    client: Client, url: str, body: bytes = b"{}", *, api_key: str | None = None, call: Call | None = None
) -> tuple[int, bytes]:
    return client.post(url, body, api_key=api_key, call=call or Call())


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.005)


def fails(future: Future[Any]) -> None:
    """The call ends, and with the one kind of error that a caller must know."""
    with pytest.raises(requests.RequestException):
        future.result(timeout=PATIENCE)


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Answers


def test_connections_are_used_again(client: Client, server: Server, pool: ThreadPoolExecutor):
    for _ in range(20):
        assert post(client, f"{server.url}/echo")[0] == 200
    assert server.connections == 1
    list(pool.map(lambda _: post(client, f"{server.url}/echo"), range(200)))
    assert server.connections <= 17
    assert len(server.requests) == 220


def test_more_in_flight_than_connections_are_kept(server: Server, pool: ThreadPoolExecutor):
    client = Client(connections=2)
    waiting = [pool.submit(post, client, f"{server.url}/wait") for _ in range(8)]
    for _ in range(8):
        assert server.crowd.acquire(timeout=PATIENCE)
    server.release.set()
    assert [future.result() for future in waiting] == [(200, b"at last")] * 8
    client.close()


@pytest.mark.parametrize("status", [200, 201, 302, 400, 401, 413, 429, 500, 503])
def test_any_status_is_an_answer(client: Client, server: Server, status: int):
    """A redirect is not followed: it would send the prompt, and the key, somewhere else."""
    assert post(client, f"{server.url}/status/{status}") == (status, b"why")
    assert len(server.requests) == 1


def test_big_bodies_arrive_whole(client: Client, server: Server):
    body = bytes(range(256)) * 80_000
    assert post(client, f"{server.url}/echo", body) == (200, hashlib.sha256(body).hexdigest().encode())
    status, answer = post(client, f"{server.url}/size/{30_000_000}")
    assert (status, len(answer), set(answer)) == (200, 30_000_000, {ord("y")})
    assert server.connections == 1


def test_the_key_and_nothing_from_the_environment_is_sent(
    client: Client, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    dead = f"http://127.0.0.1:{unused_port()}"
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, dead)
        monkeypatch.setenv(name.lower(), dead)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert post(client, f"{server.url}/echo")[0] == 200
    assert post(client, f"{server.url}/echo", api_key="k-1")[0] == 200
    assert [headers.get("authorization") for _, headers in server.requests] == [None, "Bearer k-1"]
    assert {headers["content-type"] for _, headers in server.requests} == {"application/json"}


def test_512_requests_are_in_flight_at_once(server: Server):
    client = Client(connections=512)
    with ThreadPoolExecutor(512) as pool:
        waiting = [pool.submit(post, client, f"{server.url}/wait") for _ in range(512)]
        for _ in range(512):
            assert server.crowd.acquire(timeout=PATIENCE)
        assert not any(future.done() for future in waiting)
        server.release.set()
        assert {future.result(timeout=PATIENCE) for future in waiting} == {(200, b"at last")}
        list(pool.map(lambda _: post(client, f"{server.url}/echo"), range(512)))
    assert server.connections == 512
    client.close()


# Faults


def test_a_refused_connection_was_not_sent(client: Client):
    call = Call()
    with pytest.raises(requests.RequestException):
        post(client, f"http://127.0.0.1:{unused_port()}/echo", call=call)
    assert not call.sent


@pytest.mark.parametrize("path", ["silent", "cut", "reset", "reset/half"])
def test_a_connection_that_breaks_was_sent(client: Client, server: Server, path: str):
    """Half an answer is none: the length that was promised did not come."""
    call = Call()
    with pytest.raises(requests.RequestException):
        post(client, f"{server.url}/{path}", call=call)
    assert call.sent and not call.aborted
    assert post(client, f"{server.url}/echo")[0] == 200, "the client goes on"
    assert len(server.requests) == 2, "nothing is sent again by itself"


def test_a_server_that_closed_in_the_meantime_is_connected_to_anew(client: Client, server: Server):
    for number in range(1, 6):
        assert post(client, f"{server.url}/one-answer") == (200, b"one")
        until(lambda number=number: server.closed == number)
    assert server.connections == 5


# Cutting off


@pytest.mark.parametrize("path", ["wait", "half", "half-closing"])
def test_an_abort_ends_a_call_at_once(client: Client, server: Server, pool: ThreadPoolExecutor, path: str):
    """Before the answer, in the middle of it, and in one after which the connection is to be closed."""
    call = Call()
    waiting = pool.submit(post, client, f"{server.url}/{path}", call=call)
    assert server.crowd.acquire(timeout=PATIENCE)
    assert not waiting.done()
    call.abort()
    fails(waiting)
    assert call.sent and call.aborted
    assert post(client, f"{server.url}/echo")[0] == 200


def test_an_abort_before_the_call_keeps_it_from_being_sent(client: Client, server: Server):
    assert post(client, f"{server.url}/echo")[0] == 200
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):  # a connection there is, and a new one
        call = Call()
        call.abort()
        with pytest.raises(requests.RequestException):
            post(client, f"{url}/echo", call=call)
        assert not call.sent
    assert len(server.requests) == 1
    assert post(client, f"{server.url}/echo")[0] == 200


@pytest.mark.parametrize("warm", [False, True])
def test_an_abort_ends_a_call_that_is_still_sending(client: Client, pool: ThreadPoolExecutor, warm: bool):
    """The server hangs and reads no more, and the body is longer than what fits in between."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        call = Call()
        if warm:
            first = pool.submit(post, client, url)
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            assert first.result(timeout=PATIENCE) == (200, b"")
        sending = pool.submit(post, client, url, bytes(64 << 20), call=call)
        if not warm:
            connection, _ = listener.accept()
        with connection:
            until(lambda: connection.recv(65536, socket.MSG_PEEK))
            assert not sending.done()
            call.abort()
            fails(sending)
    assert call.aborted


@pytest.mark.parametrize("warm", [False, True])
def test_a_server_that_reads_slowly_gets_the_whole_body(
    client: Client, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, warm: bool
):
    """Sending may take longer than connecting may, on a connection there is as on a new one."""
    monkeypatch.setattr(client_module, "CONNECT_TIMEOUT", 0.2)
    empty = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        if warm:
            first = pool.submit(post, client, url)
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(empty)
            assert first.result(timeout=PATIENCE) == (200, b"")
        sending = pool.submit(post, client, url, bytes(64 << 20))
        if not warm:
            connection, _ = listener.accept()
        with connection:
            time.sleep(0.6)  # busy with something else, for three times as long as a connect may take
            got = 0
            while got < 64 << 20 and (data := connection.recv(1 << 20)):
                got += len(data)
            connection.sendall(empty)
            assert sending.result(timeout=PATIENCE) == (200, b"")


def test_an_abort_that_comes_late_spares_the_next_call(client: Client, server: Server, pool: ThreadPoolExecutor):
    """By then the connection carries another request, which must not be cut off and sent twice."""
    first, second = Call(), Call()
    assert post(client, f"{server.url}/echo", call=first)[0] == 200
    waiting = pool.submit(post, client, f"{server.url}/wait", call=second)
    assert server.crowd.acquire(timeout=PATIENCE)
    assert server.connections == 1
    first.abort()
    server.release.set()
    assert waiting.result(timeout=PATIENCE) == (200, b"at last")
    assert not second.aborted


def test_many_calls_and_aborts_at_random_moments(client: Client, server: Server, pool: ThreadPoolExecutor):
    """Whatever the moment, a call that nobody aborted gets its answer."""
    aborted: list[Call] = []

    def ask(number: int) -> bool:
        call = Call()
        if number % 3 == 0:
            aborted.append(call)
        try:
            status, answer = post(client, f"{server.url}/echo", str(number).encode(), call=call)
        except requests.RequestException:
            assert call.aborted
            return False
        assert (status, answer) == (200, hashlib.sha256(str(number).encode()).hexdigest().encode())
        return True

    stop = threading.Event()

    def cut() -> None:
        while not stop.is_set():
            if aborted:
                aborted.pop().abort()

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        answered = list(pool.map(ask, range(1500)))
    finally:
        stop.set()
        cutter.join()
    assert all(answered[number] for number in range(1500) if number % 3)


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl to make a certificate")
def test_an_abort_ends_a_call_over_tls(tmp_path: Path, pool: ThreadPoolExecutor):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-keyout", key, "-out", certificate, "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server, client = Server(context), Client(connections=4, certificate=str(certificate))
    assert post(client, f"{server.url}/echo")[0] == 200
    for path in ("wait", "half"):
        call = Call()
        waiting = pool.submit(post, client, f"{server.url}/{path}", call=call)
        assert server.crowd.acquire(timeout=PATIENCE)
        call.abort()
        fails(waiting)
        assert call.sent
    assert post(client, f"{server.url}/echo")[0] == 200
    client.close()
    server.stop()
