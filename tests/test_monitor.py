"""Samples, history and the views of a run: real files, the real script, a real browser where there is one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from shardmill.config import Config
from shardmill.layout import Layout
from shardmill.monitor import eta, gpu, view
from shardmill.monitor.history import MINUTE, History, JobHistory
from shardmill.monitor.jobs import JobLog, bucket, bucket_value, thought_tokens
from shardmill.monitor.observer import Observer
from shardmill.monitor.prometheus import metrics_text
from shardmill.monitor.samples import SampleLog, Sampler, ServerSample, read_segment, segments
from shardmill.monitor.watchman import Watchman
from shardmill.monitor.web import Looks, make_server
from shardmill.owner import RunLock
from shardmill.supervisor_state import ServerStatus, write_status
from tests.histories import START, server_series, write_lines
from tests.pipeline import REPO, Workspace, eventually, prompts

EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def make_config(folder: Path, **sections: Any) -> Config:
    data = {
        "run": {"name": "t", "results": str(folder / "results")},
        "prompts": {"path": "p.jsonl"},
        "model": {"source": "m", "ram_disk": False},
        "servers": {"count": 2},
    }
    return Config.model_validate(data | sections)


# Samples


def test_a_sample_comes_back_as_it_was() -> None:
    sample = ServerSample(
        START,
        3,
        "ready",
        48,
        2,
        48,
        1e9,
        5.0,
        1,
        3.0,
        {"acceptance_length": 3.25},
        [["0", 99, 150.5, 1900, 940, 70, 4]],
        "m",
    )
    line = orjson.dumps(sample.to_json())
    assert ServerSample.from_json(orjson.loads(line)) == sample
    assert len(line) < 250
    assert ServerSample.from_json({"i": 1}) is None and ServerSample.from_json([]) is None


def test_segments_are_compressed_bounded_and_read_as_one(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path), "t")
    log = SampleLog(layout.server_samples("0"), keep_days=0.5, segment_seconds=3 * 3600)
    samples = list(server_series(24 * 3600, seed=1))
    for sample in samples:
        log.append(sample.to_json())
    ended = segments(log.path)
    assert 3 <= len(ended) <= 6
    kept = [value["t"] for path in ended for value in read_segment(path)]
    assert min(kept) >= samples[-1].at - 16 * 3600
    history = History(layout)
    history.refresh()
    server = history.servers["0"]
    assert server.covered == samples[-1].at - min(kept)
    assert sum(path.stat().st_size for path in log.path.parent.iterdir()) < 1 << 20


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path), "t")
    path = layout.server_samples("0")
    for _ in range(2):
        log = SampleLog(path)
        log.append({"t": START})
        log.close()
        with path.open("ab") as handle:
            handle.write(b'{"t":18000')
    log = SampleLog(path)
    log.append({"t": START + 5})
    values = path.read_bytes().split(b"\n")
    assert [value for value in values if value] == [b'{"t":1800000000.0}', b'{"t":18000'] * 2 + [b'{"t":1800000005.0}']


def test_rates_survive_a_restart_of_the_engine(tmp_path: Path) -> None:
    history = History(Layout(str(tmp_path), "t"))
    path = history.layout.server_samples("0")
    rows = [
        (0, 1, "ready", 0),
        (10, 1, "ready", 1000),
        (20, 1, "ready", 2000),
        (30, 1, "restarting", None),
        (40, 2, "starting", None),
        (50, 2, "ready", 100),
        (60, 2, "ready", 1100),
    ]
    write_lines(path, ({"t": START + at, "i": i, "s": s, "c": c} for at, i, s, c in rows))
    history.refresh()
    server = history.servers["0"]
    assert server.completion_tokens == 3100 and server.covered == 60
    assert [event.kind for event in server.events] == ["down", "started", "ready"]


def test_a_history_follows_growing_and_rotated_files(tmp_path: Path) -> None:
    history = History(Layout(str(tmp_path), "t"))
    log = SampleLog(history.layout.server_samples("0"))
    samples = list(server_series(3600, seed=1))
    for number, sample in enumerate(samples):
        log.append(sample.to_json())
        if number % 50 == 0:
            history.refresh()
        if number in (120, 200):
            log.rotate(sample.at)
    history.refresh()
    assert history.servers["0"].covered == 3600
    grown = (samples[-1].completion_tokens or 0) - (samples[0].completion_tokens or 0)
    assert history.servers["0"].completion_tokens == grown


def test_the_supervisors_sampler(tmp_path: Path) -> None:
    config = make_config(tmp_path, monitor={"interval": 60})
    sampler = Sampler(config, "0", ())
    status = ServerStatus("0", "starting", "http://x", at=START)
    for state, instance in (
        ("starting", 1),
        ("starting", 1),
        ("ready", 1),
        ("ready", 1),
        ("restarting", 1),
        ("ready", 2),
    ):
        status.state, status.instance = state, instance  # type: ignore[assignment]
        sampler.note(status)
    lines = config.layout.server_samples("0").read_bytes().splitlines()
    assert [json.loads(line)["s"] for line in lines] == ["starting", "ready", "restarting", "ready"]


def test_a_sampler_that_cannot_write_never_raises(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.layout.root.mkdir(parents=True)
    config.layout.samples.write_text("no folder")
    Sampler(config, "0", ()).note(ServerStatus("0", "ready", "http://x"))
    log = JobLog(config, "00000")
    log.write(done=1, prompts=2, in_flight=0, rejected=0)


def answer(tokens: int, **parts: Any) -> dict[str, Any]:
    usage = {"completion_tokens": tokens, "prompt_tokens": 7}
    return {"content": "c" * 30, "reasoning_content": "t" * 90, "usage": usage, "finish_reason": "stop"} | parts


def test_what_a_job_adds(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    log = JobLog(config, "00000")
    log.tick(done=100, prompts=1000, in_flight=5, rejected=0)  # the journal had brought these
    for attempt, verdict in ((1, "ok"), (1, "looping"), (2, "ok")):
        entry = {"attempt": attempt, "verdict": verdict, "seconds": 8.0, "answer": answer(400)}
        log.note_request("1", entry)
    log.note_request("0", None)
    log.note_request("0", {})  # nothing that can be counted
    log.write(done=102, prompts=1000, in_flight=3, rejected=1)
    jobs = History(config.layout)
    jobs.refresh()
    (minute,) = jobs.jobs.minutes.values()
    assert (minute.settled, minute.rejected, minute.retries, minute.resent) == (2, 1, 1, 1)
    assert jobs.jobs.servers == {"1": [3, 1200, 21, 0], "0": [0, 0, 0, 1]}
    assert jobs.jobs.verdicts == {"ok": 2, "looping": 1}
    assert jobs.jobs.thoughts == {bucket(300): 3} and jobs.jobs.latencies == {bucket(8): 3}


def test_thoughts_are_counted_or_else_estimated() -> None:
    assert thought_tokens(answer(400)) == 300
    assert thought_tokens(answer(400, usage={"completion_tokens": 400, "reasoning_tokens": 5})) == 5
    assert thought_tokens(answer(400, reasoning_content=None)) == 0
    assert all(abs(bucket_value(bucket(x)) / x - 1) < 0.1 for x in (0.1, 3, 777, 30_000))


def test_gpu_rows_by_the_names_that_nvml_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions exist in the real binding; what they return is played, for there is no driver here."""
    pynvml = pytest.importorskip("pynvml")

    class Box:
        gpu, used = 97, 150.5e9

    def missing(_: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    played: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUtilizationRates": lambda _: Box,
        "nvmlDeviceGetMemoryInfo": lambda _: Box,
        "nvmlDeviceGetClockInfo": lambda _, kind: 1580,
        "nvmlDeviceGetPowerUsage": lambda _: 640_123,
        "nvmlDeviceGetTemperature": lambda _, kind: missing(kind),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 0x24,
    }
    for name, function in played.items():
        monkeypatch.setattr(pynvml, name, function)  # raises where the binding has no such name
    reader = gpu.GpuReader(("0",), interval=30)
    rows = eventually(reader.latest, "a look at the GPU")
    assert rows == [["0", 97, 150.5, 1580, 640.1, None, 0x24]]
    assert gpu.reason_names(0x24) == ["power cap", "thermal slowdown (software)"]
    assert gpu.GpuReader((), 1).latest() == []


