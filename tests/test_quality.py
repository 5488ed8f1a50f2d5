"""Verdicts on single answers, the policy that follows, and rates over many."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardmill.engines.base import FINAL_FAULTS, Answer
from shardmill.quality.verdicts import (
    THINK_TAGS,
    VERDICTS,
    Expectation,
    Judgement,
    Policy,
    RateGate,
    is_blank,
    judge,
    rate_table,
    supervised_tokens,
    visible,
    wilson_lower_bound,
)

THOUGHT = "The user asks for the capital of Peru. That is Lima, which has been the capital since 1535."
TEXT = "The capital of Peru is Lima."
THINKING = Expectation(thinking=True, max_tokens=4096, prompt_tokens=20, min_supervised_tokens=16)
PLAIN = replace(THINKING, thinking=False, min_supervised_tokens=4)
ANY = replace(PLAIN, thinking=None)
CALL = [{"id": "c1", "type": "function", "function": {"name": "capital", "arguments": '{"of": "Peru"}'}}]


def answer(content: str = TEXT, reasoning: str | None = THOUGHT, finish: str = "stop", **changes: Any) -> Answer:
    """A good answer with a thought, but for what is said."""
    usage = changes.pop("usage", {"prompt_tokens": 20, "completion_tokens": 40})
    return Answer(content, reasoning, changes.pop("tool_calls", None), finish, usage, **changes)


def verdict(given: Answer, expect: Expectation = THINKING) -> str:
    return judge(given, expect).verdict


def test_good_answers_pass() -> None:
    assert judge(answer(), THINKING) == Judgement("ok")
    assert judge(answer(), THINKING).is_ok
    assert verdict(answer(reasoning=None), PLAIN) == "ok"
    assert verdict(answer(), ANY) == verdict(answer(reasoning=None), ANY) == "ok"
    assert verdict(answer("", tool_calls=CALL, finish="tool_calls")) == "ok"


class TestCutThoughts:
    def test_whole_thought_in_the_content(self) -> None:
        """The server's parser waits for a closing tag that the token limit kept from coming."""
        cut = answer(THOUGHT, None, "length", usage={"prompt_tokens": 20, "completion_tokens": 4096})
        found = judge(cut, THINKING)
        assert found.verdict == "unclosed_thought"
        assert "4096 tokens" in found.detail and "content" in found.detail

    @pytest.mark.parametrize("content", ["", "\n\n", "\u200b"])
    def test_whole_thought_in_the_reasoning(self, content: str) -> None:
        assert verdict(answer(content, finish="length")) == "unclosed_thought"
        assert verdict(answer(content, finish="length"), ANY) == "unclosed_thought"

    @pytest.mark.parametrize("finish", ["length", "stop"])
    @pytest.mark.parametrize("opening", [pair[0] for pair in THINK_TAGS])
    def test_opened_in_the_content_and_never_closed(self, opening: str, finish: str) -> None:
        cut = answer(f"\n{opening}\n{THOUGHT}", None, finish)
        assert verdict(cut) == verdict(cut, ANY) == "unclosed_thought"
        assert verdict(cut, PLAIN) == "unexpected_reasoning"

    def test_a_cut_answer_after_a_whole_thought_is_truncated(self) -> None:
        assert verdict(answer(finish="length")) == "truncated"
        assert verdict(answer(reasoning=None, finish="length"), PLAIN) == "truncated"

    def test_a_thought_that_ends_without_an_answer_is_empty(self) -> None:
        found = judge(answer(""), THINKING)
        assert found.verdict == "empty" and str(len(THOUGHT)) in found.detail


class TestThinkingOff:
    @pytest.mark.parametrize("content", ["", TEXT])
    def test_answer_in_the_reasoning_field(self, content: str) -> None:
        """The server takes the answer for a thought: nothing is left in the content."""
        found = judge(answer(content, TEXT), PLAIN)
        assert found.verdict == "unexpected_reasoning"
        assert ("nothing in the content" in found.detail) is not bool(content)

    def test_blank_reasoning_is_none(self) -> None:
        assert verdict(answer(reasoning="\n\n"), PLAIN) == "ok"


