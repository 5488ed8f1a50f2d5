"""The training view: rows, loss masks, gates and card, with real tokenizers that are made here in a second.

Masks are compared with a slow reference that shares no code with the library: it is told by the test what the model
said, and marks characters.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardmill.config import Config
from shardmill.errors import UserError
from shardmill.load_config import load_config
from shardmill.training import tokens as tokens_module
from shardmill.training.card import plain, size_category
from shardmill.training.report import Distribution
from shardmill.training.tokenizer import count_prompt_tokens, load_tokenizer, template_arguments
from shardmill.training.view import make_view
from tests.pipeline import Workspace, check_complete, prompts, read_records

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Like Qwen3's: thoughts before the last user turn are left out; with thinking off the prompt holds an empty one.
QWEN = """\
{%- if tools -%}
{{- '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' -}}
{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' and loop.index0 > ns.last -%}
{{- '<think>\n' + (m.reasoning_content or '').strip() + '\n</think>\n\n' -}}
{%- endif -%}
{{- (m.content or '') | trim('\n') -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif -%}
{%- endif -%}
"""
PLAIN = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
# The prompt opens the thought, as that of Qwen3.5 does.
OPENED = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' and m.reasoning_content -%}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif -%}
"""
CORPUS = [
    "The mill grinds wheat. The user asks what the mill grinds, so the answer is wheat, or rye in a bad year.\n\n",
    "def grind(grain: str) -> str:\n    return grain.lower() + ' flour'\n\n\nprint(grind('Rye'))\n",
    '<|im_start|>user\n{"name": "capital", "arguments": {"of": "Peru"}}<|im_end|>\n<|im_start|>assistant\n',
] * 4
TEXTS = [
    "Wheat, and rye in a bad year.",
    "הטחנה טוחנת חיטה, ולא \u202eשיפון\u202c.",
    "one\u2028two\u2029three\u0085four\x0bfive\x1c",
    "小麦です。\n\n- 麦\n- 米 🌾👩‍🌾",
    "def f(x):\n\n\n    return x  \n```\n\t| a | b |",
    "e\u0301 \u200b\ufeff NUL\x00 end",
]


def qwen_words() -> pre_tokenizers.PreTokenizer:
    """How Qwen cuts text into words: line breaks belong to the blanks before them."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    pattern = words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level() -> Tokenizer:
    """A byte-level BPE like Qwen's, trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = qwen_words()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """A BPE over code points that writes spaces as U+2581 and puts one before the text, like Llama 2's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *SPECIAL, *fallback], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def make_model(folder: Path, template: str = QWEN, make: Callable[[], Tokenizer] = byte_level) -> Path:
    """A model folder with tokenizer files and no weights."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in ("<think>", "</think>")])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen")


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def completion(name: str, *messages: dict[str, Any], turns: int = 0, **more: Any) -> dict[str, Any]:
    """A completion of the dataset; `turns`: answers of this run in it, 0 as with `prompts.turns: last`."""
    record = {
        "id": name,
        "messages": list(messages),
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 20, "completion_tokens": 40},
    }
    if turns:
        answer = {"finish_reason": "stop", "usage": record["usage"]}
        record["turns"] = [dict(answer) for _ in range(turns)]
    return record | more


def single(name: str, answer: str, thought: str | None = "Mills grind wheat.", **more: Any) -> dict[str, Any]:
    said = message("assistant", answer, **({"reasoning_content": thought} if thought is not None else {}))
    return completion(name, message("user", f"What does mill {name} grind?"), said, **more)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class View:
    """A run whose dataset is there, to make views of.

    Args:
        records: the completions; None: they are there already.
        sections: of the configuration.
    """

    def __init__(self, folder: Path, model: Path, records: Iterable[dict[str, Any]] | None, **sections: Any) -> None:
        self.folder = folder / "results" / "t"
        self.settings: dict[str, Any] = {
            "run": {"name": "t", "results": str(folder / "results")},
            "prompts": {"path": "prompts.jsonl"},
            "model": {"source": str(model)},
            "thinking": {"enabled": True},
            **sections,
        }
        self.model = model
        if records is not None:
            self.write(records)

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        dataset = self.folder / "dataset"
        dataset.mkdir(parents=True, exist_ok=True)
        count = 0
        with (
            (dataset / "completions.jsonl.zst").open("wb") as handle,
            zstandard.ZstdCompressor().stream_writer(handle) as stream,
        ):
            for record in records:
                stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                count += 1
        source = {"source": str(self.model), "kind": "local", "folder": str(self.model), "revision": None}
        (self.folder / "model").mkdir(exist_ok=True)
        (self.folder / "model" / "manifest.json").write_text(json.dumps(source))
        manifest = {
            "shardmill": "0",
            "counts": {"input": count, "accepted": count, "rejected": 0, "unusable": 0, "retries": 0},
            "verdicts": {"ok": count},
            "usage": {"completion_tokens": 40 * count},
            "prompts": {"path": "prompts.jsonl"},
            "model": source,
            "model_digest": "ab" * 32,
            "engine": {"kind": "sglang"},
            "config": load_config(self.settings).model_dump(),
            "dataset": {"records": count, "sha256": sha256(dataset / "completions.jsonl.zst")},
        }
        (dataset / "manifest.json").write_text(json.dumps(manifest))

    def config(self, **training: Any) -> Config:
        return load_config(self.settings | {"output": {"training": {"formats": ["tokens"], **training}}})

    def make(self, **training: Any) -> dict[str, Any]:
        return make_view(self.config(**training))

    def error(self, **training: Any) -> str:
        with pytest.raises(UserError) as caught:
            self.make(**training)
        left = [path.name for path in (self.folder / "dataset" / "training").glob("*")]
        assert left == [], "a view that was refused left files behind"
        return str(caught.value)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the Parquet file, checked for what holds of each."""
        rows = pq.read_table(self.folder / "dataset" / "training" / "tokens.parquet").to_pylist()
        for row in rows:
            assert len(row["input_ids"]) == len(row["loss_mask"]) == row["length"]
            assert set(row["loss_mask"]) <= {0, 1}
        return rows

    def conversations(self) -> list[dict[str, Any]]:
        return read_records(self.folder / "dataset" / "training" / "conversations.jsonl.zst")


def reference(model: Path, *parts: str | tuple[str]) -> tuple[list[int], list[int]]:
    """Token ids and mask of a text given in parts; those in tuples are the model's."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text, mine = "", []
    for part in parts:
        piece, is_mine = (part[0], True) if isinstance(part, tuple) else (part, False)
        text += piece
        mine += [is_mine] * len(piece)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(text[a:b] for a, b in encoding.offsets).replace(" ", "") != "" or not text
    mask = []
    for start, end in encoding.offsets:
        inside = mine[start : max(end, start + 1)]
        assert len(set(inside)) == 1, "a token of the reference lies on a border"
        mask.append(int(inside[0]))
    return encoding.ids, mask


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def thinking(thought: str, answer: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{answer}<|im_end|>"


def check(row: dict[str, Any], model: Path, *parts: str | tuple[str]) -> None:
    ids, mask = reference(model, *parts)
    assert row["input_ids"] == ids
    assert row["loss_mask"] == mask


HEAD = "<|im_start|>assistant\n"


class TestMasks:
    def test_single_turns_in_all_scripts(self, tmp_path: Path, model: Path) -> None:
        view = View(tmp_path, model, [single(f"r{n}", text, f"So: {text}") for n, text in enumerate(TEXTS)])
        report = view.make()
        rows = view.rows()
        assert [row["id"] for row in rows] == [f"r{n}" for n in range(len(TEXTS))]
        for n, (row, text) in enumerate(zip(rows, TEXTS, strict=True)):
            said = thinking(f"So: {text}".strip(), text.strip("\n"))
            check(row, model, user(f"What does mill r{n} grind?") + HEAD, (said,))
        assert report["supervised_tokens"]["total"] == sum(sum(row["loss_mask"]) for row in rows)
        assert report["length"]["max"] == max(row["length"] for row in rows)
        assert report["unmasked"] == {} and report["notes"]["rendered_by_the_template"] == len(TEXTS)

    def test_thinking_off(self, tmp_path: Path, model: Path) -> None:
        """The empty thought belongs to the prompt: nothing of it is supervised."""
        view = View(tmp_path, model, [single("a", TEXTS[0], None)], thinking={"enabled": False})
        view.make()
        prompt = user("What does mill a grind?") + HEAD + "<think>\n\n</think>\n\n"
        check(view.rows()[0], model, prompt, (TEXTS[0] + "<|im_end|>",))

    def test_a_thought_that_the_prompt_opens(self, tmp_path: Path) -> None:
        model = make_model(tmp_path / "model", OPENED)
        view = View(tmp_path, model, [single("a", "Rye.", "Hm."), single("b", "Rye and wheat.", None)])
        report = view.make(max_no_thought_rate=1, min_supervised_tokens=1)
        first, second = view.rows()
        check(first, model, user("What does mill a grind?") + HEAD + "<think>\n", ("Hm.\n</think>\n\nRye.<|im_end|>",))
        # The template does not write the thought that this answer lacks, though the prompt had opened one.
        check(second, model, user("What does mill b grind?") + HEAD, ("Rye and wheat.<|im_end|>",))
        assert report["notes"]["prompt_changed_by_the_answer"] == 1

    def test_a_template_that_knows_no_thoughts_gets_them_in_the_content(self, tmp_path: Path) -> None:
        model = make_model(tmp_path / "model", PLAIN)
        view = View(tmp_path, model, [single("a", "Rye.", "Hm.")])
        view.make()
        check(view.rows()[0], model, user("What does mill a grind?") + HEAD, (thinking("Hm.", "Rye."),))

    def test_a_template_with_another_name_for_thoughts(self, tmp_path: Path) -> None:
        model = make_model(tmp_path / "model", QWEN.replace("reasoning_content", "thinking"))
        view = View(tmp_path, model, [single("a", "Rye.", "Hm.")])
        view.make()
        check(view.rows()[0], model, user("What does mill a grind?") + HEAD, (thinking("Hm.", "Rye."),))

    def test_a_token_that_would_span_the_border(self, tmp_path: Path) -> None:
        """The server read the prompt's last newline as a token of its own; so must the row."""
        model = make_model(tmp_path / "model", PLAIN)
        view = View(tmp_path, model, [single("a", "\nRye.", None)], thinking={"enabled": None})
        view.make(min_supervised_tokens=1)
        row = view.rows()[0]
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        prompt, answer = (
            tokenizer.encode(text).ids for text in (user("What does mill a grind?") + HEAD, "\nRye.<|im_end|>")
        )
        whole = tokenizer.encode(user("What does mill a grind?") + HEAD + "\nRye.<|im_end|>").ids
        assert whole != prompt + answer, "no token spans the border: the case is not the one meant"
        assert row["input_ids"] == prompt + answer
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(answer)

    def test_a_tokenizer_that_puts_a_space_before_the_text(self, tmp_path: Path) -> None:
        model = make_model(tmp_path / "model", make=metaspace)
        view = View(tmp_path, model, [single(f"r{n}", text.strip(), f"So: {n}") for n, text in enumerate(TEXTS[:2])])
        view.make()
        for n, row in enumerate(view.rows()):
            said = thinking(f"So: {n}", TEXTS[n].strip())
            check(row, model, user(f"What does mill r{n} grind?") + HEAD, (said,))

    def test_answers_that_were_cut_off_teach_no_end(self, tmp_path: Path, model: Path) -> None:
        cut = [
            single("text", "Wheat, and", "Hm.", finish_reason="length"),
            single("thought", "", "Mills grind", finish_reason="length"),
        ]
        view = View(tmp_path, model, cut)
        view.make(min_supervised_tokens=1)
        text, thought = view.rows()
        check(text, model, user("What does mill text grind?") + HEAD, ("<think>\nHm.\n</think>\n\nWheat, and",))
        check(thought, model, user("What does mill thought grind?") + HEAD, ("<think>\nMills grind",))

    def test_tool_calls(self, tmp_path: Path, model: Path) -> None:
        tool = {"type": "function", "function": {"name": "capital", "parameters": {"type": "object"}}}
        call = {"id": "c1", "type": "function", "function": {"name": "capital", "arguments": '{"of": "Perú"}'}}
        asked = message("user", "What is the capital?")
        record = completion(
            "a", asked, message("assistant", "", reasoning_content="Ask.", tool_calls=[call]), tools=[tool]
        )
        record["finish_reason"] = "tool_calls"
        view = View(tmp_path, model, [record])
        view.make(formats=["conversations", "tokens"])
        said = '\n<tool_call>\n{"name": "capital", "arguments": {"of": "Perú"}}\n</tool_call>'
        prompt = f"<|im_start|>system\n{json.dumps(tool)}<|im_end|>\n" + user("What is the capital?") + HEAD
        check(view.rows()[0], model, prompt, (thinking("Ask.", said),))
        line = view.conversations()[0]
        assert json.loads(line["tools"]) == [tool]
        assert json.loads(line["conversations"][1]["tool_calls"]) == [call]
        assert "tool_calls" not in line["conversations"][0]


TWO_TURNS = (
    message("system", "Be brief."),
    message("user", "What?"),
    message("assistant", "Wheat.", reasoning_content="First."),
    message("user", "And?"),
    message("assistant", "Rye.", reasoning_content="Second."),
)
START = "<|im_start|>system\nBe brief.<|im_end|>\n" + user("What?") + HEAD


class TestTurns:
    def test_whole_with_loss_on_the_last(self, tmp_path: Path, model: Path) -> None:
        view = View(tmp_path, model, [completion("a", *TWO_TURNS, turns=2)])
        view.make()
        (row,) = view.rows()
        check(row, model, START + "Wheat.<|im_end|>\n" + user("And?") + HEAD, (thinking("Second.", "Rye."),))
        assert row["turn"] == 1

    @pytest.mark.parametrize("settings", [{"multi_turn": "per_turn"}, {"loss_on": "all"}])
    def test_a_row_per_turn(self, tmp_path: Path, model: Path, settings: dict[str, Any]) -> None:
        """Also where loss on all turns is asked for in one row: the template strips the first thought there."""
        view = View(tmp_path, model, [completion("a", *TWO_TURNS, turns=2)])
        report = view.make(**settings)
        first, second = view.rows()
        check(first, model, START, (thinking("First.", "Wheat."),))
        check(second, model, START + "Wheat.<|im_end|>\n" + user("And?") + HEAD, (thinking("Second.", "Rye."),))
        assert [(row["id"], row["turn"]) for row in (first, second)] == [("a", 0), ("a", 1)]
        assert report["notes"].get("conversations_split_by_turn", 0) == ("loss_on" in settings)

    def test_loss_on_all_in_one_row(self, tmp_path: Path) -> None:
        model = make_model(tmp_path / "model", OPENED)
        view = View(tmp_path, model, [completion("a", *TWO_TURNS, turns=2)])
        report = view.make(loss_on="all")
        (row,) = view.rows()
        said = [
            f"{thought}\n</think>\n\n{text}<|im_end|>" for thought, text in (("First.", "Wheat."), ("Second.", "Rye."))
        ]
        opened = "<think>\n"
        check(row, model, START + opened, (said[0],), "\n" + user("And?") + HEAD + opened, (said[1],))
        assert report["notes"].get("conversations_split_by_turn", 0) == 0

    def test_loss_on_all_with_a_turn_that_was_cut_off(self, tmp_path: Path) -> None:
        model = make_model(tmp_path / "model", OPENED)
        record = completion("a", *TWO_TURNS, turns=2)
        record["turns"][0]["finish_reason"] = "length"
        view = View(tmp_path, model, [record])
        view.make(loss_on="all")
        (row,) = view.rows()
        first, opened = "First.\n</think>\n\nWheat.", "<think>\n"
        between = "<|im_end|>\n" + user("And?") + HEAD + opened
        check(row, model, START + opened, (first,), between, ("Second.\n</think>\n\nRye.<|im_end|>",))

    def test_loss_on_all_where_later_turns_change_earlier_ones(self, tmp_path: Path) -> None:
        """All words are still there, but not as the model saw them when it answered the first turn."""
        find = "{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}\n"
        mark = "{%- if m.role == 'user' and m != users[-1] %}{{ '[old] ' }}{% endif -%}\n"
        model = make_model(tmp_path / "model", find + OPENED.replace("{{- m.content", mark + "{{- m.content"))
        view = View(tmp_path, model, [completion("a", *TWO_TURNS[1:], turns=2)])
        report = view.make(loss_on="all")
        assert report["notes"]["conversations_split_by_turn"] == 1
        first, second = view.rows()
        opened = "<think>\n"
        check(first, model, user("What?") + HEAD + opened, ("First.\n</think>\n\nWheat.<|im_end|>",))
        before = user("[old] What?") + HEAD + "Wheat.<|im_end|>\n" + user("And?") + HEAD + opened
        check(second, model, before, ("Second.\n</think>\n\nRye.<|im_end|>",))

    def test_loss_on_all_with_a_token_over_a_border(self, tmp_path: Path) -> None:
        """It shows only when the conversation is tokenized: then, too, it becomes a row per turn."""
        model = make_model(tmp_path / "model", PLAIN)
        turns = (message("user", "What?"), message("assistant", "\nWheat."), message("user", "And?"))
        record = completion("a", *turns, message("assistant", "Rye."), turns=2)
        view = View(tmp_path, model, [record], thinking={"enabled": None})
        report = view.make(loss_on="all", min_supervised_tokens=1)
        assert report["notes"]["conversations_split_by_turn"] == 1 and report["samples"] == 2
        first, second = view.rows()
        prompt, answer = (reference(model, text)[0] for text in (user("What?") + HEAD, "\nWheat.<|im_end|>"))
        assert first["input_ids"] == prompt + answer and sum(first["loss_mask"]) == len(answer)
        check(second, model, user("What?") + HEAD + "\nWheat.<|im_end|>\n" + user("And?") + HEAD, ("Rye.<|im_end|>",))

    def test_turns_that_the_input_brought_are_never_supervised(self, tmp_path: Path, model: Path) -> None:
        given = [message(m["role"], m["content"]) for m in TWO_TURNS[:4]]
        view = View(tmp_path, model, [completion("a", *given, TWO_TURNS[4])])
        for settings in ({"loss_on": "all"}, {"multi_turn": "per_turn"}):
            view.make(**settings)
            (row,) = view.rows()
            check(row, model, START + "Wheat.<|im_end|>\n" + user("And?") + HEAD, (thinking("Second.", "Rye."),))

    def test_conversations(self, tmp_path: Path, model: Path) -> None:
        odd = single("b", TEXTS[2], TEXTS[1])
        view = View(tmp_path, model, [completion("a", *TWO_TURNS, turns=2), odd])
        view.make(formats=["conversations"])
        whole, other = view.conversations()
        assert (whole["id"], whole["status"]) == ("a", "success")
        assert [(m["role"], m["content"], m["reasoning_content"]) for m in whole["conversations"]] == [
            (m["role"], m["content"], m.get("reasoning_content", "")) for m in TWO_TURNS
        ]
        assert other["conversations"][1] == message("assistant", TEXTS[2], reasoning_content=TEXTS[1])
        view.make(formats=["conversations"], multi_turn="per_turn")
        first, second, other = view.conversations()
        assert [row["id"] for row in (first, second, other)] == ["a:0", "a:1", "b:0"]
        assert [m["reasoning_content"] for m in first["conversations"]] == ["", "", "First."]
        assert [m["reasoning_content"] for m in second["conversations"]] == ["", "", "", "", "Second."]
        assert len({tuple(m) for row in (first, second, other) for m in row["conversations"]}) == 1


class TestEngineIds:
    """Token ids that the engine returned are the truth; the template only checks them."""

    def ids(self, model: Path, text: str) -> list[int]:
        return Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids

    def record(self, model: Path, name: str, said: str | None = None, prompt: str | None = None, **more: Any) -> Any:
        said = thinking("Hm.", "Rye.") if said is None else said
        prompt = user(f"What does mill {name} grind?") + HEAD if prompt is None else prompt
        ids = {"prompt": self.ids(model, prompt), "completion": self.ids(model, said)}
        return single(name, "Rye.", "Hm.", token_ids=ids, **more)

    def test_they_are_taken_as_they_are(self, tmp_path: Path, model: Path) -> None:
        # The same text in other tokens than the tokenizer would choose: byte by byte.
        said = thinking("Hm.", "Rye.").removesuffix("<|im_end|>")
        bytewise = [token for letter in said for token in self.ids(model, letter)] + self.ids(model, "<|im_end|>")
        record = self.record(model, "a")
        record["token_ids"]["completion"] = bytewise
        without_prompt = self.record(model, "b")
        without_prompt["token_ids"]["prompt"] = None
        view = View(tmp_path, model, [record, without_prompt])
        report = view.make()
        first, second = view.rows()
        assert first["input_ids"] == record["token_ids"]["prompt"] + bytewise
        assert first["loss_mask"] == [0] * len(record["token_ids"]["prompt"]) + [1] * len(bytewise)
        check(second, model, user("What does mill b grind?") + HEAD, (thinking("Hm.", "Rye."),))
        assert report["token_ids"] == {"checked": 2, "mismatches": 0}
        assert report["notes"]["token_ids_of_the_engine"] == 2
        assert report["notes"]["prompts_rendered_by_the_template"] == 1

    def test_a_missing_end_token_is_added(self, tmp_path: Path, model: Path) -> None:
        said = thinking("Hm.", "Rye.").removesuffix("<|im_end|>")
        cut = self.record(model, "b", said, finish_reason="length")
        view = View(tmp_path, model, [self.record(model, "a", said), cut])
        report = view.make()
        first, second = view.rows()
        check(first, model, user("What does mill a grind?") + HEAD, (thinking("Hm.", "Rye."),))
        check(second, model, user("What does mill b grind?") + HEAD, (said,))
        assert report["notes"]["end_tokens_added"] == 1 and report["token_ids"]["mismatches"] == 0

    def test_white_space_that_the_server_cut_off_is_no_mismatch(self, tmp_path: Path, model: Path) -> None:
        said = "<think>\n\nHm.\n\n</think>\nRye.\n<|im_end|>"
        view = View(tmp_path, model, [self.record(model, "a", said)])
        report = view.make()
        check(view.rows()[0], model, user("What does mill a grind?") + HEAD, (said,))
        assert report["token_ids"]["mismatches"] == 0
        assert report["notes"]["blanks_differ_from_the_template"] == 1

    def test_another_prompt_than_the_templates(self, tmp_path: Path, model: Path) -> None:
        """What a server with another template, or with thinking off, would have read."""
        prompt = user("What does mill a grind?") + HEAD + "<think>\n\n</think>\n\n"
        view = View(tmp_path, model, [self.record(model, "a", prompt=prompt)])
        text = view.error()
        assert "1 of 1 samples were made by the engine from other tokens" in text
        assert "a: prompt, token" in text and "<think>" in text
        assert view.make(max_mismatch_rate=1)["token_ids"]["mismatches"] == 1

    def test_another_answer_than_the_records(self, tmp_path: Path, model: Path) -> None:
        view = View(tmp_path, model, [self.record(model, "a", thinking("Hm.", "Rie."))])
        text = view.error()
        assert "answer, character" in text and "ie." in text and "Rye." in text

    def test_a_share_is_checked_and_the_first_hundred(self, tmp_path: Path, model: Path) -> None:
        view = View(tmp_path, model, [self.record(model, f"r{n}") for n in range(300)])
        assert view.make(check_share=0)["token_ids"]["checked"] == 100
        assert 130 < view.make(check_share=0.3)["token_ids"]["checked"] < 190
        assert view.make(check_share=1)["token_ids"]["checked"] == 300

    def test_only_the_last_turn_has_them(self, tmp_path: Path, model: Path) -> None:
        record = completion("a", *TWO_TURNS, turns=2)
        prompt = START + "Wheat.<|im_end|>\n" + user("And?") + HEAD
        said = "<think>\nSecond.\n</think>\n\nRye. <|im_end|>"
        record["token_ids"] = {"prompt": self.ids(model, prompt), "completion": self.ids(model, said)}
        view = View(tmp_path, model, [record])
        view.make(multi_turn="per_turn")
        first, second = view.rows()
        check(first, model, START, (thinking("First.", "Wheat."),))
        check(second, model, prompt, (said,))


class TestGates:
    def test_the_disaster(self, tmp_path: Path, model: Path) -> None:
        """87 % of the answers are empty, because thinking was off: six supervised tokens of boilerplate."""
        records = [
            single(f"r{n}", "" if n % 100 < 87 else TEXTS[0], None if n % 100 < 87 else "Mills grind wheat.")
            for n in range(400)
        ]
        view = View(tmp_path, model, records)
        text = view.error(formats=["conversations", "tokens"])
        assert text.startswith("training view: 348 of 400 samples hold fewer than 8 supervised tokens.")
        assert "thinking was off" in text and "87.0%" in text and "limit 1.0%  !" in text
        assert not (view.folder / "dataset" / "README.md").exists()
        report = view.make(max_short_rate=1, max_no_thought_rate=1)
        assert report["supervised_tokens"]["median"] == report["supervised_tokens"]["p1"] == 5
        assert report["short"] == {"below": 8, "samples": 348, "rate": 0.87, "limit": 1.0}

    def test_the_disaster_without_a_tokenizer(self, tmp_path: Path, model: Path) -> None:
        usage = {"prompt_tokens": 20, "completion_tokens": 6}
        records = [single(f"r{n}", "", None, **({"usage": usage} if n < 87 else {})) for n in range(100)]
        view = View(tmp_path, model, records, thinking={"enabled": None})
        assert "87 of 100 samples hold fewer than 8" in view.error(formats=["conversations"])
        view.make(formats=["conversations"], min_supervised_tokens=6)

    def test_it_stops_early(self, tmp_path: Path, model: Path) -> None:
        view = View(tmp_path, model, [single(f"r{n}", "", None) for n in range(5000)])
        assert "(seen after 2,000 of 5,000)" in view.error() or "(seen after 1,000 of 5,000)" in view.error()

    def test_thoughts_are_missing(self, tmp_path: Path, model: Path) -> None:
        long = TEXTS[0] * 3
        records = [single(f"r{n}", long, " \n" if n < 5 else "Mills grind.") for n in range(100)]
        view = View(tmp_path, model, records)
        assert "5 of 100 samples hold no thought, although thinking is on" in view.error()
        assert view.make(max_no_thought_rate=0.05)["without_thought"]["samples"] == 5
        view.settings["thinking"] = {"enabled": None}
        view.make()

    @pytest.mark.parametrize(
        ("template", "reason"),
        [
            (QWEN.replace("(m.content or '') |", "(m.content or '') | upper |"), "content_changed"),
            (QWEN.replace("(m.reasoning_content or '').strip()", "''"), "thought_lost"),
            (QWEN.replace("'<|im_start|>' + m.role", "'<|im_start|>' + loop.length ~ m.role"), "history_changed"),
            ("{{ raise_exception('no such thing') }}", "template_refused"),
        ],
    )
    def test_templates_that_alter_what_was_said(self, tmp_path: Path, template: str, reason: str) -> None:
        if reason == "thought_lost":  # nor does it show thoughts in the content
            template = template.replace("(m.content or '')", "(m.content or '').split('</think>')[-1]")
        model = make_model(tmp_path / "model", template)
        view = View(tmp_path, model, [single("a", "Rye.", "Hm. So rye.")])
        text = view.error()
        assert "cannot be masked" in text and f"left out, {reason.replace('_', ' ')}: 1" in text
        assert "no sample is left" in view.error(max_short_rate=1)

    def test_a_few_that_cannot_be_masked_are_counted(self, tmp_path: Path, model: Path) -> None:
        records = [single(f"r{n}", TEXTS[0]) for n in range(99)]
        broken = completion("bad", message("user", "x"), message("assistant", "x", tool_calls=[{"function": {}}]))
        view = View(tmp_path, model, [*records, broken])
        report = view.make()
        assert report["unmasked"] == {"template_refused": 1} and report["samples"] == 99
        assert report["short"]["rate"] == 0.01
        assert report["examples"]["template_refused"][0].startswith("bad: ")


class TestLength:
    def test_policies(self, tmp_path: Path, model: Path) -> None:
        records = [single(f"r{n}", "wheat " * n, "Hm.") for n in (1, 20, 40)]
        view = View(tmp_path, model, records)
        view.make()
        full = view.rows()
        limit = full[1]["length"]
        report = view.make(max_length=limit)
        assert view.rows() == full[:2]
        assert report["too_long"] == {
            "max_length": limit,
            "dropped": 1,
            "truncated": 0,
            "truncated_to_nothing": 0,
        }
        report = view.make(max_length=limit, too_long="truncate")
        rows = view.rows()
        assert rows[:2] == full[:2] and rows[2]["length"] == limit
        assert rows[2]["input_ids"] == full[2]["input_ids"][:limit]
        assert rows[2]["loss_mask"] == full[2]["loss_mask"][:limit]
        assert report["too_long"]["truncated"] == 1 and report["samples"] == 3

    def test_prompts_that_fill_all_of_it(self, tmp_path: Path, model: Path) -> None:
        long = completion("long", message("user", "wheat " * 99), message("assistant", "Rye.", reasoning_content="Hm."))
        view = View(tmp_path, model, [long, single("a", TEXTS[0])])
        report = view.make(max_length=90, too_long="truncate")
        assert [row["id"] for row in view.rows()] == ["a"]
        assert report["too_long"]["truncated_to_nothing"] == 1
        assert "no sample is left" in View(tmp_path / "2", model, [long]).error(max_length=90)


class TestFiles:
    def test_row_groups(self, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tokens_module, "GROUP_ROWS", 10)
        monkeypatch.setattr(tokens_module, "BATCH_ROWS", 7)
        records = [single(f"r{n}", TEXTS[n % len(TEXTS)], f"Thought {n}.") for n in range(45)]
        view = View(tmp_path, model, records)
        view.make()
        file = pq.ParquetFile(view.folder / "dataset" / "training" / "tokens.parquet")
        assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [10, 10, 10, 10, 5]
        assert str(file.schema_arrow.field("input_ids").type) == "list<element: int32 not null>"
        assert str(file.schema_arrow.field("loss_mask").type) == "list<element: int8 not null>"
        assert [row["id"] for row in view.rows()] == [record["id"] for record in records]

    def test_a_dataset_that_is_not_the_manifests(self, tmp_path: Path, model: Path) -> None:
        view = View(tmp_path, model, [single("a", TEXTS[0]), single("b", TEXTS[1])])
        path = view.folder / "dataset" / "completions.jsonl.zst"
        content = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
        path.write_bytes(zstandard.ZstdCompressor().compress(content.replace(b"Mills", b"Malls")))
        assert "hash differs" in view.error()
        manifest = json.loads(path.with_name("manifest.json").read_text())
        manifest["dataset"] |= {"sha256": sha256(path), "records": 3}
        path.with_name("manifest.json").write_text(json.dumps(manifest))
        assert "holds 2 completions, but its manifest says 3" in view.error()
        path.unlink()
        assert "is missing" in view.error()

    def test_a_format_that_is_no_longer_asked_for_goes(self, tmp_path: Path, model: Path) -> None:
        view = View(tmp_path, model, [single("a", TEXTS[0])])
        folder = view.folder / "dataset" / "training"
        view.make(formats=["conversations", "tokens"])
        assert {path.name for path in folder.iterdir()} == {"conversations.jsonl.zst", "tokens.parquet", "report.json"}
        view.make(formats=["conversations"])
        assert {path.name for path in folder.iterdir()} == {"conversations.jsonl.zst", "report.json"}


class TestCard:
    def test_what_it_says(self, tmp_path: Path, model: Path) -> None:
        view = View(tmp_path, model, [single("a", TEXTS[0])])
        view.make(formats=["conversations", "tokens"], license="apache-2.0")
        text = (view.folder / "dataset" / "README.md").read_text()
        head = yaml.safe_load(text.split("---\n")[1])
        assert head["license"] == "apache-2.0" and head["size_categories"] == ["n<1K"]
        files = {item["config_name"]: item["data_files"] for item in head["configs"]}
        assert set(files) == {"completions", "conversations", "tokens"}
        assert all((view.folder / "dataset" / name).exists() for name in files.values())
        for said in (
            "1 completions of qwen with thinking on",
            "| temperature | 1.0 |",
            "| ok | 1 | 100.00% |",
            "ab" * 32,
        ):
            assert said in text
        assert str(tmp_path) not in text, "paths of this machine are nobody's business"

    def test_the_licence_is_left_open(self, tmp_path: Path, model: Path) -> None:
        view = View(tmp_path, model, [single("a", TEXTS[0])])
        view.make(formats=["conversations"])
        text = (view.folder / "dataset" / "README.md").read_text()
        assert "license" not in yaml.safe_load(text.split("---\n")[1])
        assert "Left to the publisher" in text

    def test_nothing_in_it_becomes_markup(self, tmp_path: Path, model: Path) -> None:
        evil = "x | y\n---\nlicense: mit <img src=x> [a](http://b) `c` \u202e*d*"
        view = View(tmp_path, model, [single("a", TEXTS[0])], prompts={"path": "p|q.jsonl", "system": evil})
        path = view.folder / "dataset" / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["verdicts"] = {evil: 1}
        manifest["prompts"]["path"] = f"/data/{evil.replace('/', '')}"
        path.write_text(json.dumps(manifest))
        view.make(formats=["conversations"], license=evil)
        text = (view.folder / "dataset" / "README.md").read_text()
        head, body = re.fullmatch(r"---\n(.*?)^---\n(.*)", text, re.DOTALL | re.MULTILINE).groups()
        assert yaml.safe_load(head)["license"] == evil
        assert "\u202e" not in body and "\\u202e" in body.replace("\\\\", "\\")
        unescaped = re.sub(r"\\.", "", body)
        assert "<img" not in unescaped and "](http" not in unescaped and "`c`" not in unescaped
        rows = [line for line in unescaped.splitlines() if line.startswith("| ") and "license: mit" in line]
        assert len(rows) == 3 and {row.count("|") for row in rows} == {3, 4}

    def test_plain_and_sizes(self) -> None:
        assert plain("a|b\u2028<c>") == "a\\|b\\\\u2028\\<c\\>"
        assert plain(["x"]) == '\\["x"\\]'
        assert [size_category(n) for n in (0, 999, 1000, 914_000, 10**6)] == [
            "n<1K",
            "n<1K",
            "1K<n<10K",
            "100K<n<1M",
            "1M<n<10M",
        ]


class TestTokenizer:
    def test_counts(self, model: Path) -> None:
        tokenizer = load_tokenizer(model)
        config = load_config(
            {"prompts": {"path": "x"}, "model": {"source": str(model)}, "thinking": {"enabled": False}}
        )
        arguments = template_arguments(config)
        assert arguments == {"enable_thinking": False}
        ids, _ = reference(model, START + "Wheat.<|im_end|>\n" + user("And?") + HEAD + "<think>\n\n</think>\n\n")
        assert count_prompt_tokens(tokenizer, TWO_TURNS[:4], None, arguments) == len(ids)
        assert count_prompt_tokens(tokenizer, [{"role": None}], None, {}) is None
        assert count_prompt_tokens(None, TWO_TURNS[:4], None, {}) is None

    def test_none_and_broken(self, tmp_path: Path, model: Path) -> None:
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        assert load_tokenizer(tmp_path) is None
        assert load_tokenizer(tmp_path / "nowhere") is None
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(UserError, match="cannot be loaded"):
            load_tokenizer(tmp_path)

    def test_another_template(self, tmp_path: Path, model: Path) -> None:
        path = tmp_path / "template.jinja"
        path.write_text("{{ messages[0].content }}")
        tokenizer = load_tokenizer(model, chat_template=str(path))
        assert count_prompt_tokens(tokenizer, [message("user", "<|im_end|><|im_end|>")], None, {}) == 2
        with pytest.raises(UserError, match=r"model\.chat_template .*nowhere"):
            load_tokenizer(model, chat_template=str(tmp_path / "nowhere"))

    def test_what_a_run_needs(self, tmp_path: Path, model: Path) -> None:
        view = View(tmp_path, tmp_path, [single("a", TEXTS[0])])
        assert "brings no tokenizer files" in view.error()
        bare = make_model(tmp_path / "bare", "")
        assert "brings no chat template" in View(tmp_path / "2", bare, [single("a", TEXTS[0])]).error()


class TestConfig:
    def refused(self, training: dict[str, Any], source: str = "model") -> str:
        with pytest.raises(UserError) as caught:
            load_config({"prompts": {"path": "x"}, "model": {"source": source}, "output": {"training": training}})
        return str(caught.value)

    @pytest.mark.parametrize(
        "source",
        ["tiny.gguf", "folder/Q4.GGUF", f"pypi://a==1/b/c.gguf#sha256={'0' * 64}", "model-00001-of-00002.gguf"],
    )
    def test_tokens_of_a_gguf(self, source: str) -> None:
        text = self.refused({"formats": ["tokens"]}, source)
        assert "output.training.formats: asks for `tokens`, but a GGUF file brings no tokenizer" in text
        load_config({"prompts": {"path": "x"}, "model": {"source": source}})

    def test_the_rest(self) -> None:
        assert "of use only with `tokens`" in self.refused({"formats": ["conversations"], "max_length": 5})
        assert "names a format twice" in self.refused({"formats": ["tokens", "tokens"]})
        assert "output.training.format" in self.refused({"format": ["tokens"]})


def test_percentiles_are_exact() -> None:
    rng = random.Random(5)
    for size in (1, 2, 3, 7, 99, 100, 101, 1000):
        values = [rng.randrange(50) for _ in range(size)]
        distribution = Distribution()
        for value in values:
            distribution.add(value)
        found, ordered = distribution.summary(), sorted(values)
        for p, name in ((1, "p1"), (5, "p5"), (25, "p25"), (50, "median"), (75, "p75"), (95, "p95")):
            least = next(v for v in ordered if sum(x <= v for x in values) * 100 >= p * size)
            assert found[name] == least, (size, name)
        assert (found["min"], found["max"], found["total"]) == (ordered[0], ordered[-1], sum(values))
    assert Distribution().summary()["median"] is None


# The whole pipeline


def tokenizer_of_gguf(gguf_file: Path, folder: Path) -> Path:
    """A model folder with the GGUF file and, beside it, its own tokenizer and template as a repo would have them."""
    fields = gguf.GGUFReader(gguf_file).fields
    words = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = qwen_words()
    tokenizer.decoder = decoders.ByteLevel()
    control, own = ([w for w, k in zip(words, kinds, strict=True) if k == kind] for kind in (3, 4))
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in own])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    made.chat_template = fields["tokenizer.chat_template"].contents()
    made.save_pretrained(folder)
    (folder / gguf_file.name).write_bytes(gguf_file.read_bytes())
    return folder


