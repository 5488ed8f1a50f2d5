"""Real runs for tests: a folder with a small configuration, and the real `snakemake` in it.

The checks at the end share no code with the library: they read the files that a user gets, with json and zstandard.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml
import zstandard

REPO = Path(__file__).resolve().parent.parent
SNAKEMAKE = str(Path(sys.executable).with_name("snakemake"))
MARK = "SHARDMILL_TEST_FOLDER"  # every process of a run inherits it, so that teardown finds them all
PATIENCE = 180.0  # seconds for any run; a deadline, not an expectation
CODE = ("Snakefile", "rules", "scripts", "profiles", "envs", "configs", "config.yaml")  # what a run needs of the repo


def eventually(condition: Callable[[], Any], what: str, timeout: float = 60) -> Any:
    """Poll until `condition()` is true, and return what it gave."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.02)
    return value


def free_ports(count: int) -> int:
    """First of `count` ports in a row that nobody uses, below the range that the kernel gives to clients."""
    while True:
        first = random.SystemRandom().randrange(10000, 30000)
        if all(port_is_free(port) for port in range(first, first + count)):
            return first


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def prompts(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Short prompts that differ."""
    return [{"id": f"p{n:04}", "prompt": f"What does mill {n} grind?"} for n in range(first, first + count)]


@dataclass(frozen=True)
class Result:
    """A `snakemake` that has ended."""

    code: int
    output: str

    @property
    def jobs(self) -> dict[str, int]:
        """Jobs of the plan by rule, `all` left out; empty if there was nothing to do."""
        table = re.search(r"^job +count\n-+ +-+\n(.*?)^total ", self.output, re.MULTILINE | re.DOTALL)
        rows = [line.split() for line in table[1].splitlines()] if table else []
        return {rule: int(count) for rule, count in rows if rule != "all"}

    @property
    def did_nothing(self) -> bool:
        return self.code == 0 and "Nothing to be done" in self.output and not self.jobs

    def error(self) -> str:
        """The one line of error of a run that failed as it should: no traceback, nothing said twice."""
        assert self.code != 0, self.output
        assert "Traceback" not in self.output, self.output
        found = [line for line in self.output.splitlines() if re.match(r"(shardmill:|\[[\d:]+\]) error: ", line)]
        assert len(found) == 1, self.output
        return found[0].split("error: ", 1)[1]


class Command:
    """A `snakemake` that runs, in a process group of its own."""

    def __init__(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.log = folder.parent / f"console-{time.monotonic_ns()}.txt"
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                arguments,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill_main(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """What a terminal does at Ctrl-C."""
        os.killpg(self.process.pid, number)

    def wait(self, timeout: float = PATIENCE) -> Result:
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s:\n{self.output[-4000:]}") from None
        return Result(code, self.output)


class Workspace:
    """A user's folder: prompts.jsonl, config.yaml, results/.

    Args:
        folder: where; made if missing.
        model: the GGUF file.
        settings: sections of the configuration, laid over small defaults.
    """

    def __init__(self, folder: Path, model: Path, **settings: Any) -> None:
        self.folder = folder
        self.code = REPO
        self.tmp = folder.parent / f"{folder.name}-tmp"
        self.environment: dict[str, str] = {}
        folder.mkdir(exist_ok=True)
        self.tmp.mkdir(exist_ok=True)
        self.settings: dict[str, Any] = {
            "run": {"name": "t"},
            "prompts": {"path": "prompts.jsonl"},
            "shards": {"size": 6},
            "model": {"source": str(model), "ram_disk": False},
            "engine": {"kind": "llamacpp", "llamacpp": {"context_length": 1024, "slots": 4}},
            "servers": {"count": 2, "port": free_ports(2), "linger": 2, "stop_timeout": 2, "start_timeout": 120},
            "sampling": {"max_tokens": 512},
            "thinking": {"enabled": True},
            "monitor": {"report": False},
        }
        self.configure(**settings)

    def copy(self, folder: Path) -> Workspace:
        """The same folder elsewhere, Snakemake's memory included."""
        shutil.copytree(self.folder, folder)
        other = Workspace(folder, Path(self.settings["model"]["source"]))
        other.configure(**merged(self.settings, {"servers": {"port": free_ports(2)}}))
        return other

    def configure(self, **sections: Any) -> None:
        """Change keys of some sections, and write config.yaml."""
        self.settings = merged(self.settings, sections)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.settings))

    def write_prompts(self, records: list[dict[str, Any]], name: str = "prompts.jsonl") -> None:
        (self.folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    # Running

    def start(self, *arguments: str, before: tuple[str, ...] = (), cwd: Path | None = None) -> Command:
        """Start snakemake with these arguments; `--cores 7` if they do not say how many."""
        cores = [] if {"--cores", "-c", "--lint", "--report"} & set(arguments) else ["--cores", "7"]
        command = [*before, SNAKEMAKE, "-s", str(self.code / "Snakefile"), *cores, *arguments]
        environment = os.environ | {MARK: str(self.folder), "TMPDIR": str(self.tmp)} | self.environment
        return Command(command, cwd or self.folder, environment)

    def run(self, *arguments: str, **options: Any) -> Result:
        return self.start(*arguments, **options).wait()

    def finish(self, *arguments: str, **options: Any) -> Result:
        """Run to a good end."""
        result = self.run(*arguments, **options)
        assert result.code == 0, result.output
        return result

    def processes(self) -> list[psutil.Process]:
        """All that was started here, directly or not, and still lives."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill_everything(self) -> int:
        """SIGKILL to every process of the run until there is none; returns how many were hit."""
        hit = 0
        while found := self.processes():
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            hit += len(found)
            psutil.wait_procs(found, timeout=1)
        return hit

    # What lies there

    @property
    def results(self) -> Path:
        return self.folder / "results" / self.settings["run"]["name"]

    @property
    def ports(self) -> range:
        servers = self.settings["servers"]
        return range(servers["port"], servers["port"] + servers["count"])

    def path(self, *parts: str) -> Path:
        return self.results.joinpath(*parts)

    def json(self, *parts: str) -> Any:
        return json.loads(self.path(*parts).read_text())

    def journal_lines(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self.results.glob("journals/*.jsonl"))

    def journal(self) -> list[dict[str, Any]]:
        """Whole entries of all journals, in file order."""
        found = []
        for path in sorted(self.results.glob("journals/*.jsonl")):
            for line in path.read_bytes().split(b"\n")[:-1]:
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line)["entry"])
        return found

    def status(self, server: str) -> dict[str, Any]:
        """What its supervisor last said of a server; empty if it says nothing."""
        try:
            return self.json("servers", f"{server}.status.json")
        except (OSError, ValueError):
            return {}

    def snapshot(self) -> dict[str, tuple[int, int]]:
        """Every file of the run as (mtime, size)."""
        files = [path for path in self.results.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.results)): _stamp(path) for path in files}

    def await_journal(self, lines: int, command: Command) -> None:
        """Wait until the journals hold so many lines while the run goes on."""

        def enough() -> bool:
            assert command.process.poll() is None, f"ended too early:\n{command.output}"
            return self.journal_lines() >= lines

        eventually(enough, f"{lines} lines in the journals", PATIENCE)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings laid over each other; None takes a key away."""
    result = dict(old)
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            result[key] = merged(old[key], value)
        else:
            result[key] = value
    return {key: value for key, value in result.items() if value is not None}


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def copy_code(folder: Path) -> Path:
    """The repository's code in a folder of its own, to be edited."""
    folder.mkdir()
    for name in CODE:
        source = REPO / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    return folder


@contextlib.contextmanager
def frozen_engines(workspace: Workspace) -> Iterator[None]:
    """No engine answers anything while the block runs, so that a run is caught in the middle on any machine."""
    engines = [psutil.Process(workspace.status(server)["pids"]["engine"]["pid"]) for server in "01"]
    for engine in engines:
        engine.suspend()
    try:
        yield
    finally:
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()


# A server's front door


@dataclass
class Door:
    """A proxy before a real server that keeps a list of what was asked there."""

    target: str
    url: str = ""
    asked: list[tuple[str, int]] = field(default_factory=list)  # (last user turn, seed)

    def note(self, body: bytes) -> None:
        request = json.loads(body)
        text = next(m["content"] for m in reversed(request["messages"]) if m["role"] == "user")
        if text != "Say hello.":  # the readiness probe
            self.asked.append((text, request["seed"]))


@contextlib.contextmanager
def open_door(target: str) -> Iterator[Door]:
    """Put a counting proxy before the server at `target`."""
    door = Door(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._pass_on(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/chat/completions":
                door.note(body)
            self._pass_on(body)

        def _pass_on(self, body: bytes | None) -> None:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            answer = requests.request(self.command, target + self.path, data=body, headers=headers, timeout=PATIENCE)
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    door.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield door
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# Checks


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a zstd file that must be exactly one whole frame."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    text = frame.decompress(path.read_bytes())
    assert frame.eof and not frame.unused_data, f"{path} is not one zstd frame"
    assert not text or text.endswith(b"\n")
    return [json.loads(line) for line in text.split(b"\n")[:-1]]


def read_dataset(workspace: Workspace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Completions and rejects of a finished run."""
    return tuple(read_records(workspace.path("dataset", f"{name}.jsonl.zst")) for name in ("completions", "rejected"))  # type: ignore[return-value]


def check_complete(workspace: Workspace, ids: list[str]) -> list[dict[str, Any]]:
    """Every input id exactly once, completions in input order, each a real answer, and a manifest that says so.

    Returns the completions.
    """
    completions, rejects = read_dataset(workspace)
    made, rejected = [c["id"] for c in completions], [r["id"] for r in rejects if r["id"] is not None]
    assert Counter(made + rejected) == Counter(ids), "some ids are missing, strange or double"
    position = {name: number for number, name in enumerate(ids)}
    assert made == sorted(made, key=position.__getitem__)
    thinking = workspace.settings["thinking"].get("enabled")
    for record in completions:
        answer = record["messages"][-1]
        assert answer["role"] == "assistant" and answer["content"].strip(), record
        if thinking is not None:
            assert bool(answer.get("reasoning_content", "").strip()) == thinking, record
        assert "<think>" not in answer["content"]
    manifest = workspace.json("dataset", "manifest.json")
    counts = manifest["counts"]
    assert (counts["accepted"], counts["rejected"]) == (len(made), len(rejected))
    assert counts["accepted"] + counts["rejected"] + counts["unusable"] == counts["input"]
    dataset = workspace.path("dataset", "completions.jsonl.zst").read_bytes()
    assert manifest["dataset"]["sha256"] == hashlib.sha256(dataset).hexdigest()
    parts = [read_records(path) for path in sorted(workspace.results.glob("completions/*.jsonl.zst"))]
    assert [record for part in parts for record in part] == completions
    return completions


def check_sent_once(workspace: Workspace) -> None:
    """No request whose answer was in a journal was ever sent again."""
    answers = [entry for entry in workspace.journal() if entry["kind"] == "answer"]
    times = Counter((entry["id"], entry["fingerprint"], entry["attempt"]) for entry in answers)
    assert {key: count for key, count in times.items() if count != 1} == {}


def check_nothing_left(workspace: Workspace) -> None:
    """No process, port, readiness file, ledger or lock outlives a run that has ended."""

    def left() -> list[str]:
        found = [f"process {process.pid} {process.cmdline()}" for process in workspace.processes()]
        found += [f"port {port}" for port in workspace.ports if not port_is_free(port)]
        for pattern in ("servers/*.ready", "progress/*", "**/*.tmp", "**/.*.tmp"):
            found += map(str, workspace.results.glob(pattern))
        found += map(str, workspace.tmp.glob("*.ledger"))
        ram_disk = workspace.settings["model"].get("ram_disk")
        if isinstance(ram_disk, str):
            found += [str(path) for path in Path(ram_disk).rglob("*.use") if not can_lock(path)]
            found += [str(path) for path in Path(ram_disk).rglob("*.lock") if not can_lock(path)]
        return found

    deadline = time.monotonic() + 60
    while still := _quiet(left):
        assert time.monotonic() < deadline, f"left behind: {still}"
        time.sleep(0.1)


def _quiet(look: Callable[[], list[str]]) -> list[str]:
    try:
        return look()
    except psutil.Error:  # it ended under our eyes
        return ["a process that is ending"]


def can_lock(path: Path) -> bool:
    """Whether nobody holds a kernel lock on a file."""
    with path.open("rb+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
