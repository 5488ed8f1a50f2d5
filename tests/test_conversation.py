"""A conversation's state follows from its journal alone: a restart stands exactly where the run before it stood."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.conversation import (
    Conversation,
    Terms,
    assistant_message,
    derive_seed,
    without_thoughts,
)
from shardmill.journal import Journal
from shardmill.quality.verdicts import Policy

ACTIONS = {"empty": "retry", "looping": "retry", "truncated": "reject", "leaked_tags": "accept"}
TERMS = Terms(
    answers="a" * 32,
    model_digest="d" * 64,
    seed=7,
    all_turns=True,
    policy=Policy(actions=ACTIONS, retries=2, temperatures=(0.5, 0.9)),
    poison_after=3,
)


def prompt(users: int = 3, **more: Any) -> dict[str, Any]:
    """A prompt as the prompt shards hold it: for all turns, the assistant's are not there."""
    turns = [{"role": "user", "content": f"question {number}"} for number in range(users)]
    return {
        "id": "p1",
        "line": 1,
        "messages": [{"role": "system", "content": "Be brief."}, *turns],
        "fields": {},
        **more,
    }


def entry(conversation: Conversation, kind: str, verdict: str = "ok", number: int = 0) -> dict[str, Any]:
    """The journal entry of an outcome of the conversation's current request."""
    request = conversation.next_request()
    assert request is not None
    value: dict[str, Any] = {
        "id": conversation.id,
        "kind": kind,
        "turn": request.turn,
        "attempt": request.attempt,
        "fingerprint": request.fingerprint,
        "seed": request.seed,
        "verdict": verdict,
        "detail": f"detail {number}",
        "server": str(number % 3),
        "seconds": float(number),
    }
    if kind == "answer":
        value["answer"] = {
            "content": "" if verdict == "empty" else f"answer {number}",
            "reasoning_content": f"thought {number}",
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 5, "completion_tokens": number},
        }
    return value


def state(conversation: Conversation) -> dict[str, Any]:
    """All that a shard's files and its next request are made of."""
    return {
        "request": conversation.next_request(),
        "outcome": conversation.outcome,
        "verdict": conversation.verdict,
        "detail": conversation.detail,
        "attempts": conversation.attempts,
        "answers": conversation.answers,
        "messages": conversation.messages,
        "crashes": conversation.crashes,
        "fingerprint": conversation.current_fingerprint,
    }


def replayed(journal: Journal, record: dict[str, Any], terms: Terms) -> Conversation:
    """What a restart makes of a journal: the loop of `shardmill.answering.replay`."""
    conversation = Conversation(record, terms)
    catch_up(conversation, journal)
    return conversation


def catch_up(conversation: Conversation, journal: Journal) -> None:
    while (request := conversation.next_request()) is not None:
        if not conversation.replay(journal.entries(conversation.id, request.fingerprint)):
            return


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["answer", "answer", "answer", "crash", "fault"]),
        st.sampled_from(["ok", "ok", "empty", "looping", "truncated", "leaked_tags"]),
    ),
    max_size=14,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.integers(1, 4), st.booleans(), st.integers(0, 3), st.integers(1, 4))
def test_replay_stands_where_the_live_run_stood(
    events: list[tuple[str, str]], users: int, all_turns: bool, retries: int, poison_after: int
):
    """After every single entry, as if the run had been killed there."""
    policy = replace(TERMS.policy, retries=retries)
    terms = replace(TERMS, all_turns=all_turns, policy=policy, poison_after=poison_after)
    record = prompt(users)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "j.jsonl") as journal:
        live = Conversation(copy.deepcopy(record), terms)
        for number, (kind, verdict) in enumerate(events):
            if live.outcome:
                break
            new = entry(live, kind, {"crash": "poison", "fault": "too_long"}.get(kind, verdict), number)
            journal.append(new)
            live.apply(new)
            assert state(replayed(journal, copy.deepcopy(record), terms)) == state(live)
            assert len(live.attempts) <= number + 1
        assert record == prompt(users), "the prompt itself is never changed"


@settings(max_examples=100, deadline=None)
@given(EVENTS)
def test_what_was_applied_is_not_applied_again(events: list[tuple[str, str]]):
    """After each live answer the journal is looked at again, for turns of an earlier run; it holds that answer too."""
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "j.jsonl") as journal:
        live = Conversation(prompt(), TERMS)
        for number, (kind, verdict) in enumerate(events):
            if live.outcome or kind == "fault":
                break
            new = entry(live, kind, "poison" if kind == "crash" else verdict, number)
            journal.append(new)
            live.apply(new)
            before = copy.deepcopy(state(live))
            catch_up(live, journal)
            assert state(live) == before


