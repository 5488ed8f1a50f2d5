"""The stand-in beside the real SGLang on CPU: the same requests, the same shapes, status codes and messages.

Needs the environment of build_env.py (`python tests/sglang/build_env.py`); without it everything here is skipped.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from . import build_env
from .servers import Running, real_sglang, standin, wait_for

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        not build_env.is_built(), reason="SGLang's CPU environment is not built: python tests/sglang/build_env.py"
    ),
]
OPTIONS = ("--served-model-name", "tiny", "--enable-metrics", "--max-total-tokens", "20000")
OPTIONS += ("--reasoning-parser", "qwen3", "--max-running-requests", "4", "--max-queued-requests", "6")
KEY = "a secret"
LONG = {"max_tokens": 1000, "ignore_eos": True}
Both = tuple[Running, Running]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """The real server and the stand-in, started with the same options."""
    logs = tmp_path_factory.mktemp("logs")
    own = ("--context-length", "4096", "--standin-lengths", "40,0.5,200", "--standin-step-ms", "2,0.3,0.01")
    with (
        real_sglang(logs / "real.log", *OPTIONS, api_key=KEY) as real,
        standin(logs / "standin.log", *OPTIONS, *own, api_key=KEY) as fake,
    ):
        yield real, fake


def shape(value: Any) -> Any:
    """Keys and types of a JSON value; a list has the shape of its first element."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    if isinstance(value, bool) or value is None:
        return value if value is None else "bool"
    return "number" if isinstance(value, int | float) else type(value).__name__


def missing(fake: Any, real: Any, where: str = "") -> list[str]:
    """What the stand-in offers and the real server does not, or offers with another type."""
    if isinstance(fake, dict) and isinstance(real, dict):
        return [
            line
            for key, value in fake.items()
            for line in (missing(value, real[key], f"{where}.{key}") if key in real else [f"{where}.{key}"])
        ]
    if isinstance(fake, list) and isinstance(real, list):
        return missing(fake[0], real[0], f"{where}[]") if fake and real else []
    return [] if fake == real else [f"{where}: {fake} against {real}"]


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info", "/model_info", "/v1/models", "/v1/loads"])
def test_what_the_standin_says_of_itself_is_said_by_the_real_one(both: Both, path: str) -> None:
    real, fake = (server.call("GET", path) for server in both)
    assert (real.status_code, fake.status_code) == (200, 200)
    found = missing(shape(fake.json()), shape(real.json()))
    # The settings that SGLang derives from the hardware are left as given in the stand-in.
    assert [line for line in found if "against" not in line] == []
    if path not in ("/server_info", "/get_server_info"):
        assert found == []


def test_the_facts_that_an_adapter_reads_have_the_same_values(both: Both) -> None:
    infos = [server.call("GET", "/server_info").json() for server in both]
    keys = ("version", "max_total_num_tokens", "max_req_input_len", "served_model_name", "api_key", "reasoning_parser")
    real, fake = ({key: info[key] for key in keys} for info in infos)
    assert fake == real
    states = [info["internal_states"][0]["effective_max_running_requests_per_dp"] for info in infos]
    assert states == [4, 4]
    assert [server.call("GET", "/v1/models").json()["data"][0]["max_model_len"] for server in both] == [4096, 4096]
    assert [server.call("GET", "/v1/loads").json()["loads"][0]["max_running_requests"] for server in both] == [4, 4]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"return_token_ids": True, "rid": "shard-1-prompt-2", "seed": 7, "top_k": 20, "min_p": 0.0},
        {"max_tokens": 2},
        {"separate_reasoning": False},
        {"model": "another name"},
        {"unknown": 1},
        {"max_tokens": None, "max_completion_tokens": 2},
    ],
    ids=str,
)
def test_completions_have_the_same_shape(both: Both, body: dict[str, Any]) -> None:
    answers = [server.chat(**body) for server in both]
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    real, fake = (answer.json() for answer in answers)
    assert shape(fake) == shape(real)
    one, other = real["choices"][0], fake["choices"][0]
    assert other["finish_reason"] == one["finish_reason"]
    assert fake["model"] == real["model"]
    assert ("</think>" in other["message"]["content"]) == ("</think>" in one["message"]["content"])
    if "rid" in body:
        assert fake["id"] == real["id"] == body["rid"]
    for answer in (real, fake):
        usage, choice = answer["usage"], answer["choices"][0]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        if body.get("return_token_ids"):
            assert len(choice["prompt_token_ids"]) == usage["prompt_tokens"]
            assert len(choice["response_token_ids"]) == usage["completion_tokens"]
        if body.get("max_tokens") == 2:
            assert usage["completion_tokens"] == usage["reasoning_tokens"] == 2
            assert choice["message"]["content"] == ""


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hello there " * 6000},
        {"prompt": "hello there " * 100, "max_tokens": 4000},
        {"max_tokens": 5000},
        {"max_tokens": -1},
        {"temperature": -1},
        {"messages": []},
        {"max_tokens": "many"},
        {"messages": None},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
    ],
    ids=lambda body: str(body)[:40],
)
def test_wrong_requests_are_refused_in_the_same_words(both: Both, body: dict[str, Any]) -> None:
    real, fake = (server.chat(**body) for server in both)
    assert fake.status_code == real.status_code == 400
    assert shape(fake.json()) == shape(real.json())
    assert [fake.json()[key] for key in ("object", "type", "code")] == [
        real.json()[key] for key in ("object", "type", "code")
    ]
    if real.json()["type"] == "BadRequestError":
        words = [re.sub(r"\d+(\.0)?", "N", answer.json()["message"]) for answer in (real, fake)]
        assert words[1] == words[0]
    else:
        assert all("validation error" in answer.json()["message"] for answer in (real, fake))