# Time left


def settled(per_minute: list[int]) -> JobHistory:
    jobs = JobHistory()
    for minute, count in enumerate(per_minute):
        jobs.add("00000", {"t": START + MINUTE * minute + 30, "k": count, "w": {str(bucket(20)): count}})
    return jobs


def test_nothing_is_said_before_anything_is_known() -> None:
    assert eta.estimate(settled([]), left=100, shards_left=1, since=START, now=START + 60) is None
    assert eta.estimate(settled([3, 3]), left=100, shards_left=1, since=START, now=START + 120) is None


def test_the_range_holds_as_often_as_it_says() -> None:
    """Runs whose pace wanders: the true end lies in the 90 % range in most of them, and the range is of use."""
    import random

    inside, widths = 0, []
    for seed in range(100):
        rng, pace, paces = random.Random(seed), 1.0, []
        while sum(paces) < 10_000:
            pace = 1 + 0.9 * (pace - 1) + rng.gauss(0, 0.03)
            paces.append(max(0, round(40 * pace + rng.gauss(0, 6))))
        cut = len(paces) // 3
        done = sum(paces[:cut])
        now = START + 60 * cut
        found = eta.estimate(settled(paces[:cut]), left=10_000 - done, shards_left=7, since=START, now=now)
        assert found is not None and found.low < found.seconds < found.high
        inside += found.low <= 60 * (len(paces) - cut) <= found.high
        widths.append((found.high - found.low) / found.seconds)
    assert inside >= 85
    assert sorted(widths)[50] < 0.5


