"""Start and stop the two kinds of server that the tests talk to: the stand-in and the real SGLang on CPU."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from . import build_env

ROOT = Path(__file__).resolve().parents[2]
READY = "The server is fired up and ready to roll!"
TINY_MODEL = Path(__file__).with_name("tiny_model.py")


@dataclass
class Running:
    """A server that has said it is ready."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    api_key: str | None = None

    def call(self, method: str, path: str, timeout: float = 60, **kwargs: Any) -> requests.Response:
        """One HTTP request, with the server's API key unless other headers are given."""
        if self.api_key:
            kwargs.setdefault("headers", {"Authorization": f"Bearer {self.api_key}"})
        return requests.request(method, self.url + path, timeout=timeout, **kwargs)

    def chat(self, prompt: str = "How many apples are left?", timeout: float = 60, **body: Any) -> requests.Response:
        """One chat completion with sampling at temperature 1."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 400, "temperature": 1.0} | body
        return self.call("POST", "/v1/chat/completions", timeout, json={"model": "tiny", **body})


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def standin(log: Path, *options: str, api_key: str | None = None) -> Iterator[Running]:
    """A stand-in on a port of its own choice, stopped (killed with SIGKILL) at the end."""
    command = [sys.executable, "-m", "tests.sglang.standin", "--model-path", "tiny", "--port", "0", *options]
    with _running(command, log, None, api_key, deadline=30) as server:
        yield server


@contextlib.contextmanager
def real_sglang(log: Path, *options: str, api_key: str | None = None) -> Iterator[Running]:
    """The real SGLang with the tiny model, from the environment in its default folder, which must have been built."""
    python = build_env.python_of()
    port = free_port()
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(tiny_model()), "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    env = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
    env["OMP_NUM_THREADS"] = "1"  # with more threads than free cores a token takes 100 times as long
    with _running(command, log, env, api_key, deadline=240) as server:
        yield server


def tiny_model() -> Path:
    """Folder of the tiny model, made once for each version of its recipe."""
    recipe = hashlib.sha256(TINY_MODEL.read_bytes()).hexdigest()[:16]
    folder = build_env.DEFAULT_FOLDER / f"tiny-{recipe}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [str(build_env.python_of()), str(TINY_MODEL), str(partial)]
        subprocess.run(command, check=True, capture_output=True)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    return folder


@contextlib.contextmanager
def _running(
    command: list[str], log: Path, env: dict[str, str] | None, api_key: str | None, deadline: float
) -> Iterator[Running]:
    if api_key:
        command = [*command, "--api-key", api_key]
    with log.open("wb") as out:
        full = {**os.environ, **(env or {})}
        process = subprocess.Popen(command, cwd=ROOT if env is None else log.parent, env=full, stdout=out, stderr=out)
    try:
        text = wait_for(
            lambda: _ready(process, log), deadline, lambda: f"{command[2]} is not ready:\n{log.read_text()}"
        )
        found = re.search(r"Uvicorn running on (http://\S+)", text)
        assert found, text
        yield Running(found.group(1), process, log, api_key)
    finally:
        kill_tree(process)


def _ready(process: subprocess.Popen[bytes], log: Path) -> str | None:
    text = log.read_text(errors="replace")
    if process.poll() is not None:
        raise AssertionError(f"the server ended with {process.returncode}:\n{text[-3000:]}")
    return text if READY in text else None


def wait_for(condition: Any, deadline: float, what: Any) -> Any:
    """Poll until `condition()` is true and return it; after `deadline` seconds fail with `what()`."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(what() if callable(what) else what)
        time.sleep(0.02)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants and wait for them."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
    process.wait(timeout=10)