def test_later_turns_of_an_earlier_run_are_used_again():
    """The first turn's answer was lost to damage. Asked again it came out the same: the second turn's still holds."""
    first, second = Conversation(prompt(2), TERMS), Conversation(prompt(2), TERMS)
    opening = entry(first, "answer", number=1)
    first.apply(opening)
    closing = entry(first, "answer", number=2)
    first.apply(closing)
    assert first.outcome == "accepted"
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "j.jsonl") as journal:
        journal.append(closing)
        catch_up(second, journal)
        assert second.next_request().turn == 0
        journal.append(opening)
        second.apply(opening)
        catch_up(second, journal)
    assert state(second) == state(first)


def test_each_turn_is_answered_on_the_regenerated_history():
    conversation = Conversation(prompt(3), TERMS)
    asked = []
    for number in range(3):
        request = conversation.next_request()
        assert request.turn == number
        asked.append([(message["role"], message["content"]) for message in request.messages])
        conversation.apply(entry(conversation, "answer", number=number))
    assert asked[0] == [("system", "Be brief."), ("user", "question 0")]
    assert asked[1] == [*asked[0], ("assistant", "answer 0"), ("user", "question 1")]
    assert asked[2] == [*asked[1], ("assistant", "answer 1"), ("user", "question 2")]
    assert conversation.outcome == "accepted"
    assert conversation.next_request() is None
    assert [
        message.get("reasoning_content") for message in conversation.messages if message["role"] == "assistant"
    ] == [f"thought {number}" for number in range(3)]
    assert [answer["turn"] for answer in conversation.answers] == [0, 1, 2]


def test_requests_already_handed_out_do_not_change():
    """A request's thread reads its messages while the conversation moves on."""
    conversation = Conversation(prompt(3), TERMS)
    handed_out = []
    while (request := conversation.next_request()) is not None:
        handed_out.append((request, copy.deepcopy(request)))
        conversation.apply(entry(conversation, "answer"))
    assert len(handed_out) == 3
    assert all(request == before for request, before in handed_out)


def test_the_last_turn_only_is_answered_on_the_history_as_given():
    messages = [
        {"role": "user", "content": "q0"},
        {"role": "assistant", "content": "given"},
        {"role": "user", "content": "q1"},
    ]
    conversation = Conversation(prompt(messages=messages) | {"messages": messages}, replace(TERMS, all_turns=False))
    assert conversation.next_request().messages == messages
    conversation.apply(entry(conversation, "answer", number=1))
    assert conversation.outcome == "accepted"
    assert [message["content"] for message in conversation.messages] == ["q0", "given", "q1", "answer 1"]


def test_an_accepted_conversation_ends_in_its_answer():
    """A system turn at the end of the input has nothing to be answered after it."""
    record = prompt(1)
    record["messages"].append({"role": "system", "content": "late"})
    conversation = Conversation(record, TERMS)
    conversation.apply(entry(conversation, "answer"))
    assert conversation.outcome == "accepted"
    assert conversation.messages[-1]["role"] == "assistant"


# Attempts


def test_an_answer_may_be_tried_again_as_often_as_the_policy_says():
    conversation = Conversation(prompt(1), TERMS)
    first = conversation.next_request()
    assert (first.attempt, first.overrides) == (1, {})
    conversation.apply(entry(conversation, "answer", "empty", 1))
    second = conversation.next_request()
    assert (second.attempt, second.turn, second.overrides) == (2, 0, {"temperature": 0.5})
    assert second.fingerprint == first.fingerprint
    assert second.seed != first.seed
    conversation.apply(entry(conversation, "answer", "looping", 2))
    third = conversation.next_request()
    assert (third.attempt, third.overrides) == (3, {"temperature": 0.9})
    conversation.apply(entry(conversation, "answer", "empty", 3))
    assert (conversation.outcome, conversation.verdict, conversation.detail) == ("rejected", "empty", "detail 3")
    assert [attempt["verdict"] for attempt in conversation.attempts] == ["empty", "looping", "empty"]
    assert [attempt["seed"] for attempt in conversation.attempts] == [first.seed, second.seed, third.seed]


def test_attempts_count_anew_in_each_turn():
    conversation = Conversation(prompt(2), TERMS)
    for verdict in ("empty", "empty", "ok"):
        conversation.apply(entry(conversation, "answer", verdict))
    request = conversation.next_request()
    assert (request.turn, request.attempt) == (1, 1)
    for verdict in ("empty", "empty", "ok"):
        conversation.apply(entry(conversation, "answer", verdict))
    assert conversation.outcome == "accepted"
    assert [attempt["attempt"] for attempt in conversation.attempts] == [1, 2, 3, 1, 2, 3]