# The views


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Config]:
    """A run that goes on: owner, status files, an hour of samples, progress, and texts that would like to be code."""
    config = make_config(tmp_path, engine={"kind": "sglang"}, monitor={"interval": 10})
    layout = config.layout
    now = time.time()
    shift = now - START - 3600
    for name, factor in (("0", 1.0), ("1", 0.83), ("2", 1.0)):
        values = []
        for sample in server_series(3600, seed=int(name), gpu=name, speed=lambda at, f=factor: f):
            sample.at += shift
            values.append(sample.to_json())
        write_lines(layout.server_samples(name), iter(values))
        last = ServerSample.from_json(values[-1])
        assert last
        status = ServerStatus(name, "ready", "http://x", capacity=48, running=47, queued=3, details=last.details)
        status.message = EVIL if name == "1" else ""
        write_status(layout, status)
    per_line = {"k": 30, "n": 30, "v": {"ok": 29, EVIL: 1}, "w": {str(bucket(9)): 30}, "x": {"0": [30, 36000, 500, 0]}}
    write_lines(layout.shard_samples("00001"), ({"t": now - 3600 + 10 * n, **per_line} for n in range(360)))
    index = {"usable": 2000, "unusable": 1, "shards": [{"name": f"{n:05}", "prompts": 1000} for n in range(2)]}
    for path, value in (
        (layout.prompt_index, index),
        (layout.progress("00001"), {"shard": "00001", "prompts": 1000, "done": 700, "accepted": 690, "rejected": 10}),
        (layout.stats("00000"), {"shard": "00000", "prompts": 1000, "accepted": 999, "rejected": 1, "usage": {}}),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(value))
    with RunLock.acquire(layout):
        record = orjson.loads(layout.lock.read_bytes()) | {"started_at": now - 3600}
        layout.lock.write_bytes(orjson.dumps(record))
        yield config


def test_a_snapshot_of_a_live_run(live: Config) -> None:
    found = Observer(live).snapshot()
    assert (found["state"], found["prompts"]["done"], found["prompts"]["total"]) == ("running", 1700, 2000)
    assert found["shards"] == {"total": 2, "done": 1, "open": 1}
    assert [server["running"] for server in found["servers"]] == [47, 47, 47]
    assert abs(found["rates"]["requests"] - 3.0) < 0.7
    assert abs(found["check"]["tokens_per_request"] - 1200) < 1 and 0.4 < found["check"]["ratio"] < 0.9
    assert found["servers"][1]["of_peers"] < 0.9 < found["servers"][0]["of_peers"]
    assert [(alarm["kind"], alarm["server"]) for alarm in found["alarms"]] == [("slow", "1")]
    orjson.dumps(found)