class TestTags:
    @pytest.mark.parametrize("pair", THINK_TAGS)
    @pytest.mark.parametrize("expect", [THINKING, PLAIN, ANY], ids=["on", "off", "any"])
    def test_unparsed_thought(self, pair: tuple[str, str], expect: Expectation) -> None:
        found = judge(answer(f"{pair[0]}\n{THOUGHT}\n{pair[1]}\n\n{TEXT}", None), expect)
        assert found.verdict == "leaked_tags" and pair[0] in found.detail

    @pytest.mark.parametrize("closing", [pair[1] for pair in THINK_TAGS])
    def test_thought_opened_by_the_template(self, closing: str) -> None:
        raw = f"{THOUGHT}\n```\nx = 1\n{closing}\n\n{TEXT}"
        assert verdict(answer(raw, None)) == "leaked_tags"
        assert verdict(answer(raw, None), replace(THINKING, prompt_text=f"What does {closing} do?")) == "leaked_tags"
        assert verdict(answer(raw, None, "length")) == "leaked_tags"

    @pytest.mark.parametrize("marker", ["</think>", "<think>", "<|im_end|>", "<|im_start|>"])
    def test_stray_tags_anywhere(self, marker: str) -> None:
        assert verdict(answer(f"{TEXT} {marker} And so on.")) == "leaked_tags"
        found = judge(answer(reasoning=f"{THOUGHT} {marker} Good."), THINKING)
        assert found.verdict == "leaked_tags" and "thought" in found.detail

    @pytest.mark.parametrize(
        "content",
        [
            "Cut at the tag:\n```python\nhead, _, tail = text.partition('</think>')\n```\nThat is all.",
            "Cut at the tag:\n~~~\n<think>\n~~~\n",
            "An open fence:\n```\n<think>x</think>",
            "Models put thoughts between `<think>` and `</think>`.",
            "Write ``<|im_end|>`` at the end.",
        ],
    )
    def test_tags_in_code_are_the_subject(self, content: str) -> None:
        assert verdict(answer(content)) == "ok"
        assert verdict(answer(content, None), PLAIN) == "ok"

    def test_a_fence_excuses_only_what_is_in_it(self) -> None:
        assert verdict(answer("```\n<think>\n```\nand then </think> came.")) == "leaked_tags"

    def test_tags_that_the_prompt_speaks_of(self) -> None:
        asked = "What are <think> and </think> for?"
        said = "The tags <think> and </think> enclose a thought."
        assert verdict(answer(said)) == "leaked_tags"
        assert verdict(answer(said), replace(THINKING, prompt_text=asked)) == "ok"
        first = "<think> opens a thought."
        assert verdict(answer(first), replace(THINKING, prompt_text=asked)) == "ok"
        assert verdict(answer(first, None), replace(PLAIN, prompt_text=asked)) == "ok"
        assert verdict(answer(first, None), replace(THINKING, prompt_text=asked)) == "unclosed_thought"

    def test_own_tags(self) -> None:
        expect = replace(THINKING, think_tags=(("<inner>", "</inner>"),))
        assert verdict(answer(f"<inner>{THOUGHT}</inner>{TEXT}", None), expect) == "leaked_tags"
        assert verdict(answer(f"<think>{THOUGHT}</think>{TEXT}"), expect) == "ok"