def test_a_run_with_a_training_view(
    workspace: Callable[..., Workspace], models: Callable[..., Path], tmp_path: Path
) -> None:
    """Real answers of a real server; its own count of prompt tokens is what the local tokenizer counts."""
    model = tokenizer_of_gguf(models(), tmp_path / "model")
    run = workspace(model=model, prompts={"turns": "all"})
    # Stripped, because llama.cpp's own Jinja and Python's do not agree on whether U+001C is white space.
    records = [{"id": f"r{n}", "turns": [text.strip(), "And then?"]} for n, text in enumerate(TEXTS[:4])]
    run.write_prompts(records)
    run.configure(output={"training": {"formats": ["conversations", "tokens"], "multi_turn": "per_turn"}})
    result = run.finish()
    assert result.jobs["training_view"] == 1
    made = check_complete(run, [record["id"] for record in records])
    tokenizer = load_tokenizer(model)
    for record in made:
        before = record["messages"][:-1]
        counted = count_prompt_tokens(tokenizer, before, None, {"enable_thinking": True})
        assert counted == record["usage"]["prompt_tokens"]
    rows = pq.read_table(run.path("dataset", "training", "tokens.parquet")).to_pylist()
    lines = read_records(run.path("dataset", "training", "conversations.jsonl.zst"))
    assert [f"{row['id']}:{row['turn']}" for row in rows] == [line["id"] for line in lines]
    assert [line["id"] for line in lines] == [f"r{n}:{turn}" for n in range(4) for turn in (0, 1)]
    for row, line in zip(rows, lines, strict=True):
        said = line["conversations"][-1]
        head = "".join(
            f"<|im_start|>{m['role']}\n{m['content'].strip()}<|im_end|>\n" for m in line["conversations"][:-1]
        )
        answer = f"{said['reasoning_content'].strip()}\n</think>\n\n{said['content'].strip()}<|im_end|>"
        check(row, model, head + HEAD + "<think>\n", (answer,))
    report = run.json("dataset", "training", "report.json")
    assert report["samples"] == 8 and report["completions"] == 4
    assert "supervised tokens" in run.path("logs", "dataset", "training.log").read_text()
    assert (run.path("dataset", "README.md")).exists()
    assert run.run().did_nothing
    # The settings of the view make the view again, and nothing else.
    run.configure(output={"training": {"multi_turn": "whole"}})
    assert run.finish().jobs == {"training_view": 1}
    run.configure(output={"training": {"min_supervised_tokens": 10_000}})
    line = run.run().error()
    assert "hold fewer than 10000 supervised tokens" in line
    assert not run.path("dataset", "training", "tokens.parquet").exists()
    check_complete(run, [record["id"] for record in records])


def test_a_run_of_a_gguf_alone(finished: Workspace) -> None:
    finished.configure(output={"training": {"formats": ["tokens"]}})
    assert "a GGUF file brings no tokenizer files" in finished.run("-n").error()
    finished.configure(output={"training": {"formats": ["conversations"]}})
    assert finished.finish().jobs == {"training_view": 1}
    lines = read_records(finished.path("dataset", "training", "conversations.jsonl.zst"))
    assert [line["id"] for line in lines] == [record["id"] for record in prompts(20)]
    assert all(line["conversations"][-1]["reasoning_content"] for line in lines)