def test_a_run_over_several_machines_is_seen_as_one(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    for pool in ("a", "b"):
        layout = config.layout.of_pool(pool)
        write_lines(layout.server_samples("0"), (sample.to_json() for sample in server_series(600, seed=1)))
        write_lines(layout.shard_samples("00001"), iter([{"t": START + 30, "k": 2, "n": 2}]))
        write_status(layout, ServerStatus("0", "ready", "http://x", running=5))
    found = Observer(config, since=0.0).snapshot()
    assert [(server["name"], server["running"]) for server in found["servers"]] == [("a.0", 5), ("b.0", 5)]
    assert Observer(config, since=0.0, keep=None).layout.pool is None


def test_the_terminal_view_holds_it_all(live: Config, capsys: pytest.CaptureFixture[str]) -> None:
    view.print_once(Observer(live).snapshot())
    text = capsys.readouterr().out
    for part in (
        "1,700 of 2,000 prompts (85.0%)",
        "left (",
        "requests/s",
        "check over",
        "of peers",
        "MHz",
        "! server 1: 0.8",
    ):
        assert part in text, text
    assert "\x1b" not in text


def test_metrics_are_prometheus_text(live: Config) -> None:
    families = {f.name: f for f in text_string_to_metric_families(metrics_text(Observer(live).snapshot()))}
    assert families["shardmill_prompts_done"].samples[0].value == 1700
    assert {s.labels["server"] for s in families["shardmill_server_running"].samples} == {"0", "1", "2"}
    assert [s.labels["kind"] for s in families["shardmill_alarm"].samples] == ["slow"]
    assert EVIL in {s.labels["verdict"] for s in families["shardmill_verdicts"].samples}


def test_the_dashboard_asks_for_metrics_that_exist(live: Config) -> None:
    import re

    shown = {f.name for f in text_string_to_metric_families(metrics_text(Observer(live).snapshot()))}
    asked = set(re.findall(r"shardmill_\w+", (REPO / "docs" / "grafana-dashboard.json").read_text()))
    rare = {
        "shardmill_eta_seconds",
        "shardmill_eta_low_seconds",
        "shardmill_eta_high_seconds",
        "shardmill_gpu_throttled",
    }
    rare |= {"shardmill_token_check_ratio"}
    assert asked and asked - rare <= shown, asked - shown


def test_the_watchman_says_an_alarm_once(live: Config, caplog: pytest.LogCaptureFixture) -> None:
    for shard in ("00001", "00002"):  # the next job knows what the one before it said
        Watchman(live, shard).look()
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("alarm: ")]
    assert len(told) == 1 and "server 1: 0.8" in told[0]
    assert len(live.layout.forecasts.read_bytes().splitlines()) == 2


@pytest.fixture
def page(live: Config) -> Iterator[str]:
    server = make_server(Looks(Observer(live), every=1.0), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_web_server(page: str) -> None:
    first = requests.get(page, timeout=30)
    assert "default-src 'none'" in first.headers["Content-Security-Policy"]
    assert not [
        word for word in ("http://", "https://", "src=", "href=") if word in first.text.replace("http://www.w3.org", "")
    ]
    assert requests.get(f"{page}/data.json", timeout=30).json()["prompts"]["done"] == 1700
    assert requests.get(f"{page}/metrics", timeout=30).headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert requests.get(f"{page}/etc/passwd", timeout=30).status_code == 404
    for host in ("evil.example", "localhost.evil.example:80", ""):
        assert requests.get(page, headers={"Host": host}, timeout=30).status_code == 403


def chromium() -> str:
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip("needs chromium")
    return found


def browse(url: str, folder: Path, *, width: int, dark: bool) -> str:
    """The page's elements as a real browser has them after its scripts ran; leaves shot.png in `folder`."""
    base = [chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    base += [f"--window-size={width},1600", "--virtual-time-budget=3000", "--hide-scrollbars"]
    base += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    shot = folder / "shot.png"
    subprocess.run([*base, f"--screenshot={shot}", url], check=True, capture_output=True, timeout=120)
    done = subprocess.run([*base, "--dump-dom", url], check=True, capture_output=True, timeout=120)
    return done.stdout.decode()


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (500, True)], ids=["desk", "phone"])
def test_the_page_in_a_real_browser(page: str, tmp_path: Path, width: int, dark: bool) -> None:
    from PIL import Image

    dom = browse(page, tmp_path, width=width, dark=dark)
    assert 'data-ready="yes"' in dom
    assert 'id="lost" class="alarm error" hidden' in dom
    for part in ("85.0 %", "1,700 of 2,000 prompts", "server 1: 0.8", "thermal slowdown", 'class="curve k2"'):
        assert part in dom, part
    assert "<title>t – Shardmill</title>" in dom and "<script>document" not in dom
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt;" in dom
    image = Image.open(tmp_path / "shot.png").convert("L")
    corner = image.getpixel((2, 2))
    assert (corner < 60) if dark else (corner > 200)
    assert len(image.getcolors(1 << 20) or []) > 20