class TestLoops:
    ENDLESS = "Wait, I should look again. " * 500

    def test_endless_thought(self) -> None:
        """It is also unclosed, empty and truncated; the loop is why."""
        found = judge(answer("", THOUGHT + self.ENDLESS, "length"), THINKING)
        assert found.verdict == "looping"
        assert "thought" in found.detail and "Wait, I should look again." in found.detail

    def test_endless_thought_in_the_content(self) -> None:
        found = judge(answer(THOUGHT + self.ENDLESS, None, "length"), THINKING)
        assert found.verdict == "looping" and "content" in found.detail

    def test_a_loop_that_ended_still_is_one(self) -> None:
        assert verdict(answer(TEXT + self.ENDLESS)) == "looping"

    def test_repetition_that_was_asked_for(self) -> None:
        asked = replace(THINKING, prompt_text="Write 'I will not be late' two hundred times.")
        written = answer("I will not be late.\n" * 200)
        assert verdict(written) == "looping"
        assert verdict(written, asked) == "ok"
        assert verdict(replace(written, finish_reason="length"), asked) == "looping"

    def test_a_count_that_came_to_its_end(self) -> None:
        bottles = "".join(
            f"{n} bottles of beer on the wall, {n} bottles of beer. Take one down, pass it around.\n"
            for n in range(99, 0, -1)
        )
        assert verdict(answer(bottles)) == "ok"
        assert verdict(answer(bottles, finish="length")) == "looping"
        assert verdict(answer(TEXT, bottles)) == "looping"


class TestEmpty:
    @pytest.mark.parametrize(
        "content", ["", " \n\t", "\u200b\u200d\ufeff", "\u00a0\u3000", "\u2800", "\u3164\ufe0f", "\x00\x1b"]
    )
    def test_blank(self, content: str) -> None:
        assert is_blank(content)
        assert verdict(answer(content, None)) == verdict(answer(content, None), PLAIN) == "empty"

    @pytest.mark.parametrize("content", [".", "0", "\u200b7\u200b", "好", "🙂", "\u0301a"])
    def test_not_blank(self, content: str) -> None:
        assert not is_blank(content)

    def test_none_is_blank(self) -> None:
        assert is_blank(None)

    def test_tool_calls_count_or_not(self) -> None:
        called = answer("", tool_calls=CALL, finish="tool_calls")
        assert verdict(called) == "ok"
        assert verdict(called, replace(THINKING, tool_calls_count=False)) == "empty"
        assert verdict(answer("", tool_calls=[], finish="tool_calls")) == "empty"


class TestTooLittle:
    def test_the_six_token_disaster(self) -> None:
        """Thinking silently off, an answer of a few boilerplate tokens: each sign of it alone is enough."""
        six = {"prompt_tokens": 20, "completion_tokens": 6}
        assert verdict(answer("", None, usage=six)) == "empty"
        assert verdict(answer("Sure!", None, usage=six)) == "no_reasoning"
        found = judge(answer("Sure!", None, usage=six), replace(THINKING, thinking=None))
        assert found.verdict == "too_short" and "6 supervised tokens" in found.detail and "16" in found.detail

    def test_the_limit_itself_is_enough(self) -> None:
        usage = {"prompt_tokens": 20, "completion_tokens": 16}
        assert verdict(answer(usage=usage)) == "ok"
        assert verdict(answer(usage=usage), replace(THINKING, min_supervised_tokens=17)) == "too_short"

    @pytest.mark.parametrize("reasoning", [None, "", "\n", "\u200b"])
    def test_no_thought(self, reasoning: str | None) -> None:
        assert verdict(answer(reasoning=reasoning)) == "no_reasoning"

    def test_supervised_tokens_sources(self) -> None:
        ids = list(range(33))
        assert supervised_tokens(answer(usage={"completion_tokens": 0}, completion_token_ids=ids)) == 0
        assert supervised_tokens(answer(usage={}, completion_token_ids=ids)) == 33
        assert supervised_tokens(answer("a" * 8, "b" * 9, usage={})) == math.ceil(17 / 4)
        assert supervised_tokens(answer("", None, usage={})) == 0
        assert supervised_tokens(answer("", None, usage={}, tool_calls=CALL)) > 10


