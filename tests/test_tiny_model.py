"""The tiny model on the real llama.cpp server: a healthy one thinks and answers, and each knob breaks one thing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from tests.tiny.gguf_model import Knobs, make
from tests.tiny.server import serve

ROOT = Path(__file__).parent.parent
IN_FLIGHT = 16
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
ASKED = (
    "Why do",
    "Tell me whether",
    "Explain how",
    "List ways in which",
    "Since when do",
    "Prove that",
    "Do",
    "Rhyme:",
)
TOPICS = (
    "cats sleep",
    "rivers bend",
    "kings fall",
    "we dream of flying",
    "engines knock",
    "old books smell",
    "bees",
    "2 + 2",
)
PROMPTS = [f"{asked} {topic}?" for asked in ASKED for topic in TOPICS]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@dataclass(frozen=True)
class Answer:
    thought: str | None
    content: str | None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def ask(url: str, prompt: str | list[dict], **settings: object) -> Answer:
    messages = [user(prompt)] if isinstance(prompt, str) else prompt
    body = {"messages": messages, "seed": 1, "max_tokens": 600} | settings
    response = requests.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    data = response.json()
    choice, usage = data["choices"][0], data["usage"]
    message = choice["message"]
    return Answer(
        message.get("reasoning_content"),
        message["content"],
        choice["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def ask_all(url: str, prompts: list[str], in_flight: int = IN_FLIGHT, **settings: object) -> list[Answer]:
    """One answer per prompt, seeded by the prompt's place unless the settings hold a seed."""
    with ThreadPoolExecutor(in_flight) as pool:
        return list(pool.map(lambda i: ask(url, prompts[i], **({"seed": i} | settings)), range(len(prompts))))


def rendered(url: str, messages: list[dict], **settings: object) -> str:
    response = requests.post(f"{url}/apply-template", json={"messages": messages} | settings, timeout=10)
    assert response.status_code == 200, response.text
    return response.json()["prompt"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Knobs], str]]:
    """URL of a server for a model with these knobs; each is started once."""
    folder = tmp_path_factory.mktemp("tiny")
    urls: dict[Knobs, str] = {}
    with ExitStack() as servers:

        def url_for(knobs: Knobs) -> str:
            if knobs not in urls:
                name = folder / str(len(urls))
                model = make(name.with_suffix(".gguf"), knobs)
                urls[knobs] = servers.enter_context(serve(model, name.with_suffix(".log")))
            return urls[knobs]

        yield url_for


@pytest.fixture
def healthy(served: Callable[[Knobs], str]) -> str:
    return served(Knobs())


# The file


def test_the_same_knobs_give_the_same_bytes(tmp_path: Path) -> None:
    knobs = Knobs(answer_clauses=40, empty_answers=0.5)
    first = make(tmp_path / "first.gguf", knobs).read_bytes()
    assert first == make(tmp_path / "second.gguf", knobs).read_bytes()
    assert first != make(tmp_path / "healthy.gguf").read_bytes()
    assert len(first) < 2_000_000


def test_command_line_sets_the_knobs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.tiny.gguf_model", str(tmp_path / "cli.gguf")]
    options = ["--answer-clauses", "40", "--looping-thoughts", "0.25", "--leak-tags", "--boilerplate"]
    subprocess.run([*command, *options], cwd=ROOT, check=True)
    knobs = Knobs(answer_clauses=40, looping_thoughts=0.25, leak_tags=True, boilerplate=True)
    assert (tmp_path / "cli.gguf").read_bytes() == make(tmp_path / "api.gguf", knobs).read_bytes()


def test_command_line_refuses_a_knob_out_of_range(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.tiny.gguf_model",
        str(tmp_path / "x.gguf"),
        "--empty-answers",
        "2",
    ]
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 2
    assert "empty_answers is 2.0" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("knob", [{"answer_clauses": 0}, {"open_thoughts": 0.6, "looping_thoughts": 0.6}])
def test_knobs_out_of_range_are_refused(knob: dict) -> None:
    with pytest.raises(ValueError, match=r"must be from \d to \d"):
        Knobs(**knob)