def test_the_policy_may_accept_what_is_not_ok():
    conversation = Conversation(prompt(1), TERMS)
    conversation.apply(entry(conversation, "answer", "leaked_tags"))
    assert (conversation.outcome, conversation.verdict) == ("accepted", "leaked_tags")


def test_a_prompt_in_flight_at_crash_after_crash_is_set_aside():
    conversation = Conversation(prompt(2), TERMS)
    conversation.apply(entry(conversation, "crash", "poison"))
    assert conversation.next_request().attempt == 1, "a crash is not an attempt"
    conversation.apply(entry(conversation, "answer"))
    conversation.apply(entry(conversation, "crash", "poison"))
    assert conversation.outcome is None
    conversation.apply(entry(conversation, "crash", "poison"))
    assert (conversation.outcome, conversation.verdict) == ("rejected", "poison")
    assert conversation.detail == "in flight at 3 server crashes"
    assert conversation.next_request() is None


def test_a_fault_of_the_prompt_is_final():
    conversation = Conversation(prompt(2), TERMS)
    conversation.apply(entry(conversation, "fault", "too_long", 4))
    assert (conversation.outcome, conversation.verdict, conversation.detail) == ("rejected", "too_long", "detail 4")
    assert conversation.attempts[0]["finish_reason"] is None


def test_own_sampling_goes_before_the_policy_and_into_the_fingerprint():
    plain, own = Conversation(prompt(1), TERMS), Conversation(prompt(1, sampling={"temperature": 0.1}), TERMS)
    assert plain.current_fingerprint != own.current_fingerprint
    own.apply(entry(own, "answer", "empty"))
    assert own.next_request().overrides == {"temperature": 0.1}


def test_what_is_asked_makes_the_fingerprint():
    base = Conversation(prompt(1), TERMS).current_fingerprint
    tools = prompt(1, tools=[{"type": "function"}])
    same = [Conversation(prompt(1, fields={"label": 1}), TERMS), Conversation(prompt(1, line=9), TERMS)]
    other = [
        Conversation(tools, TERMS),
        Conversation(prompt(1), replace(TERMS, answers="b" * 32)),
        Conversation(prompt(1), replace(TERMS, model_digest="e" * 64)),
        Conversation(prompt(1) | {"messages": [{"role": "user", "content": "question 0"}]}, TERMS),
    ]
    assert {conversation.current_fingerprint for conversation in same} == {base}
    assert len({base, *(conversation.current_fingerprint for conversation in other)}) == 5


# Messages and seeds


def test_an_assistant_turn_holds_what_there_is():
    assert assistant_message({"content": "a"}) == {"role": "assistant", "content": "a"}
    full = {"content": "", "reasoning_content": "t", "tool_calls": [{"id": "1"}], "finish_reason": "stop"}
    assert assistant_message(full) == {
        "role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [{"id": "1"}]
    }  # fmt: skip
    empty = {"content": "a", "reasoning_content": "", "tool_calls": []}
    assert assistant_message(empty) == {"role": "assistant", "content": "a"}


def test_thoughts_are_not_sent_back():
    messages = [{"role": "assistant", "content": "a", "reasoning_content": "t", "tool_calls": []}]
    assert without_thoughts(messages) == [{"role": "assistant", "content": "a", "tool_calls": []}]
    assert messages[0]["reasoning_content"] == "t"


def test_seeds_are_stable():
    """They are part of what a run promises: a later version must draw the same answers."""
    assert [derive_seed(0, "p1", 0, 1), derive_seed(7, "p1", 1, 2)] == [1594396389, 1362502333]
    assert 0 <= derive_seed(2**63 - 1, "é\u2028😀", 99, 9) < 2**31


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**63 - 1), st.text(), st.integers(0, 50))
def test_each_attempt_has_a_seed_of_its_own(run_seed: int, prompt_id: str, turn: int):
    around = [(run_seed, prompt_id, turn, attempt) for attempt in range(1, 6)]
    around += [
        (run_seed, prompt_id, turn + 1, 1),
        (run_seed + 1, prompt_id, turn, 1),
        (run_seed, prompt_id + "x", turn, 1),
    ]
    around += [(run_seed, f"{prompt_id}\n{turn}", turn, 1)]
    seeds = [derive_seed(*names) for names in around]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [derive_seed(*names) for names in around]


@pytest.mark.parametrize("count", [20_000])
def test_few_prompts_share_a_seed(count: int):
    """By the birthday bound about 0.1 of 20,000 seeds of 31 bits should collide; a weak mix would show."""
    assert len({derive_seed(0, f"p{number}", 0, 1) for number in range(count)}) > count - 5