class TestTruncated:
    def test_at_the_limit(self) -> None:
        found = judge(answer(finish="length", usage={"prompt_tokens": 20, "completion_tokens": 4096}), THINKING)
        assert found.verdict == "truncated" and "4096" in found.detail and "capped" not in found.detail

    def test_silent_cap(self) -> None:
        found = judge(answer(finish="length", usage={"prompt_tokens": 20, "completion_tokens": 900}), THINKING)
        assert found.verdict == "truncated"
        assert "900" in found.detail and "4096" in found.detail and "capped" in found.detail

    def test_silent_cap_of_a_thought(self) -> None:
        found = judge(answer("", finish="length", usage={"prompt_tokens": 20, "completion_tokens": 900}), THINKING)
        assert found.verdict == "unclosed_thought" and "capped" in found.detail

    @pytest.mark.parametrize("finish", ["abort", "content_filter", ""])
    def test_other_ends(self, finish: str) -> None:
        found = judge(answer(finish=finish), THINKING)
        assert found.verdict == "truncated" and repr(finish) in found.detail

    def test_without_counts(self) -> None:
        assert verdict(answer(finish="length", usage={})) == "truncated"


class TestPromptMismatch:
    @pytest.mark.parametrize("seen", [7, 19, 21])
    def test_counts_differ(self, seen: int) -> None:
        """Comes before all else: whatever the answer looks like, it answers another prompt."""
        found = judge(answer("", None, "length", usage={"prompt_tokens": seen}), THINKING)
        assert found.verdict == "prompt_mismatch"
        assert f"{seen} prompt tokens of 20" in found.detail

    def test_token_ids_where_nothing_was_counted(self) -> None:
        assert verdict(answer(usage={"completion_tokens": 40}, prompt_token_ids=[1] * 19)) == "prompt_mismatch"
        assert verdict(answer(usage={"completion_tokens": 40}, prompt_token_ids=[1] * 20)) == "ok"

    def test_unknown_counts_are_not_judged(self) -> None:
        assert verdict(answer(usage={"completion_tokens": 40})) == "ok"
        assert (
            verdict(answer(usage={"prompt_tokens": 7, "completion_tokens": 40}), replace(THINKING, prompt_tokens=None))
            == "ok"
        )


@given(
    content=st.text(max_size=40) | st.sampled_from(["<think>", "</think>", "`<think>`", "```\n</think>"]),
    reasoning=st.none() | st.text(max_size=20),
    finish=st.sampled_from(["stop", "length", "tool_calls", "abort"]),
    tokens=st.none() | st.integers(0, 99),
    tools=st.sampled_from([None, [], CALL]),
    thinking=st.sampled_from([True, False, None]),
)
def test_every_answer_gets_one_known_verdict(
    content: str, reasoning: str | None, finish: str, tokens: int | None, tools: Any, thinking: bool | None
) -> None:
    usage = {} if tokens is None else {"completion_tokens": tokens}
    given_answer = Answer(content, reasoning, tools, finish, usage)
    found = judge(given_answer, Expectation(thinking=thinking, min_supervised_tokens=3))
    assert found.verdict in VERDICTS
    assert bool(found.detail) is not found.is_ok
    if found.is_ok:
        assert finish in ("stop", "tool_calls")
        assert tools or not is_blank(content)
        assert thinking is None or thinking is not is_blank(reasoning)


def test_verdicts_name_every_final_fault() -> None:
    assert set(VERDICTS) >= FINAL_FAULTS | {"engine_error", "poison"}
    assert len(set(VERDICTS)) == len(VERDICTS)


