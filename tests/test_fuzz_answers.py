"""Whatever a server answers: a judged answer that fits the journal, or a typed fault, and never a traceback."""

from __future__ import annotations

from typing import Any, get_args

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmill.answering import Task
from shardmill.asking import expectation
from shardmill.config import Config
from shardmill.conversation import Conversation, Terms
from shardmill.engines.base import Answer, Fault, FaultKind
from shardmill.engines.llamacpp import LlamaCpp
from shardmill.engines.openai import OpenAI
from shardmill.engines.sglang import SGLang
from shardmill.journal import decode_entry, encode_entry
from shardmill.quality.verdicts import VERDICTS, Policy, judge

ENGINES = [OpenAI(), LlamaCpp(), SGLang()]
CONFIG = Config.model_validate({"prompts": {"path": "p.jsonl"}, "model": {"source": "m.gguf"}})
KEYS = [
    *("choices", "message", "content", "reasoning_content", "reasoning", "tool_calls", "finish_reason", "usage"),
    *("prompt_tokens", "completion_tokens", "reasoning_tokens", "completion_tokens_details", "error", "detail"),
    *("meta_info", "token_ids", "response_token_ids", "prompt_token_ids", "logprobs", "matched_stop", "object", "code"),
]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.integers(0, 5000)
scalars = st.none() | st.booleans() | numbers | text
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | text, inner, max_size=4),
)
usage = st.fixed_dictionaries(
    {"prompt_tokens": numbers | anything, "completion_tokens": numbers | anything},
    optional={"reasoning_tokens": anything, "completion_tokens_details": anything},
)
message = st.fixed_dictionaries(
    {}, optional={"content": text | anything, "reasoning_content": text | anything, "tool_calls": anything}
)
choice = st.fixed_dictionaries(
    {"message": message | anything, "finish_reason": st.sampled_from(["stop", "length", "abort"]) | anything},
    optional={"meta_info": anything, "response_token_ids": anything, "prompt_token_ids": anything},
)
completion = st.fixed_dictionaries(
    {"choices": st.lists(choice | anything, max_size=2) | anything, "usage": usage | anything},
    optional={"error": anything, "meta_info": anything, "object": anything},
)
bodies = (
    (completion | anything).map(orjson.dumps)
    | st.binary(max_size=40)
    | completion.map(lambda value: orjson.dumps(value)[:-3])
)
statuses = st.just(200) | st.sampled_from([200, 204, 301, 400, 401, 403, 404, 408, 413, 422, 429, 500, 502, 503, 504])


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.kind)
@given(statuses, bodies)
@example(200, b'{"choices": [{"message": [], "finish_reason": "stop"}], "usage": {}}')
@example(
    200,
    b'{"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1e300, '
    b'"completion_tokens": 1}}',
)
@example(
    200,
    b'{"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, '
    b'"completion_tokens": -4}}',
)
@example(
    200,
    b'{"choices": [{"message": {"content": "x", "tool_calls": 7}, "finish_reason": "stop"}], "usage": '
    b'{"prompt_tokens": 1, "completion_tokens": 1, "completion_tokens_details": [1]}}',
)
@example(200, b"[" * 2000)
def test_any_answer_is_judged_or_a_typed_fault(engine: OpenAI, status: int, body: bytes) -> None:
    result = engine.read_answer(status, body)
    if isinstance(result, Fault):
        assert result.kind in get_args(FaultKind)
        assert len(result.message.splitlines()) <= 1 and len(result.message) < 2000
        return
    assert isinstance(result, Answer) and status == 200
    assert isinstance(result.content, str) and isinstance(result.finish_reason, str)
    assert all(isinstance(count, int) and count >= 0 for count in result.usage.values())
    check_entry(result)


def check_entry(answer: Answer) -> None:
    """It is judged, goes through the journal unchanged, and brings a conversation on."""
    conversation = Conversation({"id": "p", "line": 1, "messages": [{"role": "user", "content": "hi"}]}, TERMS)
    request = conversation.next_request()
    assert request
    judgement = judge(answer, expectation(CONFIG, request, {"max_tokens": 100}))
    assert judgement.verdict in VERDICTS
    value = {key: part for key, part in vars(answer).items() if part is not None}
    entry: dict[str, Any] = {"id": "p", "kind": "answer", "turn": 0, "attempt": 1, "seed": request.seed}
    entry |= {"fingerprint": request.fingerprint, "verdict": judgement.verdict, "detail": judgement.detail}
    entry |= {"server": "0", "seconds": 0.1, "at": 1.0, "answer": value}
    read = decode_entry(encode_entry(entry)[:-1])
    assert read is not None and orjson.dumps(read) == orjson.dumps(entry)
    conversation.apply(read)
    assert conversation.outcome or conversation.next_request().attempt == 2  # type: ignore[union-attr]
    assert Task(conversation, None)  # type: ignore[arg-type]


TERMS = Terms("a", "m", 0, False, Policy.from_config(CONFIG.quality), 3)


@given(st.lists(st.sampled_from(["crash", "fault", "answer"]), max_size=6), st.lists(st.integers(1, 4), max_size=6))
def test_any_order_of_entries_has_one_outcome_and_asks_nothing_twice(kinds: list[str], attempts: list[int]) -> None:
    """Entries may be lost to damage, so that what is left of a request's attempts begins or goes on anywhere."""
    conversation = Conversation({"id": "p", "line": 1, "messages": [{"role": "user", "content": "hi"}]}, TERMS)
    seen = set()
    for kind, attempt in zip(kinds, sorted(attempts), strict=False):
        if conversation.outcome:
            break
        answer = {"content": "", "finish_reason": "stop", "usage": {"completion_tokens": 1}}
        entry = {
            "kind": kind,
            "turn": 0,
            "attempt": attempt,
            "seed": 1,
            "verdict": "empty",
            "detail": "",
            "server": "0",
        }
        conversation.apply(entry | {"seconds": 0.0, "fingerprint": "f", "answer": answer})
        seen |= {attempt} if kind == "answer" else set()
    request = conversation.next_request()
    assert request is None or request.attempt not in seen