# The script


def monitor(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "scripts" / "monitor.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_the_script_finds_the_run(finished: Workspace) -> None:
    done = monitor(finished.folder, "--json")
    found = json.loads(done.stdout)
    assert (found["run"], found["state"], found["prompts"]["done"]) == ("t", "finished", 20)
    assert sum(server["running"] for server in found["servers"]) == 0
    assert "run t  finished" in monitor(finished.folder, "--once", "--run", "t").stdout
    (finished.folder / "other.yaml").write_text((finished.folder / "config.yaml").read_text())
    (finished.folder / "config.yaml").unlink()
    assert "run t  finished" in monitor(finished.folder, "--once").stdout  # by what the run recorded itself
    assert "run t  finished" in monitor(finished.folder, "--once", "--configfile", "other.yaml").stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--once"], "no run in results/ yet"),
        (["--run", "x"], "run x: no such run in results/; there are: none"),
        (["--configfile", "none.yaml"], "none.yaml: cannot be read"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    done = monitor(tmp_path, *arguments)
    assert done.returncode != 0 and told in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_taken_port_is_said_in_one_line(page: str, finished: Workspace) -> None:
    done = monitor(finished.folder, "--serve", page.rpartition(":")[2])
    assert done.returncode != 0 and "cannot listen on" in done.stderr and "Traceback" not in done.stderr


def test_starting_loads_nothing_heavy() -> None:
    """What makes it start at once: no plotting, no arrays, no Snakemake."""
    code = (
        "import sys; sys.path.insert(0, 'scripts')\n"
        "import shardmill.monitor.observer, shardmill.monitor.view, shardmill.monitor.web, shardmill.monitor.choose\n"
        "heavy = {'numpy', 'matplotlib', 'snakemake', 'pynvml', 'pyarrow', 'huggingface_hub', 'transformers'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_real_run_leaves_samples(workspace: Callable[..., Workspace]) -> None:
    """Two real servers, seen from another process while they work."""
    work = workspace(monitor={"interval": 1})
    work.write_prompts(prompts(40))
    command = work.start()

    def seen() -> dict[str, Any] | None:
        found = json.loads(monitor(work.folder, "--json").stdout) if work.path("run.json").exists() else None
        return found if found and found["state"] == "running" else None

    found = eventually(seen, "a run that goes on", 120)
    assert found["owner"].startswith("pid ") and found["prompts"]["total"] in (0, 40)
    assert command.wait().code == 0, command.output
    history = History(Layout(str(work.folder / "results"), "t"))
    history.refresh()
    sample = work.json("quality", "canary.json")  # which counts for itself
    answers = [entry["answer"] for entry in work.journal() if entry["kind"] == "answer"]
    made = sum(one["usage"]["completion_tokens"] for one in answers) - sample["completion_tokens"]
    sent = len(answers) - sample["requests_sent"]
    assert sorted(history.servers) == ["0", "1"]
    assert sum(history.jobs.verdicts.values()) == sum(history.jobs.lengths.values()) == sent > 30
    assert sum(row[1] for row in history.jobs.servers.values()) == made
    states = [event.kind for event in history.servers["0"].events]
    assert states[:2] == ["started", "ready"] and states[-1] == "stopped"
    assert json.loads(monitor(work.folder, "--json").stdout)["state"] == "finished"


def test_what_watching_costs_is_measured_here(live: Config) -> None:
    """No assertion about time, only that a second look reads nothing again."""
    observer = Observer(live)
    observer.snapshot()
    before = psutil.Process(os.getpid()).io_counters().read_chars
    observer.snapshot()
    assert psutil.Process(os.getpid()).io_counters().read_chars - before < 100_000


def test_the_settings_are_checked(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"prompts": {"path": "p"}, "model": {"source": "m"}, "monitor": {"intervall": 3}})
    )
    done = monitor(tmp_path, "--once")
    assert "did you mean `monitor.interval`?" in done.stderr
