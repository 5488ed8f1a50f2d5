"""The adapter for SGLang against the stand-in, launched by the same words as the real one: what CPU cannot show."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from shardmill.config import Config
from shardmill.engines.base import Answer, Fault, ServerPlace
from shardmill.engines.sglang import SGLang, read_metrics, served_name
from shardmill.engines.sglang_flags import KNOWN_VERSIONS, FlagTable, recorded_flags
from shardmill.errors import UserError
from shardmill.load_config import load_config
from shardmill.place import prepare
from tests.pipeline import Workspace

from .pools import KEY, Server, eventually, one_server
from .servers import standin
from .workspaces import standin_workspace

SPECULATIVE = {"algorithm": "EAGLE", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
QUICK = ("--standin-lengths", "120,0.3,400", "--standin-time-scale", "0.1")
Make = Callable[..., Workspace]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def new(*options: str, **settings: Any) -> Workspace:
        return standin_workspace(tmp_path / "work", *QUICK, *options, **settings)

    return new


def refusal(workspace: Workspace, **sections: Any) -> str:
    """Why the server does not become ready."""
    with pytest.raises(UserError) as caught, one_server(workspace, **sections):
        pass
    return str(caught.value)


def fault(server: Server, **body: Any) -> Fault:
    result = server.ask(**body)
    assert isinstance(result, Fault), result
    return result


def set_faults(server: Server, faults: dict[str, Any]) -> None:
    requests.post(f"{server.place.url}/_standin/faults", json=faults, timeout=10).raise_for_status()


# Boot


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_a_server_says_what_it_is(make: Make, version: str) -> None:
    # The newer name of the flag is understood for the older version.
    mamba = {"radix_cache_strategy": "extra_buffer"}
    workspace = make(version=version, sglang={"speculative": SPECULATIVE, "mamba": mamba, "tool_call_parser": "qwen25"})
    with one_server(workspace) as server:
        facts = server.facts
        assert facts["version"] == version and server.lease.engine["version"] == f"sglang {version}"
        assert facts["context_length"] == 32768 and facts["effective_max_running_requests"] == 8
        assert facts["reasoning_parser"] == "qwen3" and facts["speculative_algorithm"] == "EAGLE"
        assert facts["chat_template_sha256"] and facts["tool_call_parser"] == "qwen25"
        assert facts["one_request_alone"]["finish_reason"] == "stop"
        assert facts["one_request_alone"]["tokens_per_second"] > 100
        assert facts["one_request_alone"]["acceptance_length"] == pytest.approx(3.6)
        old = version == "0.5.11"
        assert facts["mamba_scheduler_strategy" if old else "mamba_radix_cache_strategy"] == "extra_buffer"
        assert server.lease.capacity == server.status.capacity == 8
        answer = server.ask()
        assert isinstance(answer, Answer) and answer.content.strip() and answer.reasoning_content
        if old:
            assert answer.completion_token_ids is None
        else:
            assert len(answer.completion_token_ids or []) == answer.usage["completion_tokens"]
            assert len(answer.prompt_token_ids or []) == answer.usage["prompt_tokens"]
        # The key lies in one place, and the file that brought it to the server is gone.
        for path in server.layout.root.rglob("*"):
            assert path == server.layout.api_key or not path.is_file() or KEY.encode() not in path.read_bytes(), path
        assert not server.layout.server_secret("0").exists()
        assert requests.get(f"{server.place.url}/v1/models", timeout=10).status_code == 401


def test_fewer_running_requests_than_asked_for_is_an_error_with_its_cause(make: Make) -> None:
    text = refusal(make("--standin-hybrid-slots", "18", sglang={"speculative": SPECULATIVE}))
    assert "it runs 6 requests at once, not 8 (engine.sglang.max_running_requests): its log says: " in text
    assert "max_running_requests is capped to 6 by the mamba state cache" in text


def test_0_5_11_does_not_log_the_state_pool_but_the_cause_is_found(make: Make) -> None:
    text = refusal(make("--standin-hybrid-slots", "18", version="0.5.11", sglang={"speculative": SPECULATIVE}))
    assert "it runs 6 requests at once, not 8" in text and "the state pool of this hybrid model has 18 slots" in text


def test_fewer_running_requests_may_be_only_a_warning(make: Make) -> None:
    with one_server(make("--standin-hybrid-slots", "18", sglang={"on_reduced_capacity": "warn"})) as server:
        assert server.lease.capacity == server.status.capacity == 6
        assert "it runs 6 requests at once, not 8" in server.facts["warnings"][0]
        assert "WARNING" in server.supervisor_log() and "capped to 6" in server.supervisor_log()


def test_without_the_prefix_cache_a_request_takes_one_state(make: Make) -> None:
    with one_server(make("--standin-hybrid-slots", "18", sglang={"disable_radix_cache": True})) as server:
        assert server.lease.capacity == 8 and "warnings" not in server.facts


def test_speculation_lowers_an_unset_limit_to_48_and_that_is_said(make: Make) -> None:
    workspace = make(sglang={"speculative": SPECULATIVE, "max_running_requests": None})
    with one_server(workspace) as server:
        assert server.lease.capacity == 48
        assert "SGLang lowers this to 48 with speculative decoding" in server.facts["warnings"][0]


def test_a_context_shorter_than_the_answers_is_refused(make: Make) -> None:
    text = refusal(make(sglang={"context_length": None}), sampling={"max_tokens": 40000})
    assert "sampling.max_tokens is 40000, but the server's context is 32768 tokens" in text


def test_a_kv_cache_smaller_than_the_answers_is_refused(make: Make) -> None:
    text = refusal(make(sglang={"max_total_tokens": 1000}), sampling={"max_tokens": 2000})
    assert "the KV cache holds only 1000 tokens" in text


# The thinking contract


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        ('{"no_reasoning": true}', "there is no thought"),
        ('{"raw_tags": true}', "opens with <think>"),
        ('{"empty": true}', "and no answer|no text"),
        ('{"misplaced": true}', "a thought of [0-9]+ characters and no answer"),
        ('{"loop": true}', "cut off inside the thought|the thought repeats"),
    ],
)
def test_a_server_that_does_not_think_does_not_become_ready(make: Make, faults: str, why: str) -> None:
    text = refusal(make("--standin-faults", faults), sampling={"max_tokens": 900})
    assert "thinking.enabled is true, but 3 answers in a row were not a thought, an answer and an end" in text
    assert re.search(why, text) and "engine.sglang.reasoning_parser" in text and "\n" not in text


def test_thinking_off_is_proven_too(make: Make) -> None:
    with one_server(make(), thinking={"enabled": False}) as server:
        answer = server.ask()
        assert isinstance(answer, Answer) and not answer.reasoning_content and answer.content.strip()
    # A template that does not know the switch thinks on.
    text = refusal(make(), thinking={"enabled": False, "template_key": "think"})
    assert "thinking.enabled is false, but 3 answers in a row were not plain answers" in text
    assert "thinking.template_key is 'think'" in text


def test_one_bad_draw_says_nothing_of_a_server(make: Make) -> None:
    # The first request is the readiness probe's, the next two break the contract, the third keeps it.
    with one_server(make("--standin-faults", '{"no_reasoning": {"after": 1, "count": 2}}')) as server:
        assert server.facts["one_request_alone"]["finish_reason"] == "stop"


@pytest.mark.parametrize("action", ["warn", "error"])
def test_what_a_server_should_reach(make: Make, action: str) -> None:
    expect = {"tokens_per_second": 1e6, "acceptance_length": 3.9, "action": action}
    workspace = make(sglang={"speculative": SPECULATIVE})
    if action == "error":
        text = refusal(workspace, servers={"expect": expect})
    else:
        with one_server(workspace, servers={"expect": expect}) as server:
            text = " ".join(server.facts["warnings"])
    assert "less than servers.expect.tokens_per_second (1e+06)" in text
    assert "acceptance_length 3.6, less than servers.expect.acceptance_length (3.9)" in text


@pytest.mark.parametrize("parser", ["qwen3", None])
def test_servers_that_run_already_are_checked_the_same_way(make: Make, tmp_path: Path, parser: str | None) -> None:
    options = ["--reasoning-parser", parser] if parser else []
    with standin(tmp_path / "external.log", *options, "--enable-metrics", *QUICK) as running:
        engine = {"kind": "external", "external": {"urls": [running.url], "flavor": "sglang"}}
        if parser is None:
            assert "the server has no reasoning parser, so thoughts would stand" in refusal(make(), engine=engine)
        else:
            with one_server(make(), engine=engine) as server:
                assert (
                    server.facts["version"] == "0.5.23" and server.facts["one_request_alone"]["finish_reason"] == "stop"
                )
                assert server.lease.capacity and isinstance(server.ask(), Answer)
        assert running.process.poll() is None, "it is not ours to stop"


# Faults


def test_faults_are_told_apart(make: Make) -> None:
    with one_server(make(), quality={"retries": 0}) as server:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"prompt": "word " * 200_000}, "too_long"),
            ({"max_tokens": 32768}, "too_long"),
            ({"temperature": -1}, "bad_request"),
            # What a request holds does not decide what its fault is.
            (
                {"messages": [{"role": "wizard", "content": "the template is too long for the context length"}]},
                "bad_request",
            ),
            ({"messages": []}, "bad_request"),
        ]
        for body, kind in cases:
            found = fault(server, **body)
            assert (found.kind, found.is_final) == (kind, True), (body, found)
            assert "/site-packages/" not in found.message and "\n" not in found.message
        for faults, kind in [
            ({"refuse": True}, "queue_full"),
            ({"error": {"status": 500}}, "server_error"),
            ({"error": {"status": 502}}, "server_error"),
            ({"abort": True}, "aborted"),
        ]:
            set_faults(server, faults)
            found = fault(server)
            assert (found.kind, found.is_final) == (kind, False), (faults, found)
        set_faults(server, {"reset": True})
        with pytest.raises(requests.RequestException):
            server.ask()
        set_faults(server, {"short": {"tokens": 8}})
        answer = server.ask(max_tokens=100)
        assert isinstance(answer, Answer) and answer.finish_reason == "length"
        assert answer.usage["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("The input (12002 tokens) is longer than the model's context length (4096 tokens).", "too_long"),
        ("Requested token count exceeds the model's maximum context length of 4096 tokens. You requested", "too_long"),
        ("No user query found in messages.", "template_error"),
        ("System message must be at the beginning.", "template_error"),
        ("'dict object' has no attribute 'name'", "template_error"),
        ("temperature must be a non-negative finite number, got -1.0.", "bad_request"),
        (
            "1 validation error:\\n {'input': 'template context length'}\\n\\n  File \\\"/x/http_server.py\\\", line 1",
            "bad_request",
        ),
    ],
)
def test_what_a_400_means(message: str, kind: str) -> None:
    body = f'{{"object":"error","message":"{message}","type":"BadRequestError","code":400}}'.encode()
    found = SGLang().read_answer(400, body)
    assert isinstance(found, Fault) and found.kind == kind and found.is_final and "http_server.py" not in found.message


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": {}}]}'])
def test_an_answer_that_is_none_is_malformed(body: bytes) -> None:
    found = SGLang().read_answer(200, body)
    assert isinstance(found, Fault) and found.kind == "malformed_answer" and not found.is_final


# Load


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_load_is_read_while_requests_run(make: Make, version: str) -> None:
    slow = ("--standin-time-scale", "1", "--standin-lengths", "200,0.1,400")
    with one_server(make(*slow, version=version, sglang={"speculative": SPECULATIVE})) as server:
        before = SGLang().load(server.place, timeout=5)
        assert before and before.running == before.queued == 0
        threads = [threading.Thread(target=server.ask, args=(f"Question {n}?",)) for n in range(11)]
        for thread in threads:
            thread.start()
        load = eventually(
            lambda: (now := SGLang().load(server.place, timeout=5)) and now.queued == 3 and now, "a queue"
        )
        assert load.running == 8 and load.details["acceptance_length"] == pytest.approx(3.6)
        assert load.capacity == (None if version == "0.5.11" and load.capacity is None else 8)
        for thread in threads:
            thread.join()
        after = eventually(lambda: (now := SGLang().load(server.place, timeout=5)) and not now.running and now, "idle")
        assert after.completion_tokens > (before.completion_tokens or 0) and after.prompt_tokens > before.prompt_tokens


def test_metrics_of_further_ranks_are_not_counted_twice() -> None:
    text = "".join(
        f'sglang:num_running_reqs{{tp_rank="{tp}",dp_rank="{dp}"}} 5.0\n'
        f'sglang:realtime_tokens_total{{tp_rank="{tp}",dp_rank="{dp}",mode="decode"}} 100.0\n'
        for tp in (0, 1)
        for dp in (0, 1)
    )
    text += 'sglang:token_usage{tp_rank="0"} NaN\nother{x="1"} 3\n'
    assert read_metrics(text) == {"num_running_reqs": 10.0, "realtime_tokens_total/decode": 200.0}
    assert read_metrics("sglang:num_running_reqs{tp_rank= 1\n") == {}


def test_request_ids_are_unique_and_none_begins_another(make: Make) -> None:
    config = load_config(make().settings)
    rids = {SGLang().request_body(config, [], None, 1, {})["rid"] for _ in range(1000)}
    assert len(rids) == 1000 and {len(rid) for rid in rids} == {32}


# Flags and versions


def settings(**sglang: Any) -> dict[str, Any]:
    return {
        "prompts": {"path": "p"},
        "model": {"source": "hf://a/B-1.5:x@main"},
        "engine": {"kind": "sglang", "sglang": {"reasoning_parser": "qwen3", **sglang}},
        "servers": {"gpus": [0, 1, 2, 3], "gpus_per_server": 2},
        "sampling": {"max_tokens": 64},
    }


def words(version: str, **sglang: Any) -> list[str]:
    config = load_config(settings(**sglang))
    return SGLang().launch_as(config, ServerPlace("1", "127.0.0.1", 30001, ("2", "3")), Path("/m"), version).command


def test_a_server_of_several_gpus_is_one_tensor_parallel_group() -> None:
    command = words("0.5.23")
    assert command[command.index("--tp-size") + 1] == "2" and command[command.index("--nccl-port") + 1] == "28501"
    assert command[command.index("--served-model-name") + 1] == "B-1.5-x"  # a colon would name an adapter
    assert served_name(load_config(settings())) == "B-1.5-x"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"enable-mixed-chunks": True}, "has no flag --enable-mixed-chunks, did you mean --enable-mixed-chunk?"),
        ({"page-size": True}, "--page-size takes a value, not true"),
        ({"enable-mixed-chunk": 3}, "--enable-mixed-chunk is a switch; write `true`, not 3"),
        ({"page-size": [1, 2]}, "--page-size takes one value, not 2"),
    ],
)
def test_flags_that_a_version_does_not_take_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        words("0.5.23", arguments=arguments)


def test_every_wrong_flag_is_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        words("0.5.11", arguments={"no-such": 1}, kv_cache_dtype="fp9", reasoning_parser="inkling")
    text = str(caught.value)
    assert "no flag --no-such" in text and "--kv-cache-dtype does not take 'fp9'" in text
    assert (
        "--reasoning-parser does not take 'inkling' in SGLang 0.5.11" in text and "engine.sglang.kv_cache_dtype" in text
    )


@pytest.mark.parametrize(
    ("version", "name"), [("0.5.11", "mamba-scheduler-strategy"), ("0.5.23", "mamba-radix-cache-strategy")]
)
def test_renamed_flags_follow_the_version(version: str, name: str) -> None:
    command = words(version, mamba={"radix_cache_strategy": "extra_buffer"}, arguments={"cuda-graph-max-bs": 64})
    assert command[command.index(f"--{name}") + 1] == "extra_buffer"
    assert ("--cuda-graph-max-bs-decode" in command) == (version == "0.5.23")


def test_values_are_written_as_the_parser_reads_them() -> None:
    command = words(
        "0.5.23",
        chunked_prefill_size=-1,
        arguments={"cuda-graph-bs": [1, 2, 4], "model-loader-extra-config": {"a": 1}, "log-requests": False},
    )
    assert "--chunked-prefill-size=-1" in command and "--log-requests" not in command
    at = command.index("--cuda-graph-bs-decode")
    assert command[at + 1 : at + 4] == ["1", "2", "4"] and '{"a":1}' in command


@pytest.mark.parametrize(
    ("sglang", "text"),
    [
        ({"arguments": {"--page-size": 1}}, "write flags without leading dashes"),
        (
            {"arguments": {"context-length": 1}},
            "`context-length` has its own setting; write `engine.sglang.context_length`",
        ),
        ({"arguments": {"allow-auto-truncate": True}}, "cuts off the end of long prompts"),
        ({"arguments": {"api-key": "x"}}, "`api-key` cannot be set"),
        ({"nccl_port": 30001}, r"engine.sglang.nccl_port: the ports 30001 to 30002 are among those of `servers.port`"),
        ({"speculative": {"num_steps": 3}}, "engine.sglang.speculative.algorithm: is left out although `num_steps`"),
        ({"speculative": {"algorithm": "MTP"}}, "SGLang knows no `MTP`; write `EAGLE`"),
        (
            {"speculative": {"algorithm": "EAGLE", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 8}},
            "a chain (`eagle_topk: 1`) of 3 steps verifies 4 tokens",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_runs(sglang: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        load_config(settings(**sglang))


def test_thinking_needs_a_reasoning_parser() -> None:
    with pytest.raises(UserError, match=r"engine\.sglang\.reasoning_parser: is left out although `thinking.enabled`"):
        load_config(settings(reasoning_parser=None) | {"thinking": {"enabled": True}})


def test_the_version_is_asked_of_the_package(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def launch(workspace: Workspace) -> Config:
        config = load_config(workspace.settings)
        prepare(config, ServerPlace("0", "127.0.0.1", 30000), Path("/m"))
        return config

    with pytest.raises(UserError, match=r"engine\.sglang\.version: is 0\.5\.23, but .* has 0\.5\.11; install 0\.5\.23"):
        launch(make(version="0.5.11", sglang={"version": "0.5.23"}))
    config = launch(make(version="0.5.98"))
    assert "SGLang 0.5.98 is unknown here (known: 0.5.11, 0.5.23)" in caplog.text
    kept = list((Path(config.run.results) / ".cache").glob("sglang-flags-0.5.98-*.json"))
    assert len(kept) == 1, "its --help is read once and kept"
    caplog.clear()
    launch(make(version="0.5.98"))
    assert "unknown" not in caplog.text and "reading the launch flags" not in caplog.text


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false", "/bin/true"])
def test_a_python_without_sglang_is_said(tmp_path: Path, python: str) -> None:
    config = load_config(settings(python=python))
    with pytest.raises(UserError, match=r"(there is no such Python|has no SGLang .*); name a Python that has SGLang"):
        SGLang().launch(config, ServerPlace("0", "127.0.0.1", 30000), tmp_path)


def test_help_that_is_not_sglangs_is_not_believed() -> None:
    assert FlagTable.from_help("1", "usage: x\n  --model-path M  the model\n") is None
    table = recorded_flags("0.5.23")
    assert FlagTable.from_json(table.to_json()) == table and FlagTable.from_json({"flags": 3}) is None


def test_of_a_dead_servers_log_the_telling_lines_are_picked() -> None:
    log = """[2026-11-30 10:12:00] server_args=ServerArgs(model_path='m', abort_on_priority=False, error='failed')
[2026-11-30 10:12:01 TP0] SGLANG_CPU_OMP_THREADS_BIND is set. You need ... to avoid the out-of-memory error.
[2026-11-30 10:12:01] OpenAI Responses API (/v1/responses) disabled: init failed (ModuleNotFoundError: No module)
[2026-11-30 10:12:02 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
[2026-11-30 10:12:03] Subprocess scheduler_0 (pid=9) crashed with exit code -9. Triggering SIGQUIT for cleanup...
[2026-11-30 10:12:03] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
[2026-11-30 10:12:03] Decode batch, #running-req: 8, #token: 518
"""
    found = SGLang().telling_lines(log)
    assert found == [
        "Scheduler hit an exception: Traceback (most recent call last):",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "Subprocess scheduler_0 (pid=9) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
    ]
