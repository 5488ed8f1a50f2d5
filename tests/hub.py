"""A small local Hugging Face hub for tests: what it takes to list and fetch a model, and faults on demand.

with Hub() as hub:
    commit = hub.commit("acme/tiny", {"config.json": b"{}", "model.safetensors": weights})
    ...  # HF_ENDPOINT=hub.url
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

BLOCK = 64 << 10


@dataclass
class Request:
    """One request as the hub saw it; `file` is set where it asked for a file's content."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    file: str | None = None
    cdn: bool = False
    sent: int = 0


@dataclass
class Repo:
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)


class Hub:
    """The server and its switches; switches may be turned at any time.

    Attributes:
        freeze: file -> share of it (0 to 1) after which the content stops coming until `thaw` is set.
        ill_for: how many more requests are answered with 503.
        corrupt: file -> how many more answers come with a byte changed.
        drop_at: file -> position at which the connection is cut, once.
        listed_names: name in the repo -> name that the listing shows in its place.
        refuse: (status, headers) for every request, such as `(401, {"X-Error-Code": "GatedRepo"})`.
        refuse_files: the same, for files only.
        ignore_range: send files from their start, whatever is asked for.
        cdn: answer file requests with a redirect to another address, as the real hub does for large files.
        requests: all that was asked so far.
    """

    def __init__(self) -> None:
        self.freeze: dict[str, float] = {}
        self.thaw = threading.Event()
        self.ill_for = 0
        self.corrupt: dict[str, int] = {}
        self.drop_at: dict[str, int] = {}
        self.listed_names: dict[str, str] = {}
        self.refuse: tuple[int, dict[str, str]] | None = None
        self.refuse_files: tuple[int, dict[str, str]] | None = None
        self.ignore_range = False
        self.cdn = False
        self.requests: list[Request] = []
        self.repos: dict[str, Repo] = {}
        self.frozen = threading.Event()
        self._servers = [_Server(self, cdn=False), _Server(self, cdn=True)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def cdn_url(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def commit(self, repo: str, files: dict[str, bytes], *, branch: str = "main") -> str:
        """Add a commit with exactly these files and move the branch to it. Returns its id."""
        content = [(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items())]
        digest = hashlib.sha1(repr((repo, content)).encode()).hexdigest()
        known = self.repos.setdefault(repo, Repo())
        known.commits[digest] = dict(files)
        known.branches[branch] = digest
        return digest

    def fetches(self, name: str) -> list[Request]:
        """Requests for a file's content, redirects not counted."""
        found = [request for request in self.requests if request.method == "GET" and request.file == name]
        return [request for request in found if request.cdn == self.cdn]

    def __enter__(self) -> Hub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.thaw.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, hub: Hub, *, cdn: bool) -> None:
        self.hub, self.cdn = hub, cdn
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients are killed in mid-answer all the time here


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        headers = self.headers
        request = Request(self.command, path, headers.get("Range"), headers.get("Authorization"), cdn=self.server.cdn)
        hub.requests.append(request)
        if hub.ill_for > 0:
            hub.ill_for -= 1
            return self._refuse(503, {})
        if hub.refuse:
            return self._refuse(*hub.refuse)
        if match := re.fullmatch(r"/api/(?:models/|(?=datasets/))((?:datasets/)?[^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._list(match[1], match[2] or "main")
        if match := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(request, *match.groups())
        return self._refuse(404, {})

    def _find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and its files; None if the refusal has been sent."""
        known = self.server.hub.repos.get(repo)
        if known is None:
            self._refuse(404, {"X-Error-Code": "RepoNotFound"})
            return None
        commit = known.branches.get(revision, revision)
        if commit not in known.commits:
            self._refuse(404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit, known.commits[commit]

    def _list(self, repo: str, revision: str) -> None:
        if found := self._find(repo, revision):
            names = self.server.hub.listed_names
            siblings = [{**_listed(name, data), "rfilename": names.get(name, name)} for name, data in found[1].items()]
            self._send(200, json.dumps({"id": repo, "sha": found[0], "siblings": siblings}).encode(), {})

    def _file(self, request: Request, repo: str, revision: str, name: str) -> None:
        hub = self.server.hub
        request.file = name
        if hub.refuse_files:
            return self._refuse(*hub.refuse_files)
        if not (found := self._find(repo, revision)):
            return None
        commit, files = found
        if name not in files:
            return self._refuse(404, {"X-Error-Code": "EntryNotFound"})
        listed = _listed(name, files[name])
        etag = listed["lfs"]["sha256"] if "lfs" in listed else listed["blobId"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if hub.cdn and not request.cdn:
            linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(files[name]))}
            return self._send(302, b"", {**headers, **linked, "Location": f"{hub.cdn_url}{self.path}?signature=secret"})
        return self._content(request, name, files[name], headers)

    def _content(self, request: Request, name: str, data: bytes, headers: dict[str, str]) -> None:
        hub, start, status = self.server.hub, 0, 200
        if request.range and not hub.ignore_range:
            start, status = int(re.fullmatch(r"bytes=(\d+)-", request.range)[1]), 206
            headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        if hub.corrupt.get(name, 0) > 0 and self.command == "GET":
            hub.corrupt[name] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        self._head(status, len(data) - start, headers)
        if self.command == "HEAD":
            return
        stop_at = int(hub.freeze[name] * len(data)) if name in hub.freeze else len(data)
        position = start
        while position < len(data):
            # A client that has all up to here already is past it.
            if start < stop_at == position and name in hub.freeze and not hub.thaw.is_set():
                hub.frozen.set()
                hub.thaw.wait()
            if name in hub.drop_at and position >= hub.drop_at[name]:
                del hub.drop_at[name]
                self.close_connection = True
                return
            # Never past the place to stop at, so that it is met exactly.
            end = min(position + BLOCK, stop_at) if position < stop_at else position + BLOCK
            position += self.wfile.write(data[position:end])
            request.sent = position - start

    def _refuse(self, status: int, headers: dict[str, str]) -> None:
        self._send(status, b"{}", headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._head(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(key, value)
        self.end_headers()


def _listed(name: str, data: bytes) -> dict[str, object]:
    """A file as the hub's API lists it: weights in LFS with their SHA-256, the rest as git blobs."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if name.endswith((".safetensors", ".gguf", ".bin")):
        lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return {"size": len(data), "blobId": hashlib.sha1(lfs["sha256"].encode()).hexdigest(), "lfs": lfs}
    return {"size": len(data), "blobId": blob}