def test_what_is_not_a_chat_request_is_refused_alike(both: Both) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    asked: list[tuple[str, str, dict[str, Any]]] = [
        (
            "POST",
            "/v1/chat/completions",
            {"data": b'{"model": ', "headers": {**key, "Content-Type": "application/json"}},
        ),
        ("POST", "/v1/chat/completions", {"data": b'{"messages": []}', "headers": key}),
        ("GET", "/v1/chat/completions", {}),
        ("GET", "/nonsense", {}),
        ("GET", "/get_load", {}),
        ("GET", "/v1/models", {"headers": {}}),
        ("POST", "/v1/chat/completions", {"json": {}, "headers": {"Authorization": "Bearer wrong"}}),
        ("GET", "/health", {"headers": {}}),
        ("GET", "/metrics", {"headers": {}}),
        ("POST", "/flush_cache", {}),
    ]
    for method, path, kwargs in asked:
        real, fake = (server.call(method, path, **kwargs) for server in both)
        assert fake.status_code == real.status_code, (method, path, real.text, fake.text)
        if "json" in real.headers.get("content-type", ""):
            assert shape(fake.json()) == shape(real.json()), (method, path)
        elif path != "/metrics":
            assert fake.text == real.text, (method, path)


def test_a_full_queue_is_refused_and_the_rest_is_answered(both: Both) -> None:
    with ThreadPoolExecutor(16) as pool:
        for server in both:
            # Four running requests that stay for a while, then more than the queue takes.
            long = [pool.submit(server.chat, f"Count to {i}.", **LONG) for i in range(4)]
            wait_for(lambda: _load(server)["num_running_reqs"] == 4, 30, "4 running requests")  # noqa: B023
            rest = [pool.submit(server.chat, f"Count on to {i}.", max_tokens=2) for i in range(8)]
            refused = [answer.result() for answer in rest if answer.result().status_code == 503]
            assert len(refused) == 2
            message = {"object": "error", "message": "The request queue is full.", "type": "503", "param": None}
            assert [answer.json() for answer in refused] == [message | {"code": 503}] * 2
            assert all(answer.result().status_code == 200 for answer in long)


def _load(server: Running) -> dict[str, Any]:
    return server.call("GET", "/v1/loads").json()["loads"][0]


def test_metrics_of_the_standin_exist_with_their_type_and_labels(both: Both) -> None:
    for server in both:
        _abort_one(server)
    real, fake = (
        {
            sample.name: (family.type, frozenset(sample.labels) - {"pid"})
            for family in text_string_to_metric_families(server.call("GET", "/metrics").text)
            for sample in family.samples
        }
        for server in both
    )
    assert {name: value for name, value in fake.items() if real.get(name) != value} == {}
    needed = {
        "num_running_reqs",
        "num_queue_reqs",
        "gen_throughput",
        "generation_tokens_total",
        "realtime_tokens_total",
    }
    needed |= {"num_requests_total", "num_aborted_requests_total", "prompt_tokens_total", "spec_accept_length"}
    assert {f"sglang:{name}" for name in needed} <= set(fake)


def _abort_one(server: Running) -> dict[str, Any]:
    """Start a long request, abort it while it runs, and return the answer."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat, rid="job-7", **LONG)
        wait_for(lambda: _load(server)["num_running_reqs"] == 1, 30, "1 running request")
        assert server.call("POST", "/abort_request", json={"rid": "job"}).status_code == 200  # no such rid: nothing
        assert server.call("POST", "/abort_request", json={"rid": "job-7"}).status_code == 200
        done = answer.result()
        assert done.status_code == 200
        return done.json()


def test_an_aborted_request_ends_with_200_and_part_of_the_answer(both: Both) -> None:
    real, fake = (_abort_one(server) for server in both)
    for answer in (real, fake):
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert 0 < answer["usage"]["completion_tokens"] < 1000
    assert shape(fake)["usage"].keys() == shape(real)["usage"].keys()
    assert shape(fake)["choices"][0].keys() == shape(real)["choices"][0].keys()


def test_tokens_move_while_a_request_runs(both: Both) -> None:
    """A hung server is known by counters that stand still, so a healthy one's must move before the answer is there."""
    with ThreadPoolExecutor(1) as pool:
        for server in both:
            before = _decoded(server)
            answer = pool.submit(server.chat, **LONG)
            wait_for(lambda: _decoded(server) > before, 30, "tokens of a running request")  # noqa: B023
            assert not answer.done()
            assert answer.result().status_code == 200


def _decoded(server: Running) -> float:
    text = server.call("GET", "/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "sglang:realtime_tokens_total" and sample.labels["mode"] == "decode"
    )


def test_a_dead_scheduler_takes_the_server_with_it(both: Both) -> None:
    """Last in this file: both servers are gone afterwards."""
    real, fake = both
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(server.chat, **LONG) for server in both]
        for server in both:
            wait_for(lambda: _load(server)["num_running_reqs"] == 1, 30, "1 running request")  # noqa: B023
        fake.call("POST", "/_standin/faults", json={"crash": True})
        with pytest.raises(requests.ConnectionError):
            fake.chat()
        family = psutil.Process(real.process.pid).children(recursive=True)
        next(member for member in family if "sglang::scheduler" in " ".join(member.cmdline())).kill()
        for answer in answers:
            with pytest.raises(requests.ConnectionError):
                answer.result()
    for server in both:
        wait_for(lambda: server.process.poll() is not None, 30, "the end of the process")  # noqa: B023
        assert server.process.returncode == -signal.SIGKILL
        assert re.search(r"Subprocess scheduler_0 \(pid=\d+\) crashed with exit code -9", server.log.read_text())