class TestPolicy:
    POLICY = Policy({"empty": "retry", "truncated": "accept", "leaked_tags": "reject"}, retries=2)

    def test_actions(self) -> None:
        assert self.POLICY.action("ok", 1) == "accept"
        assert self.POLICY.action("truncated", 9) == "accept"
        assert self.POLICY.action("leaked_tags", 1) == "reject"
        assert self.POLICY.action("poison", 1) == "reject"
        assert replace(self.POLICY, actions={"ok": "reject"}).action("ok", 1) == "accept"

    @pytest.mark.parametrize("retries", [0, 1, 2, 5])
    def test_no_more_attempts_than_allowed(self, retries: int) -> None:
        policy = replace(self.POLICY, retries=retries)
        attempts = 1
        while policy.action("empty", attempts) == "retry":
            attempts += 1
        assert attempts == retries + 1
        assert policy.action("empty", attempts) == "reject"

    def test_temperature_ladder(self) -> None:
        policy = replace(self.POLICY, temperatures=(0.8, 1.1))
        assert [policy.attempt_overrides(n) for n in (1, 2, 3, 4)] == [
            {},
            {"temperature": 0.8},
            {"temperature": 1.1},
            {"temperature": 1.1},
        ]
        assert self.POLICY.attempt_overrides(3) == {}

    def test_from_config(self) -> None:
        quality = SimpleNamespace(
            actions=SimpleNamespace(empty="retry", truncated="accept"), retries=1, retry_temperatures=[0.5]
        )
        policy = Policy.from_config(quality)
        assert [policy.action("empty", n) for n in (1, 2)] == ["retry", "reject"]
        assert policy.action("truncated", 1) == "accept"
        assert policy.action("bad_request", 1) == "reject"
        assert policy.attempt_overrides(2) == {"temperature": 0.5}


class TestRates:
    def test_few_samples_stop_nothing_many_do(self) -> None:
        gate = RateGate(limit=0.05, min_samples=20)
        assert not gate.fails(1, 3)
        assert not gate.fails(3, 3)
        assert not gate.fails(2, 40)
        assert not gate.fails(0, 0)
        assert gate.fails(30, 40)
        assert gate.fails(20, 20)
        assert "30 of 40 (75.0%" in gate.describe(30, 40)
        assert "0 of 0" in gate.describe(0, 0)

    def test_a_rate_at_its_limit_never_fails(self) -> None:
        assert not any(RateGate(0.05).fails(n // 20, n) for n in range(20, 20_000, 20))

    @pytest.mark.parametrize(
        ("hits", "total", "bound"),
        [(0, 10, 0.0), (1, 10, 0.0179), (5, 10, 0.2366), (10, 10, 0.7225), (81, 263, 0.2553)],
    )
    def test_published_values(self, hits: int, total: int, bound: float) -> None:
        assert wilson_lower_bound(hits, total) == pytest.approx(bound, abs=2e-4)

    @given(st.integers(1, 10_000), st.data())
    def test_bound_solves_its_equation(self, total: int, data: st.DataObject) -> None:
        """The bound is the rate whose own normal interval just reaches what was seen."""
        hits = data.draw(st.integers(0, total))
        bound = wilson_lower_bound(hits, total)
        assume(hits)
        assert 0 < bound < hits / total
        assert hits / total - bound == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / total), rel=1e-6)


class TestTable:
    def test_rows(self) -> None:
        table = rate_table(
            {"looping": 30, "ok": 970, "empty": 0},
            {"looping": 0.01, "ok": 1.0},
            {"looping": [("p-7", "Wait,\n\x1b[31mwait"), ("p-8", "no"), ("p-9", "no"), ("p-10", "left out")]},
        )
        lines = table.splitlines()
        assert lines[0].split() == ["verdict", "count", "rate", "limit"]
        assert lines[1].split() == ["ok", "970", "97.0%", "100.0%"]
        assert lines[2].split() == ["looping", "30", "3.0%", "1.0%", "!"]
        assert lines[3].strip() == r"p-7: Wait,\n\x1b[31mwait"
        assert [line.split(":")[0].strip() for line in lines[3:6]] == ["p-7", "p-8", "p-9"]
        assert lines[-1].split() == ["total", "1,000"]
        assert "empty" not in table and "left out" not in table

    def test_nothing_counted(self) -> None:
        assert rate_table({}).splitlines()[-1].split() == ["total", "0"]

    @given(st.text(max_size=400), st.integers(12, 60))
    def test_visible_is_one_short_printable_line(self, text: str, width: int) -> None:
        shown = visible(text, width)
        assert len(shown) <= width and shown.isprintable()
        if text.isprintable() and len(text) <= width:
            assert shown == text

    def test_visible_shows_both_ends(self) -> None:
        shown = visible("start" + "\n" * 10_000 + "end")
        assert shown.startswith(r"start\n") and shown.endswith("end") and "..." in shown
