"""The life of a server: real llama.cpp, real supervisors, real kills."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import requests

from shardmill import lease as leases
from shardmill import place as places
from shardmill import watch as watches
from shardmill.config import Config
from shardmill.engines.base import Answer, Fault, Load, ServerPlace
from shardmill.engines.llamacpp import LlamaCpp
from shardmill.engines.openai import OpenAI, post_chat
from shardmill.engines.registry import engine_for
from shardmill.errors import UserError
from shardmill.launch import start_server
from shardmill.lease import clear_stale, read_ready, stale_reason
from shardmill.load_config import load_config
from shardmill.place import MARK_VARIABLE, place, server_mark
from shardmill.process import is_alive, marked, port_is_free, wait_until
from shardmill.supervisor_state import ServerStatus, read_status
from shardmill.watch import LedgerCount, Watch
from tests.tiny.gguf_model import Knobs, make

SCRIPTS = str(Path(leases.__file__).parents[1])
MESSAGES = [{"role": "user", "content": "How does the mill work?"}]
OWNER = """
import sys
from shardmill.layout import Layout
from shardmill.owner import RunLock
sys.stdin.readline()
lock = RunLock.acquire(Layout(sys.argv[1], sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Answers of any length that is wanted, so that a request can be caught in flight.
    return make(tmp_path_factory.mktemp("model") / "tiny.gguf", Knobs(answer_clauses=256))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def eventually(condition: Callable[[], Any], timeout: float = 20) -> None:
    assert wait_until(condition, timeout), f"not within {timeout} s"


class Run:
    """A run with one server, and its owner as a process that can be killed."""

    def __init__(self, folder: Path, model: Path, **servers: Any) -> None:
        self.model = model
        self.settings: dict[str, Any] = {
            "run": {"name": "x", "results": str(folder / "results")},
            "prompts": {"path": "none.jsonl"},
            "model": {"source": str(model)},
            "engine": {"llamacpp": {"context_length": 2048, "slots": 2}},
            "servers": {"port": free_port(), "stop_timeout": 1, "linger": 1, "start_timeout": 60, **servers},
            "sampling": {"max_tokens": 1024},
            "thinking": {"enabled": True},
        }
        self.owner: subprocess.Popen[str] | None = None

    @property
    def config(self) -> Config:
        return load_config(self.settings)

    @property
    def place(self) -> ServerPlace:
        return place(self.config, "0")

    def successor(self) -> subprocess.Popen[str]:
        """A process that takes the run when it is told to."""
        command = [sys.executable, "-c", OWNER, self.settings["run"]["results"], "x"]
        environment = os.environ | {"PYTHONPATH": SCRIPTS}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def own(self, owner: subprocess.Popen[str] | None = None) -> None:
        self.owner = owner or self.successor()
        assert self.owner.stdin and self.owner.stdout
        self.owner.stdin.write("go\n")
        self.owner.stdin.flush()
        assert self.owner.stdout.readline() == "held\n"

    def kill_owner(self) -> None:
        assert self.owner
        self.owner.kill()
        self.owner.wait()

    def start(self) -> ServerStatus:
        start_server(self.config, "0", self.model, "digest")
        return self.status

    @property
    def status(self) -> ServerStatus:
        status = read_status(self.config.layout, "0")
        assert status
        return status

    def state(self) -> str | None:
        status = read_status(self.config.layout, "0")
        return status.state if status else None

    @property
    def ready(self) -> Path:
        return self.config.layout.ready("0")

    def ask(self, **overrides: Any) -> Answer | Fault:
        engine, config = engine_for(self.config), self.config
        body = engine.request_body(config, MESSAGES, None, 7, overrides)
        return engine.read_answer(*post_chat(self.place, body, timeout=60))

    def pid(self, role: Any) -> int:
        identity = self.status.identity(role)
        assert identity
        return identity.pid

    def engine_is_gone(self) -> bool:
        engines = marked(MARK_VARIABLE, server_mark(self.config.layout, "0"))
        return not engines and port_is_free(self.place.host, self.place.port)

    def close(self) -> None:
        status = read_status(self.config.layout, "0")
        self.ready.unlink(missing_ok=True)
        supervisor = status.identity("supervisor") if status else None
        if supervisor and is_alive(supervisor):
            os.kill(supervisor.pid, signal.SIGTERM)
            wait_until(lambda: not is_alive(supervisor), 20)
        for process in marked(MARK_VARIABLE, server_mark(self.config.layout, "0")):
            process.kill()
        if self.owner:
            self.owner.kill()
            self.owner.wait()


@pytest.fixture
def make_run(tmp_path: Path, model: Path) -> Iterator[Callable[..., Run]]:
    with contextlib.ExitStack() as stack:

        def make_one(**servers: Any) -> Run:
            run = Run(tmp_path, model, **servers)
            run.own()
            stack.callback(run.close)
            return run

        yield make_one


# The lease


def test_a_server_lives_as_long_as_its_readiness_file(make_run: Callable[..., Run]) -> None:
    run = make_run()
    key = run.config.layout.api_key
    key.parent.mkdir(parents=True)
    key.write_text("open-sesame-12345\n")
    status = run.start()
    layout, supervisor = run.config.layout, status.identity("supervisor")
    lease = read_ready(layout, "0")
    assert lease and lease.identity == supervisor and lease.url == run.place.url and lease.capacity == 2
    assert lease.engine["version"].startswith("xllamacpp 20")
    assert status.state == "ready" and status.capacity == 2 and status.instance == 1 and status.restarts == 0
    assert stale_reason(layout, run.config, "0") is None and clear_stale(run.config) == []

    answer = run.ask(max_tokens=30)
    assert isinstance(answer, Answer) and answer.finish_reason == "length" and answer.usage["completion_tokens"] == 30
    assert answer.reasoning_content
    eventually(lambda: run.status.completion_tokens == 38, 10)  # the readiness probe's 8 as well

    # Only who holds the key gets an answer, and the key is nowhere to be seen.
    refused = post_chat(dataclasses.replace(run.place, api_key=None), {"messages": MESSAGES}, timeout=10)
    fault = LlamaCpp().read_answer(*refused)
    assert isinstance(fault, Fault) and fault.kind == "unauthorized"
    for process in psutil.process_iter(["cmdline"]):
        assert not any("open-sesame" in argument for argument in process.info["cmdline"] or [])
    for path in layout.root.rglob("*"):
        assert path == key or not path.is_file() or b"open-sesame" not in path.read_bytes(), path

    run.ready.unlink()
    eventually(lambda: not is_alive(supervisor))
    assert run.engine_is_gone()
    assert run.state() is None and not run.ready.exists()

    # A second life of the server is a further instance.
    assert run.start().instance == 2


def test_a_server_goes_when_its_run_has_no_owner_for_long(make_run: Callable[..., Run]) -> None:
    run = make_run(linger=4)
    supervisor = run.start().identity("supervisor")
    log = run.config.layout.supervisor_log("0")
    successor = run.successor()
    run.kill_owner()
    eventually(lambda: "the run has no owner; stopping in 4 s" in log.read_text(), 3)
    run.own(successor)
    eventually(lambda: "the run has an owner again" in log.read_text(), 5)
    assert is_alive(supervisor) and run.ready.exists() and isinstance(run.ask(max_tokens=8), Answer)
    run.kill_owner()
    eventually(lambda: not is_alive(supervisor))
    assert run.engine_is_gone()
    assert not run.ready.exists() and run.state() is None
    assert "the run has had no owner for 4 s" in log.read_text()


def test_sigterm_ends_a_server_with_a_request_in_flight(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.settings["engine"]["llamacpp"] = {"context_length": 32768, "slots": 1}
    supervisor = run.start().identity("supervisor")
    outcome: list[Any] = []

    def ask() -> None:
        try:
            outcome.append(run.ask(max_tokens=32000, ignore_eos=True))
        except requests.RequestException as error:
            outcome.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    engine = LlamaCpp()
    eventually(lambda: (load := engine.load(run.place, timeout=2)) and load.running == 1)
    os.kill(run.pid("supervisor"), signal.SIGTERM)
    eventually(lambda: not is_alive(supervisor))
    asking.join(10)
    assert isinstance(outcome[0], requests.RequestException)
    assert run.engine_is_gone() and not run.ready.exists() and run.state() is None


# Deaths


def test_engine_and_reaper_are_restarted_when_killed(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.start()
    for instance, victim in ((2, "engine"), (3, "reaper")):
        engine = run.status.identity("engine")
        os.kill(run.pid(victim), signal.SIGKILL)
        eventually(lambda n=instance: run.status.instance == n and run.state() == "ready")
        assert not is_alive(engine)
        assert run.status.restarts == instance - 1
        assert isinstance(run.ask(max_tokens=8), Answer)
    assert run.ready.exists() and stale_reason(run.config.layout, run.config, "0") is None


def test_a_server_that_dies_too_often_is_given_up(make_run: Callable[..., Run]) -> None:
    run = make_run(max_restarts=0)
    supervisor = run.start().identity("supervisor")
    os.kill(run.pid("engine"), signal.SIGKILL)
    eventually(lambda: not is_alive(supervisor))
    assert run.state() == "failed" and "killed by SIGKILL" in run.status.message
    assert not run.ready.exists() and run.engine_is_gone()


def test_nothing_outlives_a_killed_supervisor(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.start()
    os.kill(run.pid("supervisor"), signal.SIGKILL)
    eventually(run.engine_is_gone, 10)
    assert run.ready.exists()  # a lie now
    assert clear_stale(run.config) == [
        f"server 0: cleared a stale readiness file: its supervisor (pid {run.pid('supervisor')}) is dead"
    ]
    assert not run.ready.exists()


def test_a_start_clears_what_a_double_kill_left(make_run: Callable[..., Run]) -> None:
    """Supervisor and reaper killed together, with an engine that has a daemon of its own."""
    run = make_run()
    run.start()
    environment = os.environ | {MARK_VARIABLE: server_mark(run.config.layout, "0")}
    stray = subprocess.Popen(["sleep", "1000"], env=environment, start_new_session=True)
    for role in ("supervisor", "reaper"):
        os.kill(run.pid(role), signal.SIGKILL)
    assert run.start().state == "ready"
    assert stray.wait(10) is not None
    assert isinstance(run.ask(max_tokens=8), Answer)


def test_a_hung_engine_is_restarted(make_run: Callable[..., Run]) -> None:
    run = make_run(stall_after=2)
    run.start()
    os.kill(run.pid("engine"), signal.SIGSTOP)
    eventually(lambda: run.status.instance == 2 and run.state() == "ready", 30)
    assert "the engine hangs: no token for 2 s" in run.config.layout.supervisor_log("0").read_text()
    assert isinstance(run.ask(max_tokens=8), Answer)


def test_a_status_and_a_log_that_cannot_be_written_cost_no_server(make_run: Callable[..., Run]) -> None:
    """As on a full disk, only that it works for root too."""
    run = make_run()
    layout = run.config.layout
    layout.server_status("0").mkdir(parents=True)
    layout.server_log("0").mkdir(parents=True)
    start_server(run.config, "0", run.model, "digest")
    lease = read_ready(layout, "0")
    assert lease and isinstance(run.ask(max_tokens=8), Answer)
    run.ready.unlink()
    eventually(lambda: not is_alive(lease.identity))
    assert run.engine_is_gone()


# Starts that fail


def test_a_port_in_use_names_who_holds_it(make_run: Callable[..., Run]) -> None:
    run = make_run()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(run.place.port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as stranger:
        try:
            eventually(lambda: not port_is_free("127.0.0.1", run.place.port))
            with pytest.raises(UserError, match=rf"port \d+ is in use by pid {stranger.pid} \(.* -m http.server\)"):
                run.start()
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_crash_at_start_quotes_the_log(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    run.model = tmp_path / "broken.gguf"
    run.model.write_bytes(b"this is no model")
    with pytest.raises(UserError, match=r"exited with code 1 while starting; its log says: .*invalid magic") as caught:
        run.start()
    assert "\n" not in str(caught.value) and "its log: " in caught.value.hint
    assert run.state() == "failed" and "invalid magic" in run.status.message
    assert not run.ready.exists() and run.engine_is_gone()


def test_a_context_the_model_does_not_have_is_refused(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.settings["engine"]["llamacpp"]["context_length"] = 40_000
    with pytest.raises(UserError, match="context_length is 40000, but the model allows 32768"):
        run.start()


def hang_while_loading(run: Run, folder: Path) -> None:
    """A model that the engine waits for without end: a pipe that nobody writes to."""
    run.model = folder / "pipe.gguf"
    os.mkfifo(run.model)


def test_a_start_that_takes_too_long_fails(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run(start_timeout=2)
    hang_while_loading(run, tmp_path)
    with pytest.raises(UserError, match=r"server 0: no answer within 2 s \(servers.start_timeout\): \w+"):
        run.start()
    assert run.state() == "failed" and not run.ready.exists() and run.engine_is_gone()


def test_a_start_ends_with_the_job_that_wants_it(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    hang_while_loading(run, tmp_path)
    code = "import sys, orjson; from pathlib import Path; from shardmill.launch import start_server; "
    code += "from shardmill.load_config import load_config; "
    code += "start_server(load_config(orjson.loads(sys.argv[1])), '0', Path(sys.argv[2]), 'digest')"
    command = [sys.executable, "-c", code, orjson.dumps(run.settings).decode(), str(run.model)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": SCRIPTS}) as job:
        eventually(lambda: run.state() == "starting" and run.status.identity("engine"))
        supervisor = run.status.identity("supervisor")
        job.kill()
    eventually(lambda: not is_alive(supervisor))
    assert run.engine_is_gone() and run.state() is None


# Readiness files that lie


def test_lying_readiness_files_are_cleared(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.start()
    layout = run.config.layout
    truth = orjson.loads(run.ready.read_bytes())

    def reason(**changes: Any) -> str:
        supervisor = truth["supervisor"] | changes.pop("supervisor", {})
        copy = layout.ready("0")
        copy.write_bytes(orjson.dumps(truth | {"supervisor": supervisor} | changes))
        found = stale_reason(layout, run.config, "0")
        copy.write_bytes(orjson.dumps(truth))
        assert found
        return found

    # Each lie is told and taken back between two looks of the supervisor, or it would step aside.
    os.kill(run.pid("supervisor"), signal.SIGSTOP)
    try:
        assert reason(supervisor={"boot_id": "another"}) == "the machine has been rebooted since"
        assert "is dead" in reason(supervisor={"pid": 2**22 + 1})
        assert "is dead" in reason(supervisor={"start_time": truth["supervisor"]["start_time"] + 1})
        assert "another host (node-7)" in reason(supervisor={"host": "node-7"})
        assert "other settings" in reason(launch_digest="0" * 64)
        assert stale_reason(layout, run.config, "0") is None
        assert "other settings" in (stale_reason(layout, run.config, "0", model_digest="another") or "")
        run.settings["engine"]["llamacpp"]["slots"] = 3
        assert "other settings" in (stale_reason(layout, run.config, "0") or "")
        run.settings["engine"]["llamacpp"]["slots"] = 2
        os.kill(run.pid("engine"), signal.SIGSTOP)
        assert "does not answer" in (stale_reason(layout, run.config, "0") or "")
        layout.ready("7").write_bytes(run.ready.read_bytes())
        run.ready.write_bytes(b"{")
        assert clear_stale(run.config) == [
            "server 0: cleared a stale readiness file: it is damaged",
            "server 7: cleared a stale readiness file: the pool has no such server any more",
        ]
    finally:
        os.kill(run.pid("supervisor"), signal.SIGCONT)
    eventually(run.engine_is_gone)


# External servers


def test_an_external_server_is_watched_and_never_touched(make_run: Callable[..., Run], tmp_path: Path) -> None:
    inner = make_run()
    inner.start()
    outer = Run(tmp_path / "outer", inner.model)
    outer.settings["engine"] = {
        "kind": "external",
        "external": {"urls": [f"{inner.place.url}/v1/"], "flavor": "llamacpp"},
    }
    outer.own()
    try:
        status = outer.start()
        assert status.url == inner.place.url and status.capacity == 2 and status.model == "shardmill"
        assert isinstance(outer.ask(max_tokens=8), Answer)
        os.kill(inner.pid("engine"), signal.SIGKILL)
        eventually(lambda: outer.status.instance == 2 and outer.state() == "ready", 30)
        supervisor = outer.status.identity("supervisor")
        outer.ready.unlink()
        eventually(lambda: not is_alive(supervisor))
        eventually(lambda: inner.state() == "ready")
        assert isinstance(inner.ask(max_tokens=8), Answer)
    finally:
        outer.close()


# Judging progress, on a clock of our own


def test_only_standing_still_with_work_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(watches.time, "monotonic", lambda: now[0])
    port = free_port()  # nobody listens
    where = ServerPlace("0", "127.0.0.1", port)

    def after(seconds: int, load: Callable[[int], Load | None], outstanding: int = 0) -> str | None:
        watch = Watch(stall_after=300)
        for second in range(seconds):
            now[0] += 1
            watch.note(load(second), where, outstanding)
            if trouble := watch.trouble():
                return f"{second}: {trouble}"
        return None

    assert after(2000, lambda s: Load(0, 0, 5, 5)) is None
    assert after(2000, lambda s: Load(1, 0, 5, s)) is None
    assert after(2000, lambda s: Load(1, 0, 5, 5, details={"decode_calls": s // 299})) is None
    assert "1 requests are in it" in (after(2000, lambda s: Load(1, 0, 5, 5)) or "")
    assert "2 requests wait for it" in (after(2000, lambda s: Load(0, 0, 5, 5), outstanding=2) or "")
    # Health that fails during a long prompt is no death.
    assert after(2000, lambda s: None if s % 60 < 50 else Load(1, 0, s, 5)) is None
    assert "refused connections for 60 s" in (after(2000, lambda s: None) or "")
    with socket.create_server(("127.0.0.1", port), backlog=2000):
        assert "it does not answer" in (after(302, lambda s: None) or "")


def test_requests_in_flight_are_counted_by_the_ledger_of_the_day(tmp_path: Path) -> None:
    layout = Run(tmp_path, Path("m")).config.layout
    count = LedgerCount(layout, "1")
    assert count() == 0 and not layout.ledger.exists()
    try:
        for _ in range(2):  # a run that ends takes its ledger with it
            with ledger_user(layout.ledger):
                assert count() == 2
            eventually(lambda: count() == 0, 5)  # the dead are looked for once a second
            layout.ledger.unlink()
            assert count() == 0
    finally:
        layout.ledger.unlink(missing_ok=True)


@contextlib.contextmanager
def ledger_user(path: Path) -> Iterator[None]:
    """A job, in a process of its own, with two requests at server 1."""
    code = (
        "import sys; from pathlib import Path; from shardmill.ledger import Ledger; ledger = Ledger(Path(sys.argv[1]));"
    )
    code += "ledger.join(); ledger.claim([0, 2]); ledger.claim([0, 2]); print('in', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(path)]
    environment = os.environ | {"PYTHONPATH": SCRIPTS}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as job:
        assert job.stdout and job.stdout.readline().strip() == "in"
        yield
        job.kill()


# Where servers run


def test_gpus_are_cut_into_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, Path("m"), gpus=[0, 2, 3, 1], gpus_per_server=2, port=30000)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [place(run.config, name).gpus for name in ("0", "1")] == [("0", "2"), ("3", "1")]
    assert [place(run.config, name).port for name in ("0", "1")] == [30000, 30001]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b, GPU-c,GPU-d")
    assert [place(run.config, name).gpus for name in ("0", "1")] == [("GPU-a", "GPU-c"), ("GPU-d", "GPU-b")]
    launch = places.prepare(run.config, place(run.config, "1"), Path("m"))
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "GPU-d,GPU-b"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(UserError, match=r"GPU 3 is asked for, but CUDA_VISIBLE_DEVICES holds 3 \('4,5,6'\)"):
        place(run.config, "1")
    with pytest.raises(UserError, match="none named '2'"):
        place(run.config, "2")


# What engines are asked, and what their answers mean


def test_request_bodies_say_everything(tmp_path: Path) -> None:
    run = Run(tmp_path, Path("m"))
    run.settings["sampling"] |= {
        "top_k": -1,
        "stop": ["x"],
        "repetition_penalty": 1.1,
        "extra": {"dry_multiplier": 0.5},
    }
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = LlamaCpp().request_body(run.config, MESSAGES, tools, 42, {"temperature": 0.3, "max_tokens": 8})
    assert body == {
        **{"messages": MESSAGES, "tools": tools, "stream": False, "n": 1, "seed": 42},
        **{"temperature": 0.3, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 8, "stop": ["x"]},
        **{"repeat_penalty": 1.1, "repeat_last_n": 65536, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        **{"dry_multiplier": 0.5, "chat_template_kwargs": {"enable_thinking": True}},
    }
    run.settings["sampling"]["extra"] = {"top_k": None, "chat_template_kwargs": {"lang": "en"}}
    run.settings["engine"] = {"kind": "external", "external": {"urls": ["http://h"], "model": "m"}}
    body = OpenAI().request_body(run.config, MESSAGES, None, 42, {})
    assert "top_k" not in body and "tools" not in body and body["model"] == "m" and body["repetition_penalty"] == 1.1
    assert body["chat_template_kwargs"] == {"enable_thinking": True, "lang": "en"}


def error(message: str, kind: str = "invalid_request_error") -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind}})


GOOD = {
    "choices": [{"finish_reason": "stop", "message": {"content": None, "reasoning_content": "t", "tool_calls": []}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 1}},
}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, error("request (3021 tokens) exceeds the available size", "exceed_context_size_error"), "too_long"),
        (400, error("The input (9000 tokens) is longer than the model's context length (4096 tokens)."), "too_long"),
        (400, error("Unable to generate parser for this template. ... Error: Jinja Exception: no"), "template_error"),
        (500, error("Failed to parse tools: Expected 'tools' to be an array", "server_error"), "bad_request"),
        (400, error("Expected 'content' to be a string or an array"), "bad_request"),
        (401, error("Invalid API Key"), "unauthorized"),
        (503, error("Loading model", "unavailable_error"), "queue_full"),
        (429, b"slow down", "queue_full"),
        (404, error("The model `x` does not exist"), "server_error"),
        (500, b"<html>oops", "server_error"),
        (200, b"", "malformed_answer"),
        (200, b'{"choices": []}', "malformed_answer"),
        (200, b"[]", "malformed_answer"),
        (200, orjson.dumps(GOOD | {"usage": None}), "malformed_answer"),
        (200, orjson.dumps(GOOD)[:-9], "malformed_answer"),
        (200, orjson.dumps(GOOD).replace(b'"stop"', b'"abort"'), "aborted"),
        (200, error("boom"), "server_error"),
    ],
)
def test_faults_are_told_apart(status: int, body: bytes, kind: str) -> None:
    fault = LlamaCpp().read_answer(status, body)
    assert isinstance(fault, Fault) and fault.kind == kind and fault.message


def test_answers_are_read() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "reasoning_tokens": 1}
    assert OpenAI().read_answer(200, orjson.dumps(GOOD)) == Answer("", "t", None, "stop", usage)


def test_a_prompt_that_is_too_long_is_told_so_by_the_real_server(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.start()
    engine = LlamaCpp()
    for content, kind in (("a" * 4000, "too_long"), (5, "bad_request")):
        body = engine.request_body(run.config, [{"role": "user", "content": content}], None, 1, {})
        fault = engine.read_answer(*post_chat(run.place, body, timeout=30))
        assert isinstance(fault, Fault) and fault.kind == kind
