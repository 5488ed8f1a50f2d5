"""Nothing worthless gets through: real runs on a real engine whose model has one fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmill.canary import check_prompt_tokens, judge_prompts
from shardmill.config import Config
from shardmill.conversation import Conversation
from shardmill.errors import UserError
from shardmill.files import write_json
from shardmill.generate import make_terms
from shardmill.load_config import load_config
from shardmill.training.tokenizer import count_prompt_tokens, load_tokenizer, template_arguments
from tests.pipeline import Workspace, check_complete, check_sent_once, prompts
from tests.test_training import make_model

Make = Callable[..., Workspace]


def shards_made(work: Workspace) -> list[str]:
    return sorted(path.name for path in work.results.glob("completions/*.zst"))


def test_the_disaster_stops_at_the_canary(workspace: Make, models: Callable[..., Path]) -> None:
    """Thinking off, six tokens of boilerplate in every answer, 2,000 prompts: as it once went through unseen."""
    work = workspace(model=models(boilerplate=True), thinking={"enabled": False}, shards={"size": 100})
    work.write_prompts(prompts(2000))
    result = work.run()
    assert result.code != 0
    assert shards_made(work) == []
    assert "64 of 64 sample answers are bad" in result.output
    assert "too_short" in result.output
    assert "boilerplate" in result.output, "the cause in words"
    assert "Traceback" not in result.output
    asked = [entry for entry in work.journal() if entry["attempt"] == 1]
    assert len({entry["id"] for entry in asked}) == 64


@pytest.mark.parametrize(
    ("knobs", "settings", "verdicts"),
    [
        ({"empty_answers": 1.0}, {}, {"empty", "too_short"}),
        ({"open_thoughts": 1.0}, {"sampling": {"max_tokens": 200}}, {"unclosed_thought", "looping"}),
        ({"looping_thoughts": 1.0}, {}, {"looping"}),
        ({"leak_tags": True}, {"thinking": {"enabled": None}}, {"leaked_tags"}),
    ],
)
def test_each_fault_of_a_model_is_named_before_a_shard_is_made(
    workspace: Make,
    models: Callable[..., Path],
    knobs: dict[str, Any],
    settings: dict[str, Any],
    verdicts: set[str],
) -> None:
    work = workspace(model=models(**knobs), quality={"retries": 0}, **settings)
    work.write_prompts(prompts(24))
    result = work.run()
    assert result.code != 0, result.output
    assert shards_made(work) == []
    assert any(verdict in result.output for verdict in verdicts), result.output
    assert "Traceback" not in result.output


def test_the_canarys_answers_are_not_made_twice(workspace: Make) -> None:
    work = workspace()
    records = prompts(40)
    work.write_prompts(records)
    work.finish()
    check_complete(work, [record["id"] for record in records])
    check_sent_once(work)
    canary = work.json("quality", "canary.json")
    manifest = work.json("dataset", "manifest.json")
    assert canary["prompts"] == 4
    assert len(set(canary["ids"])) == 4
    answers = [entry for entry in work.journal() if entry["kind"] == "answer"]
    assert canary["requests_sent"] + manifest["counts"]["requests_sent"] == len(answers)
    again = work.finish("-n")
    assert again.did_nothing


def test_it_is_skipped_only_by_name(workspace: Make) -> None:
    work = workspace(quality={"canary": {"skip": True}})
    work.write_prompts(prompts(6))
    result = work.finish()
    assert "canary" not in result.jobs
    assert not work.path("quality", "canary.json").exists()


def test_a_shard_of_bad_answers_stops_with_the_table(workspace: Make, models: Callable[..., Path]) -> None:
    quality = {"canary": {"skip": True}, "retries": 0, "max_reject_rate": 0.2, "stop_run_above": 1.0}
    work = workspace(model=models(empty_answers=0.7), shards={"size": 80}, quality=quality)
    work.write_prompts(prompts(80))
    result = work.run()
    assert result.code != 0
    assert "too many rejects" in result.output and "limit 20.0%" in result.output
    assert shards_made(work) == []
    answered = len(work.journal())
    assert 20 <= answered < 80, "it stopped as soon as it was sure, and kept what it had"


def test_a_bad_answer_is_asked_again_with_another_seed(workspace: Make, models: Callable[..., Path]) -> None:
    quality = {"canary": {"skip": True}, "retries": 12, "retry_temperatures": [0.9, 1.0]}
    work = workspace(model=models(empty_answers=0.4), quality=quality)
    records = prompts(24)
    work.write_prompts(records)
    work.finish()
    completions = check_complete(work, [record["id"] for record in records])
    retried = [record for record in completions if len(record["attempts"]) > 1]
    assert retried, "two in five answers were empty"
    for record in retried:
        seeds = [attempt["seed"] for attempt in record["attempts"]]
        assert len(set(seeds)) == len(seeds)
        assert [attempt["verdict"] for attempt in record["attempts"]][-1] == "ok"
        assert record["sampling"]["temperature"] == (0.9 if len(seeds) == 2 else 1.0)
        assert record["sampling"]["seed"] == seeds[-1]
    check_sent_once(work)


@pytest.fixture
def sample(tmp_path: Path) -> tuple[Config, list[Conversation]]:
    """Eight answered prompts of a model with a tokenizer, with the true counts of their prompt tokens."""
    folder = make_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("{}")
    config = load_config(
        {
            "run": {"results": str(tmp_path / "results")},
            "prompts": {"path": str(tmp_path / "prompts.jsonl")},
            "model": {"source": str(folder)},
            "thinking": {"enabled": True},
        }
    )
    write_json(config.layout.model_manifest, {"folder": str(folder), "entry": str(folder), "digest": "d"})
    tokenizer, terms = load_tokenizer(folder), make_terms(config, "d")
    conversations = []
    for number in range(8):
        messages = [{"role": "user", "content": f"Please tell me all that there is to know of number {number}. " * 9}]
        conversation = Conversation({"id": f"p{number}", "line": number + 1, "messages": messages}, terms)
        tokens = count_prompt_tokens(tokenizer, messages, None, template_arguments(config))
        conversation.answers.append({"usage": {"prompt_tokens": tokens}})
        conversations.append(conversation)
    return config, conversations


def test_the_servers_and_the_models_own_tokenizer_agree(sample: tuple[Config, list[Conversation]]) -> None:
    check = check_prompt_tokens(*sample)
    assert (check["checked"], check["differing"]) == (8, 0)
    judge_prompts(sample[0], check)


def test_a_server_that_cuts_prompts_off_is_caught(sample: tuple[Config, list[Conversation]]) -> None:
    config, conversations = sample
    for conversation in conversations:
        conversation.answers[0]["usage"]["prompt_tokens"] //= 2
    check = check_prompt_tokens(config, conversations)
    assert check["differing"] == 8
    with pytest.raises(UserError, match="8 of 8 sample prompts with another number of tokens"):
        judge_prompts(config, check)
