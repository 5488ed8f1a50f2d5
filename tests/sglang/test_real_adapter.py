"""The adapter against the real SGLang on CPU: one server for all of this file, started as the pipeline starts it.

Needs the environment of build_env.py (`make test-sglang` builds it); without it everything here is skipped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests
import yaml

from shardmill.engines.base import Answer, Fault, ServerPlace
from shardmill.engines.sglang import SGLang
from shardmill.engines.sglang_flags import FlagTable, recorded_flags
from shardmill.errors import UserError
from shardmill.load_config import load_config
from tests.pipeline import merged

from . import build_env
from .pools import KEY, Server, eventually, one_server
from .workspaces import real_workspace

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not build_env.is_built(), reason="SGLang's CPU environment is not built: make test-sglang"),
    pytest.mark.timeout(1200),  # a start alone takes 30 s on two idle cores, and minutes on busy ones
]
ROOT = Path(__file__).resolve().parents[2]
LONG = {"max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("real") / "work"
    own = {"max_running_requests": 3, "max_queued_requests": 4, "max_total_tokens": 3000, "context_length": 4096}
    workspace = real_workspace(folder, own, sampling={"max_tokens": 1000})
    with one_server(workspace) as running:
        yield running


def test_it_says_what_it_is(server: Server) -> None:
    facts = server.facts
    assert facts["version"] == "0.5.23" and server.lease.engine == {"kind": "sglang", "version": "sglang 0.5.23"}
    assert facts["model_path"] == server.lease.model and facts["context_length"] == 4096
    assert facts["effective_max_running_requests"] == facts["max_running_requests"] == 3
    assert facts["max_total_tokens"] == 3000 and facts["reasoning_parser"] == "qwen3" and facts["device"] == "cpu"
    assert len(facts["chat_template_sha256"]) == 64 and "warnings" not in facts
    assert facts["one_request_alone"]["completion_tokens"] > 0
    assert server.lease.capacity == server.status.capacity == 3


def test_the_api_key_is_needed_and_nowhere_to_be_seen(server: Server) -> None:
    assert requests.get(f"{server.place.url}/v1/models", timeout=10).status_code == 401
    for process in psutil.process_iter(["cmdline"]):
        assert not any(KEY in word for word in process.info["cmdline"] or []), process
    for path in server.layout.root.rglob("*"):
        assert path == server.layout.api_key or not path.is_file() or KEY.encode() not in path.read_bytes(), path
    assert not server.layout.server_secret("0").exists()


def test_an_answer_has_thought_text_and_token_ids(server: Server) -> None:
    answer = server.ask()
    assert isinstance(answer, Answer) and answer.finish_reason == "stop"
    assert answer.content.strip() and answer.reasoning_content and answer.usage["reasoning_tokens"] > 0
    assert len(answer.prompt_token_ids or []) == answer.usage["prompt_tokens"]
    assert len(answer.completion_token_ids or []) == answer.usage["completion_tokens"]


def test_a_thought_that_is_cut_off_has_no_answer(server: Server) -> None:
    answer = server.ask(max_tokens=2)
    assert isinstance(answer, Answer) and answer.finish_reason == "length"
    assert answer.content == "" and answer.reasoning_content


def test_max_tokens_is_capped_without_a_word_and_the_usage_tells(server: Server) -> None:
    answer = server.ask(max_tokens=3500, ignore_eos=True)  # within the context, beyond the KV cache
    assert isinstance(answer, Answer) and answer.finish_reason == "length"
    assert answer.usage["completion_tokens"] < 3500


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"prompt": "hello there " * 6000}, "too_long"),
        ({"prompt": "hello there " * 100, "max_tokens": 4000}, "too_long"),
        ({"max_tokens": 5000}, "too_long"),
        ({"temperature": -1}, "bad_request"),
        ({"messages": []}, "bad_request"),
        ({"messages": [{"role": "wizard", "content": "this template exceeds the context length"}]}, "bad_request"),
        ({"messages": [{"role": "user", "content": None}]}, "bad_request"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": "many"}, "bad_request"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_fault_of_the_prompt_is_final_and_typed(server: Server, body: dict, kind: str) -> None:
    found = server.ask(**body)
    assert isinstance(found, Fault) and (found.kind, found.is_final) == (kind, True), found
    assert "/site-packages/" not in found.message and "\n" not in found.message


def test_queue_full_and_load(server: Server) -> None:
    with ThreadPoolExecutor(16) as pool:
        before = SGLang().load(server.place, timeout=5)
        assert before and before.running == 0 and before.capacity == 3
        long = [pool.submit(server.ask, f"Count to {n}.", **LONG) for n in range(3)]
        eventually(lambda: (now := SGLang().load(server.place, timeout=5)) and now.running >= 1, "running requests")
        moving = SGLang().load(server.place, timeout=5)
        assert moving
        # Tokens of running requests count at once, not when they finish.
        eventually(
            lambda: (
                (now := SGLang().load(server.place, timeout=5)) and now.completion_tokens > moving.completion_tokens
            ),
            "tokens",
        )
        rest = [pool.submit(server.ask, f"Count on to {n}.", **LONG) for n in range(10)]
        results = [answer.result() for answer in long + rest]
    faults = [result for result in results if isinstance(result, Fault)]
    assert faults and {(found.kind, found.is_final) for found in faults} == {("queue_full", False)}
    assert len(results) - len(faults) >= 3
    eventually(lambda: (now := SGLang().load(server.place, timeout=5)) and now.running == now.queued == 0, "idle")


def test_an_aborted_request_is_a_fault(server: Server) -> None:
    body = server.body(**LONG)
    headers = {"Authorization": f"Bearer {KEY}"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.send, body)
        eventually(lambda: (now := SGLang().load(server.place, timeout=5)) and now.running == 1, "a running request")
        requests.post(f"{server.place.url}/abort_request", json={"rid": body["rid"]}, headers=headers, timeout=10)
        found = answer.result()
    assert isinstance(found, Fault) and (found.kind, found.is_final) == ("aborted", False)


def test_the_recorded_flags_are_those_of_the_real_parser(server: Server) -> None:
    (kept,) = (Path(server.config.run.results) / ".cache").glob("sglang-flags-0.5.23-*.json")
    real, recorded = FlagTable.from_json(json.loads(kept.read_text())), recorded_flags("0.5.23")
    assert real
    # Two are hidden from the help.
    assert recorded.flags.keys() ^ real.flags.keys() <= {
        "help",
        "forward-pass-metrics-worker-id",
        "forward-pass-metrics-ipc-name",
    }
    for name, flag in real.flags.items():
        if name != "help":
            assert flag.takes == recorded.flags[name].takes, name


def test_the_real_parser_takes_every_launch_of_the_configurations(tmp_path: Path) -> None:
    """Parsed by the installed server's own argument parser, in one process for all of them."""
    commands = []
    for path in sorted((ROOT / "configs").glob("qwen3.6-27b-*.yaml")):
        config = load_config(merged(yaml.safe_load(path.read_text()), {"run": {"results": str(tmp_path)}}))
        where = ServerPlace("0", config.servers.host, config.servers.port, ("0",))
        commands.append(SGLang().launch_as(config, where, tmp_path, "0.5.23").command[3:])
    assert len(commands) >= 4
    code = (
        "import argparse, json, sys\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser(allow_abbrev=False)\n"
        "ServerArgs.add_cli_args(parser)\n"
        "for command in json.load(sys.stdin):\n"
        "    parsed = parser.parse_args(command)\n"
        "    assert parsed.speculative_num_draft_tokens == 4 and parsed.max_running_requests\n"
        "print('parsed')\n"
    )
    done = subprocess.run(
        [build_env.python_of(), "-c", code],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
        env={"SGLANG_USE_CPU_ENGINE": "1", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0 and done.stdout.endswith("parsed\n"), done.stderr[-2000:]


def test_a_flag_that_it_does_not_know_is_refused_before_the_launch(tmp_path: Path) -> None:
    workspace = real_workspace(tmp_path / "work", {"arguments": {"enable-mixed-chunks": True}})
    with (
        pytest.raises(UserError, match=r"has no flag --enable-mixed-chunks, did you mean --enable-mixed-chunk\?"),
        one_server(workspace),
    ):
        pass
    assert not list(tmp_path.rglob("*.engine.log"))


def test_its_end_is_told_in_its_own_words(tmp_path: Path) -> None:
    workspace = real_workspace(tmp_path / "work", {"arguments": {"attention-backend": None}, "quantization": "fp8"})
    workspace.configure(engine={"sglang": {"arguments": {}}}, model={"source": str(tmp_path / "empty")})
    (tmp_path / "empty").mkdir()
    with (
        pytest.raises(UserError, match=r"server 0: the engine .* while starting; its log says: .*Error") as caught,
        one_server(workspace),
    ):
        pass
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2500