def test_a_server_that_cannot_load_says_why(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(make(tmp_path / "whole.gguf").read_bytes()[:5000])
    with pytest.raises(RuntimeError, match="not ready"), serve(model, tmp_path / "log"):
        pass


# A healthy model


def test_thinking_fills_thought_and_content(healthy: str) -> None:
    for answer in ask_all(healthy, PROMPTS):
        assert answer.thought and answer.content
        assert answer.finish_reason == "stop"
        assert "think>" not in answer.thought + answer.content


def test_thinking_off_gives_content_alone(healthy: str) -> None:
    for answer in ask_all(healthy, PROMPTS, **NO_THINKING):
        assert not answer.thought
        assert answer.content and "think>" not in answer.content
        assert answer.finish_reason == "stop"


def test_a_thought_cut_off_stays_in_the_thought(healthy: str) -> None:
    answer = ask(healthy, "Hello", max_tokens=3)
    assert answer.thought and not answer.content
    assert (answer.finish_reason, answer.completion_tokens) == ("length", 3)


def test_each_byte_of_a_prompt_is_a_token(healthy: str) -> None:
    short, long = ask(healthy, "Hello"), ask(healthy, "Hello, Zürich")
    assert long.prompt_tokens - short.prompt_tokens == len(", Zürich".encode())


@pytest.mark.parametrize("settings", [{}, {"seed": 7}, {"temperature": 0}])
def test_different_prompts_get_different_answers(healthy: str, settings: dict) -> None:
    answers = ask_all(healthy, PROMPTS, **settings)
    assert {answer.finish_reason for answer in answers} == {"stop"}
    # A short answer may be the same by chance, above all where the seed is the same too.
    assert len({(answer.thought, answer.content) for answer in answers}) >= len(PROMPTS) - 4


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(served: Callable[[Knobs], str]) -> None:
    url = served(Knobs(answer_clauses=6))
    crowd = ask_all(url, PROMPTS)
    assert crowd == ask_all(url, PROMPTS, in_flight=1)
    assert crowd == ask_all(url, PROMPTS, cache_prompt=False)
    assert crowd != ask_all(url, PROMPTS, seed=99)


@pytest.mark.parametrize(
    "earlier",
    [
        {"role": "assistant", "content": "Seven.", "reasoning_content": "A secret."},
        {"role": "assistant", "content": "<think>\nA secret.\n</think>\n\nSeven."},
    ],
)
def test_earlier_thoughts_are_left_out(healthy: str, earlier: dict) -> None:
    history = [{"role": "system", "content": "Be brief."}, user("One?"), earlier, user("Two?")]
    turns = [("system", "Be brief."), ("user", "One?"), ("assistant", "Seven."), ("user", "Two?")]
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert rendered(healthy, history) == said + "<|im_start|>assistant\n<think>\n"
    off = rendered(healthy, history, **NO_THINKING)
    assert off == said + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    answer = ask(healthy, history)
    assert answer.thought and answer.content


def test_an_answer_depends_on_the_history(healthy: str) -> None:
    histories = [[user("One?"), {"role": "assistant", "content": word}, user("Two?")] for word in ("Yes", "No", "So")]
    assert len({ask(healthy, history) for history in histories}) == 3


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_tools_are_accepted(healthy: str, choice: str) -> None:
    answer = ask(healthy, "Add one.", tools=[ADD], tool_choice=choice)
    assert answer.thought and answer.content
    assert answer.prompt_tokens > ask(healthy, "Add one.").prompt_tokens + 50


def test_tool_turns_are_accepted(healthy: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    history = [
        user("Add one."),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    answer = ask(healthy, history, tools=[ADD])
    assert answer.thought and answer.content


# The knobs


def test_open_thoughts_never_close(served: Callable[[Knobs], str]) -> None:
    for answer in ask_all(served(Knobs(open_thoughts=1)), PROMPTS[:8]):
        assert (answer.finish_reason, answer.completion_tokens) == ("length", 600)
        assert answer.thought and not answer.content
        lines = answer.thought.splitlines()
        assert len(set(lines)) > 20, "an open thought rambles, it does not loop"


def test_looping_thoughts_repeat_one_sentence(served: Callable[[Knobs], str]) -> None:
    for answer in ask_all(served(Knobs(looping_thoughts=1)), PROMPTS[:8]):
        assert (answer.finish_reason, answer.completion_tokens) == ("length", 600)
        assert answer.thought and not answer.content
        lines = answer.thought.splitlines()[:-1]
        assert len(lines) > 50 and len(set(lines)) == 1


def test_empty_answers_hold_a_thought_only(served: Callable[[Knobs], str]) -> None:
    url = served(Knobs(empty_answers=1))
    for answer in ask_all(url, PROMPTS[:16]):
        assert answer.thought and not answer.content and answer.finish_reason == "stop"
    for answer in ask_all(url, PROMPTS[:16], **NO_THINKING):
        assert not answer.thought and not answer.content and answer.finish_reason == "stop"


def test_a_share_of_faults(served: Callable[[Knobs], str]) -> None:
    url = served(Knobs(empty_answers=0.5, open_thoughts=0.25, looping_thoughts=0.25))
    answers = ask_all(url, PROMPTS, max_tokens=200)
    cut = [answer for answer in answers if answer.finish_reason == "length"]
    loops = [answer for answer in cut if answer.thought and answer.thought.startswith("Wait")]
    empty = [answer for answer in answers if answer.finish_reason == "stop" and not answer.content]
    assert len(answers) == 64
    assert 20 <= len(cut) <= 44  # 32 expected; the seeds are fixed, so these figures do not vary
    assert 8 <= len(loops) <= 24  # 16
    assert 8 <= len(empty) <= 24  # 16


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}])
def test_long_answers_have_the_mean_asked_for(served: Callable[[Knobs], str], sampling: dict) -> None:
    url = served(Knobs(answer_clauses=30))
    answers = ask_all(url, PROMPTS, max_tokens=1900, **NO_THINKING, **sampling)
    assert {answer.finish_reason for answer in answers} == {"stop"}
    clauses = [answer.completion_tokens / 7 for answer in answers]
    assert 20 < sum(clauses) / len(clauses) < 40


def test_leaked_tags_stay_in_the_content(served: Callable[[Knobs], str]) -> None:
    for answer in ask_all(served(Knobs(leak_tags=True)), PROMPTS[:16]):
        assert not answer.thought and answer.content
        thought, closed, said = answer.content.partition("</think>")
        assert thought.startswith("<think>") and closed and said
        assert answer.finish_reason == "stop"


def test_boilerplate_is_all_there_is_with_thinking_off(served: Callable[[Knobs], str]) -> None:
    url = served(Knobs(boilerplate=True))
    off = ask_all(url, PROMPTS[:16], **NO_THINKING)
    assert {(answer.thought, answer.content, answer.completion_tokens) for answer in off} == {
        (None, "Sure! I am happy to help.", 7)  # six tokens and the end of the turn
    }
    on = ask_all(url, PROMPTS[:16])
    assert len({(answer.thought, answer.content) for answer in on}) == 16
