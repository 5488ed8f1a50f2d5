"""Dispatch over real processes: shard jobs, supervisors and stand-in servers that are slow, dead, hung or forgetful."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard

from benchmarks.node import MODEL_DIGEST, run_of, settings_for, stand_ins, start_job, write_prompts
from shardmill import answering, ledger, pool
from shardmill.config import Config
from shardmill.engines.base import ServerPlace
from shardmill.generate import ShardRun
from shardmill.layout import Layout
from shardmill.pool import ServerView
from shardmill.supervisor_state import read_status
from tests.pipeline import free_ports
from tests.sglang import fake_python
from tests.sglang.servers import Running

PATIENCE = 120.0
SHORT = "200,0.5,2000"  # tokens of the answers
SLOTS = 8


class Node:
    """Stand-in servers, a run over them, and its shard jobs in processes of their own."""

    def __init__(self, servers: list[Running], settings: dict[str, Any], config: Config, stack: ExitStack) -> None:
        self.servers, self.settings, self.config, self._stack = servers, settings, config, stack

    @property
    def layout(self) -> Layout:
        return self.config.layout

    def start(self, *shards: str) -> list[Any]:
        jobs = [start_job(self.settings, shard) for shard in shards]
        for job in jobs:
            self._stack.callback(job.wait)
            self._stack.callback(job.kill)
        return jobs

    def finish(self, *shards: str) -> list[dict[str, Any]]:
        return self.results(self.start(*shards))

    def results(self, jobs: Sequence[Any]) -> list[dict[str, Any]]:
        """What the jobs said at their good end."""
        said = [json.loads(job.communicate(timeout=PATIENCE)[0]) for job in jobs]
        assert [job.returncode for job in jobs] == [0] * len(jobs)
        return said

    def stats(self, server: int) -> dict[str, Any]:
        return self.servers[server].call("GET", "/_standin/stats").json()

    def fault(self, server: int, faults: dict[str, Any]) -> None:
        assert self.servers[server].call("POST", "/_standin/faults", json=faults).ok

    def records(self, shard: str) -> list[dict[str, Any]]:
        data = zstandard.ZstdDecompressor().stream_reader(self.layout.completions(shard).read_bytes()).read()
        return [json.loads(line) for line in data.splitlines()]

    def answers_in_journal(self, shard: str) -> Counter[str]:
        """Answers by prompt id."""
        entries = [json.loads(line)["entry"] for line in self.layout.journal(shard).read_bytes().splitlines()]
        return Counter(entry["id"] for entry in entries if entry["kind"] == "answer")

    def answered(self, *shards: str) -> int:
        paths = [self.layout.journal(shard) for shard in shards]
        return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())

    def check_whole(self, shard: str, prompts: int) -> None:
        """Each prompt was answered, and no answer was made twice."""
        assert len({record["id"] for record in self.records(shard)}) == prompts
        assert set(self.answers_in_journal(shard).values()) == {1}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with ExitStack() as stack:

        def made(
            speeds: Sequence[float],
            count: int,
            *,
            size: int = 1000,
            turns: int = 1,
            scale: float = 0.1,
            lengths: str = SHORT,
            flavor: str = "sglang",
            window: int = 16,
            **sections: Any,
        ) -> Node:
            servers = stack.enter_context(stand_ins(tmp_path, speeds, scale=scale, lengths=lengths, slots=SLOTS))
            write_prompts(tmp_path / "prompts.jsonl", count, turns=turns)
            sections = {"shards": {"size": size}, **sections}
            settings = settings_for(tmp_path, [one.url for one in servers], flavor=flavor, window=window, **sections)
            config = stack.enter_context(run_of(settings))
            return Node(servers, settings, config, stack)

        yield made


def eventually(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)
    return value


@contextmanager
def in_this_process(node: Node, shard: str = "00000") -> Iterator[list[dict[str, Any]]]:
    """A shard job whose constants a test has changed; its statistics are there at the end."""
    stats: list[dict[str, Any]] = []
    run = ShardRun(node.config, shard, MODEL_DIGEST)
    worker = threading.Thread(target=lambda: stats.append(run.run()))
    worker.start()
    try:
        yield stats
        worker.join(PATIENCE)
        assert not worker.is_alive()
    finally:
        run.answering.stop.set()
        worker.join(PATIENCE)


# Where requests go


def test_a_slow_server_gets_less_and_nobody_gets_a_long_queue(node: Callable[..., Node]):
    made = node([1.0, 1.0, 0.25], 240, size=80)
    jobs = made.start("00000", "00001", "00002")
    longest = 0
    while any(job.poll() is None for job in jobs):
        longest = max(longest, *(made.stats(server)["waiting"] for server in range(3)))
    made.results(jobs)
    received = [made.stats(server)["received"] for server in range(3)]
    probes = sum(received) - 240
    assert received[2] + probes < min(received[:2]), received
    assert 0 < longest <= 2, "an eighth of 8 slots is 1, and 2 is the least"
    for shard in ("00000", "00001", "00002"):
        made.check_whole(shard, 80)


def test_a_dead_server_gets_nothing_and_costs_no_answer(node: Callable[..., Node]):
    made = node([1.0, 1.0], 160, size=80)
    jobs = made.start("00000", "00001")
    eventually(lambda: made.answered("00000", "00001") > 10, "some answers")
    made.servers[1].process.kill()
    said = made.results(jobs)
    assert [one["answers"] for one in said] == [80, 80]
    for shard in ("00000", "00001"):
        made.check_whole(shard, 80)
    assert {record["server"] for record in made.records("00000")} == {"0", "1"}


def test_a_draining_server_answers_what_it_has(node: Callable[..., Node]):
    made = node([1.0, 1.0], 160)
    jobs = made.start("00000")
    eventually(lambda: made.answered("00000") > 10, "some answers")
    made.servers[1].process.send_signal(signal.SIGTERM)
    assert made.results(jobs)[0]["answers"] == 160
    made.check_whole("00000", 160)


def test_a_server_that_fails_is_rested_while_others_work(node: Callable[..., Node]):
    made = node([1.0, 1.0], 80)
    made.fault(1, {"error": {"after": 5}})
    assert made.finish("00000")[0]["answers"] == 80
    shown = made.stats(1)["statuses"]["500"]
    assert shown < 40, f"asked {shown} times in vain"
    made.check_whole("00000", 80)


def test_turns_of_a_conversation_stay_at_their_server(node: Callable[..., Node]):
    made = node([1.0, 1.0, 1.0], 90, size=45, turns=3, prompts={"turns": "all"})
    made.finish("00000", "00001")
    records = made.records("00000") + made.records("00001")
    servers = [{turn["server"] for turn in record["turns"]} for record in records]
    assert [len(record["turns"]) for record in records] == [3] * 90
    assert [len(one) for one in servers] == [1] * 90
    assert len(set.union(*servers)) == 3


def test_a_conversation_leaves_a_server_that_is_gone(node: Callable[..., Node]):
    made = node([1.0, 1.0], 60, turns=3, prompts={"turns": "all"})
    jobs = made.start("00000")
    eventually(lambda: made.answered("00000") > 30, "some answers")
    made.servers[1].process.kill()
    assert made.results(jobs)[0]["answers"] == 60
    assert all(len(record["turns"]) == 3 for record in made.records("00000"))


def test_engines_without_figures_get_a_fixed_window(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch):
    """Nothing is known of what runs there, so nothing is taken for lost either."""
    monkeypatch.setattr(pool, "LOST_AFTER", 0.2)
    made = node([1.0], 20, scale=0.5, flavor="openai", window=5, dispatch={"queue": 0})
    before = made.stats(0)["received"]
    most = 0
    with in_this_process(made) as stats:
        while not stats:
            now = made.stats(0)
            most = max(most, now["running"] + now["waiting"])
    assert most == 5
    assert made.stats(0)["received"] - before == 20


# Who goes first


def test_the_job_that_is_furthest_goes_first_and_none_starves():
    """With two jobs and 16 places, the sure part is 2."""
    assert ledger.is_due(0, 1000, [], 16)
    assert ledger.is_due(10, 400, [(4, 900)], 8), "the one ahead"
    assert not ledger.is_due(4, 900, [(10, 400)], 8), "the one behind"
    assert ledger.is_due(1, 900, [(14, 400)], 8), "what it is sure of"
    assert not ledger.is_due(14, 400, [(1, 900)], 8), "and the one ahead leaves it"
    assert ledger.is_due(8, 700, [(8, 700)], 8), "level: nobody is poorer"
    assert not ledger.is_due(9, 700, [(6, 700)], 8), "level: equal shares"


def test_a_job_that_does_not_ask_keeps_no_place(node: Callable[..., Node]):
    """A job stopped by SIGSTOP is ahead of the other for good; its places go to the other all the same."""
    made = node([1.0], 120, size=60)
    stopped, other = made.start("00000")[0], None
    eventually(lambda: made.answered("00000") > 5, "some answers")
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        other = made.start("00001")
        assert made.results(other)[0]["answers"] == 60
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert made.results([stopped])[0]["answers"] == 60


# Requests that get no answer


def test_requests_that_a_server_forgot_are_sent_again(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "LOST_AFTER", 2.0)
    made = node([1.0, 1.0], 40)
    before = [made.stats(server)["received"] for server in range(2)]
    made.fault(0, {"silent": {"count": 2}})
    with in_this_process(made) as stats:
        pass
    assert stats[0]["accepted"] == 40
    assert sum(made.stats(server)["received"] for server in range(2)) == sum(before) + 42
    made.check_whole("00000", 40)


def test_a_long_answer_is_waited_for(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch):
    """One request runs for longer than any patience, and is not sent again while its server works on it."""
    monkeypatch.setattr(pool, "LOST_AFTER", 0.3)
    made = node([1.0, 1.0], 4, scale=1.0, lengths="700,0.01,2000")
    before = sum(made.stats(server)["received"] for server in range(2))
    with in_this_process(made) as stats:
        pass
    assert stats[0]["seconds"] > 2 * pool.LOST_AFTER
    assert sum(made.stats(server)["received"] for server in range(2)) == before + 4


def view() -> ServerView:
    return ServerView(ServerPlace("0", "127.0.0.1", 1))


def status(at: float, *, running: int = 8, tokens: float | None = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "at": at,
        "answered_at": at,
        "state": "ready",
        "running": running,
        "queued": 0,
        "completion_tokens": tokens,
        **more,
    }


def test_a_forgotten_request_is_found_at_a_busy_server():
    """Its neighbours have had twice its longest answer, and the server shows one request fewer than it was sent."""
    for outstanding, lost in ((9, True), (8, False)):
        server = view()
        server.update(status(0), 0, outstanding)
        for second in range(1, 200):
            server.update(status(second, tokens=second * 80.0), second, outstanding)
        assert server.pace == pytest.approx(1990)
        assert server.lost(0, 0.0, 900) is lost
        assert not server.lost(0, 0.0, 1100), "its answer may be longer"
        assert not server.lost(150, 1500.0, 900), "it was sent later"


def test_an_idle_server_has_lost_what_it_was_sent_long_ago():
    server = view()
    for second in range(100):
        server.update(status(second, running=1), second, 1)
    assert not server.lost(0, 0.0, 10)
    idle = 100
    for second in range(idle, idle + int(pool.LOST_AFTER) + 2):
        assert not server.lost(0, 0.0, 10)
        server.update(status(second, running=0), second, 1)
    assert server.lost(0, 0.0, 10)
    assert not server.lost(idle + 5, 0.0, 10), "sent only now"


def test_old_figures_are_no_evidence():
    """A server that is too busy to say its load, or a supervisor that gets no time, once said: nothing running."""
    server = view()
    for second in range(100):
        server.update({**status(0, running=0), "at": second}, second, 1)
    assert not server.lost(0, 0.0, 10)


def test_a_restarted_engine_counts_from_zero():
    server = view()
    server.update(status(0, tokens=5000.0, instance=1), 0)
    server.update(status(1, tokens=10.0, instance=2), 1)
    server.update(status(2, tokens=90.0, instance=2), 2)
    assert server.pace == 10


def test_an_engine_that_counts_nothing_is_never_idle():
    server = view()
    for second in range(100):
        server.update(status(second, running=0, tokens=None), second, 3)
    assert not server.lost(0, 0.0, 1)


def test_a_hung_server_is_restarted_and_its_requests_go_elsewhere(tmp_path: Path):
    """Health answers, no token moves: its supervisor starts it anew after `servers.stall_after`."""
    python = fake_python.write(
        tmp_path, "0.5.23", "--standin-time-scale", "0.1", "--standin-lengths", SHORT, "--record", str(tmp_path / "r")
    )
    write_prompts(tmp_path / "prompts.jsonl", 300)
    settings = settings_for(tmp_path, [])
    with ExitStack() as stack:
        settings["engine"] = {
            "kind": "sglang",
            "sglang": {
                "python": str(python),
                "max_running_requests": SLOTS,
                "context_length": 40000,
                "reasoning_parser": "qwen3",
            },
        }
        settings["servers"] = {"count": 2, "port": free_ports(2), "stall_after": 4, "stop_timeout": 1}
        settings["sampling"] = {"max_tokens": 2000}
        config = stack.enter_context(run_of(settings))
        jobs = [start_job(settings, "00000")]
        stack.callback(jobs[0].wait)
        stack.callback(jobs[0].kill)
        journal = config.layout.journal("00000")
        eventually(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 10, "some answers")
        hung = Running(f"http://127.0.0.1:{config.servers.port}", jobs[0], journal)
        assert hung.call("POST", "/_standin/faults", json={"hang": True}).ok
        said = json.loads(jobs[0].communicate(timeout=PATIENCE)[0])
        assert (said["answers"], said["rejected"]) == (300, 0)
        eventually(lambda: (found := read_status(config.layout, "0")) and found.restarts == 1, "one restart")
        other = read_status(config.layout, "1")
        assert other and other.restarts == 0
    answers = Counter(
        json.loads(line)["entry"]["id"] for line in journal.read_bytes().splitlines() if b'"answer"' in line
    )
    assert set(answers.values()) == {1}


# The end of a run


@pytest.mark.parametrize("hedge", [True, False])
def test_last_requests_may_be_hedged(node: Callable[..., Node], hedge: bool, monkeypatch: pytest.MonkeyPatch):
    """Two servers, one of them hardly moving: with hedging, its requests are answered by the other."""
    monkeypatch.setattr(answering, "REFRESH_INTERVAL", 0.1)
    made = node([1.0, 0.02], 12, scale=0.2, dispatch={"hedge_last": hedge})
    sent_before = sum(made.stats(server)["received"] for server in range(2))
    with in_this_process(made) as stats:
        pass
    sent = sum(made.stats(server)["received"] for server in range(2)) - sent_before
    assert stats[0]["accepted"] == 12
    assert stats[0]["requests_sent"] == sent == 12 + stats[0]["requests_hedged"]
    made.check_whole("00000", 12)
    by_server = Counter(record["server"] for record in made.records("00000"))
    if hedge:
        assert stats[0]["requests_hedged"] > 0
        assert by_server["0"] > 6
        eventually(lambda: made.stats(1)["running"] == 0, "the losers are cut off")
    else:
        assert stats[0]["requests_hedged"] == 0
        assert by_server["1"] > 0
