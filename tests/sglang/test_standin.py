"""The stand-in by itself: answers that can be derived again, batching, caps, versions, and every fault."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from . import answers, launch
from .batch import Batch, Job
from .servers import Running, standin, wait_for

FAST = ("--reasoning-parser", "qwen3", "--enable-metrics", "--standin-time-scale", "0.001")
FAST += ("--standin-lengths", "60,0.5,400")
LENGTHS = answers.Lengths(60, 0.5, 400, 0.6)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with standin(tmp_path_factory.mktemp("log") / "log", *FAST) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """One stand-in for most tests; each begins and ends without faults."""
    yield shared
    shared.call("POST", "/_standin/faults", json={}).raise_for_status()


def faults(server: Running, **wanted: Any) -> None:
    server.call("POST", "/_standin/faults", json=wanted).raise_for_status()


def message(answer: requests.Response) -> dict[str, Any]:
    return answer.json()["choices"][0]["message"]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("most", [1, 5, 20, 4000])
def test_a_checker_derives_every_answer_again(server: Running, thinking: bool, most: int) -> None:
    for seed in (None, 1, 2):
        body = {"seed": seed, "chat_template_kwargs": {"enable_thinking": thinking}, "return_token_ids": True}
        got = server.chat("Why?", max_tokens=most, **body).json()
        asked = [{"role": "user", "content": "Why?"}]
        known = answers.expected(asked, seed=seed, thinking=thinking, max_tokens=most, lengths=LENGTHS)
        choice = got["choices"][0]
        assert choice["message"]["content"] == known.content
        assert choice["message"]["reasoning_content"] == known.reasoning
        assert choice["finish_reason"] == known.finish
        assert choice["response_token_ids"] == known.token_ids
        assert got["usage"]["completion_tokens"] == known.completion_tokens == len(known.token_ids) <= most
        assert got["usage"]["reasoning_tokens"] == known.reasoning_tokens


def test_answers_differ_by_prompt_seed_and_mode_and_not_by_the_rest(server: Running) -> None:
    first = message(server.chat("Why?", seed=1, temperature=0.5, rid="a", model="b"))
    assert message(server.chat("Why?", seed=1)) == first
    others = [server.chat("Why not?", seed=1), server.chat("Why?", seed=2)]
    others.append(server.chat("Why?", seed=1, chat_template_kwargs={"enable_thinking": False}))
    assert all(message(other)["content"] != first["content"] for other in others)


def test_lengths_follow_the_distribution() -> None:
    keys = [answers.key_of([{"role": "user", "content": str(i)}], 1, True) for i in range(20000)]
    lengths = [answers.plan(key, True, answers.Lengths(600, 0.6, 10**6), 10**9).tokens for key in keys]
    assert abs(sum(lengths) / len(lengths) / 600 - 1) < 0.03
    assert max(lengths) > 3000
    assert min(lengths) < 200


def test_batch_time_is_exact_however_late_the_clock_comes() -> None:
    """Two jobs of 100 and 300 tokens: 100 steps of two at 3 s, then 200 steps of one at 2 s."""
    done: list[str] = []
    batch = Batch(
        capacity=2, pool=10**6, base=1.0, per_job=1.0, prefill=0.0, on_finish=lambda job: done.append(job.payload)
    )
    for name, tokens in (("short", 100), ("long", 300), ("waits", 10)):
        batch.add(Job(name, tokens, 7), 0.0)
    assert (len(batch.running), len(batch.waiting)) == (2, 1)
    assert batch.next_finish() == pytest.approx(300)
    batch.advance(150.0)
    assert (batch.tokens_total(), batch.tokens_held()) == (100, 2 * 7 + 100)
    batch.advance(299.9)
    assert done == []
    batch.advance(331.0)  # "waits" took the place of "short" at 300 and is done at 330
    assert done == ["short", "waits"]
    batch.advance(10_000.0)
    assert done == ["short", "waits", "long"]
    assert batch.tokens_total() == 410
    assert batch.tokens_held() == 0


@pytest.mark.parametrize(
    ("options", "effective"),
    [
        ([], 4096),
        (["--max-running-requests", "256"], 256),
        (["--speculative-algorithm", "NEXTN"], 48),
        (["--speculative-algorithm", "EAGLE", "--max-running-requests", "256"], 256),
        (["--standin-hybrid-slots", "90", "--max-running-requests", "256"], 30),
        (["--standin-hybrid-slots", "90", "--max-running-requests", "256", "--disable-radix-cache"], 90),
        (["--standin-hybrid-slots", "90", "--speculative-algorithm", "EAGLE"], 30),
    ],
    ids=str,
)
def test_caps_are_what_sglang_makes_of_the_options(options: list[str], effective: int) -> None:
    for version in launch.VERSIONS:
        args = launch.parse(["--model-path", "m", "--standin-version", version, *options])
        lines = "\n".join(launch.resolve(args))
        assert args.effective == effective
        silent = "--speculative-algorithm" in options and "--max-running-requests" not in options
        assert ("reset to 48" in lines) == silent
        assert ("mamba state cache" in lines) == (version == "0.5.23" and "--standin-hybrid-slots" in options)


def test_options_of_another_version_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    old, new = ["--mamba-scheduler-strategy", "extra_buffer"], ["--mamba-radix-cache-strategy", "extra_buffer"]
    launch.parse(["--model-path", "m", "--standin-version", "0.5.11", *old])
    launch.parse(["--model-path", "m", *new])
    for wrong in (["--standin-version", "0.5.11", *new], old, ["--no-such-option"], ["--port", "x"]):
        with pytest.raises(SystemExit) as ended:
            launch.parse(["--model-path", "m", *wrong])
        assert ended.value.code == 2
        assert "error: " in capsys.readouterr().err


def test_the_older_version_has_its_own_shapes(tmp_path: Path) -> None:
    options = ("--standin-version", "0.5.11", "--speculative-algorithm", "EAGLE")
    with standin(tmp_path / "log", *FAST, *options) as server:
        answer = server.chat(max_tokens=2, return_token_ids=True).json()
        assert answer["choices"][0]["message"]["content"] is None
        assert answer["choices"][0]["message"]["tool_calls"] is None
        assert "response_token_ids" not in answer["choices"][0]
        assert server.call("GET", "/get_load").json()[0]["num_reqs"] == 0
        assert server.call("GET", "/v1/loads").json()["aggregate"]["total_reqs"] == 0
        info = server.call("GET", "/server_info").json()
        assert info["version"] == "0.5.11"
        assert info["internal_states"][0]["avg_spec_accept_length"] == pytest.approx(3.6)


def test_faults_in_the_answer(server: Running) -> None:
    good = server.chat("Why?", seed=1).json()
    known, usage = good["choices"][0]["message"], good["usage"]

    def with_fault(**wanted: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
        faults(server, **wanted)
        answer = server.chat("Why?", seed=1)
        assert answer.status_code == 200
        choice = answer.json()["choices"][0]
        return choice["finish_reason"], choice["message"], answer.json()["usage"]

    finish, got, _ = with_fault(empty=True)
    assert (finish, got["content"], got["reasoning_content"]) == ("stop", "", known["reasoning_content"])
    finish, got, spent = with_fault(no_reasoning=True)
    assert (got["content"], got["reasoning_content"], spent["reasoning_tokens"]) == (known["content"], None, 0)
    _, got, _ = with_fault(raw_tags=True)
    assert got["reasoning_content"] is None
    assert got["content"] == f"<think>\n{known['reasoning_content']}\n</think>{known['content']}"
    _, got, _ = with_fault(misplaced=True)
    assert (got["content"], got["reasoning_content"]) == (None, known["content"])
    finish, got, spent = with_fault(loop=True)
    assert (finish, spent["completion_tokens"], got["content"]) == ("length", 400, "")
    assert got["reasoning_content"].count(answers.LOOP) > 50
    finish, got, spent = with_fault(short={"tokens": 5})
    assert (finish, spent["completion_tokens"]) == ("length", 5)
    assert known["reasoning_content"].startswith(got["reasoning_content"])
    finish, got, spent = with_fault(abort=True)
    assert (finish, spent["completion_tokens"]) == ("abort", usage["completion_tokens"] // 2)
    _, _, spent = with_fault(under_report=True)
    assert spent["prompt_tokens"] == usage["prompt_tokens"] // 2
    finish, got, spent = with_fault(boilerplate=True)
    assert (finish, got["content"], spent["completion_tokens"]) == ("stop", answers.BOILERPLATE, 6)
    _, got, _ = with_fault(corrupt=True)
    words = known["reasoning_content"].split(" ")
    assert got["reasoning_content"].split(" ") == [word for i, word in enumerate(words, 1) if i % 5]
    assert with_fault()[1] == known


def test_faults_instead_of_an_answer(server: Running) -> None:
    faults(server, refuse=True)
    assert (server.chat().status_code, server.chat().json()["message"]) == (503, "The request queue is full.")
    faults(server, error={"status": 502})
    assert server.chat().status_code == 502
    faults(server, reset=True)
    with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
        server.chat()
    faults(server, silent=True)
    with pytest.raises(requests.Timeout):
        server.chat(timeout=0.3)
    assert server.call("GET", "/v1/loads").json()["loads"][0]["num_running_reqs"] == 0
    faults(server, unhealthy=True)
    assert server.call("GET", "/health").status_code == 503
    assert server.chat().status_code == 200
    faults(server)
    assert server.call("GET", "/health").status_code == 200


def test_faults_choose_their_requests(server: Running) -> None:
    faults(server, refuse={"match": "poison", "count": 2})
    asked = ["poison", "bread", "more poison", "poison again"]
    assert [server.chat(prompt).status_code for prompt in asked] == [503, 200, 503, 200]
    seen = server.call("GET", "/_standin/stats").json()["received"]
    faults(server, refuse={"after": seen + 2})
    assert [server.chat().status_code for _ in range(4)] == [200, 200, 503, 503]
    faults(server, refuse={"rate": 0.5})
    refused = [server.chat().status_code for _ in range(60)].count(503)
    assert 10 < refused < 50


@pytest.mark.parametrize(
    "wrong", [{"nonsense": True}, {"refuse": {"often": 1}}, {"refuse": {"rate": "x"}}, {"poison": {}}]
)
def test_a_fault_that_does_not_exist_is_refused(server: Running, wrong: dict[str, Any]) -> None:
    assert server.call("POST", "/_standin/faults", json=wrong).status_code == 400


def test_a_hung_server_looks_healthy_and_stands_still(server: Running) -> None:
    def decoded() -> float:
        families = text_string_to_metric_families(server.call("GET", "/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return sum(
            s.value for s in samples if s.name == "sglang:realtime_tokens_total" and s.labels["mode"] == "decode"
        )

    server.chat()
    faults(server, hang=True)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat)
        before = decoded()
        wait_for(lambda: server.call("GET", "/_standin/stats").json()["running"] == 1, 10, "the request")
        first, second = (server.call("GET", "/v1/loads").json()["loads"][0]["timestamp"] for _ in range(2))
        assert first == second
        assert server.call("GET", "/health").status_code == 200
        with pytest.raises(requests.Timeout):
            server.call("GET", "/server_info", timeout=0.3)
        assert decoded() == before
        assert not answer.done()
        faults(server)
        assert answer.result().status_code == 200
    assert decoded() > before


def test_a_poisonous_prompt_kills_the_server(tmp_path: Path) -> None:
    options = ("--standin-faults", json.dumps({"poison": {"match": "hemlock"}}), "--record", str(tmp_path / "record"))
    with standin(tmp_path / "log", *FAST, *options) as server:
        assert server.chat("bread").status_code == 200
        with pytest.raises(requests.ConnectionError):
            server.chat("bread with hemlock")
        assert server.process.wait(10) == -signal.SIGKILL
    lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    assert [(line["event"], line["number"]) for line in lines] == [("received", 1), ("finished", 1), ("received", 2)]
    assert lines[0]["key"] == answers.key_of([{"role": "user", "content": "bread"}], None, True).hex()


def test_a_crash_after_n_requests_and_a_drain_that_waits(tmp_path: Path) -> None:
    crash = ("--standin-faults", json.dumps({"crash": {"after": 3}}))
    with standin(tmp_path / "one", *FAST, *crash) as server:
        assert [server.chat().status_code for _ in range(3)] == [200, 200, 200]
        with pytest.raises(requests.ConnectionError):
            server.chat()
        assert server.process.wait(10) == -signal.SIGKILL
    with standin(tmp_path / "two", *FAST, "--standin-step-ms", "1000,0,0") as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat, max_tokens=400, ignore_eos=True)
        wait_for(lambda: server.call("GET", "/_standin/stats").json()["running"] == 1, 10, "the request")
        server.process.terminate()
        wait_for(lambda: server.call("GET", "/health").status_code == 503, 10, "draining")
        assert answer.result().json()["usage"]["completion_tokens"] == 400
        assert server.process.wait(10) == 0


def test_a_client_that_goes_away_frees_its_place(tmp_path: Path) -> None:
    with standin(tmp_path / "log", *FAST, "--standin-step-ms", "100000,0,0", "--record", str(tmp_path / "r")) as server:
        with pytest.raises(requests.Timeout):
            server.chat(timeout=0.2)
        wait_for(lambda: server.call("GET", "/v1/loads").json()["loads"][0]["num_running_reqs"] == 0, 10, "no request")
        last = json.loads((tmp_path / "r").read_text().splitlines()[-1])
        assert (last["event"], last["finish_reason"]) == ("finished", "disconnected")
