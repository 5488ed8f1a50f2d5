"""One server started as the pipeline starts it, by its supervisor, for tests that talk to it themselves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.config import Config
from shardmill.engines.base import Answer, Fault, ServerPlace
from shardmill.engines.openai import post_chat
from shardmill.engines.sglang import SGLang
from shardmill.launch import start_server
from shardmill.layout import Layout
from shardmill.lease import Lease, read_ready
from shardmill.load_config import load_config
from shardmill.owner import RunLock
from shardmill.place import MARK_VARIABLE, place, server_mark
from shardmill.process import is_alive, marked, wait_until
from shardmill.supervisor_state import ServerStatus, read_status
from tests.pipeline import Workspace

KEY = "open-sesame-12345"


@dataclass
class Server:
    """A server that is ready."""

    config: Config
    place: ServerPlace

    @property
    def layout(self) -> Layout:
        return self.config.layout

    @property
    def lease(self) -> Lease:
        lease = read_ready(self.layout, "0")
        assert lease
        return lease

    @property
    def facts(self) -> dict[str, Any]:
        return self.lease.facts

    @property
    def status(self) -> ServerStatus:
        status = read_status(self.layout, "0")
        assert status
        return status

    def supervisor_log(self) -> str:
        return self.layout.supervisor_log("0").read_text()

    def body(self, prompt: str = "How does the mill work?", **overrides: Any) -> dict[str, Any]:
        messages = overrides.pop("messages", [{"role": "user", "content": prompt}])
        return SGLang().request_body(self.config, messages, None, 7, overrides)

    def ask(self, prompt: str = "How does the mill work?", **overrides: Any) -> Answer | Fault:
        return self.send(self.body(prompt, **overrides))

    def send(self, body: dict[str, Any]) -> Answer | Fault:
        return SGLang().read_answer(*post_chat(self.place, body, timeout=120))


@contextlib.contextmanager
def one_server(workspace: Workspace, **sections: Any) -> Iterator[Server]:
    """Start server 0 of a working folder's configuration; it is stopped at the end.

    Raises:
        UserError: with the cause, if it does not become ready.
    """
    workspace.configure(**sections)
    workspace.configure(servers={"count": 1, "linger": 1, "stop_timeout": 1})
    results = {"results": str(workspace.folder / "results")}
    config = load_config({**workspace.settings, "run": {**workspace.settings["run"], **results}})
    layout = config.layout
    layout.api_key.parent.mkdir(parents=True, exist_ok=True)
    layout.api_key.write_text(KEY)
    lock = RunLock.acquire(layout)
    try:
        start_server(config, "0", Path(config.model.source), "digest")
        yield Server(config, place(config, "0"))
    finally:
        status = read_status(layout, "0")
        layout.ready("0").unlink(missing_ok=True)
        supervisor = status.identity("supervisor") if status else None
        if supervisor:
            wait_until(lambda: not is_alive(supervisor), 30)
        for process in marked(MARK_VARIABLE, server_mark(layout, "0")):
            process.kill()
        lock.release()


def eventually(condition: Any, what: str, timeout: float = 60) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.05)
    return value
