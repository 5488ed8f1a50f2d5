"""The contract: what decides an answer cannot change unnoticed, and what does not, may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmill import contract
from shardmill.config import Config, key_paths
from shardmill.contract import Contract, answer_fingerprint, answer_settings, request_fingerprint
from shardmill.errors import UserError
from shardmill.files import write_bytes, zstd_writer
from shardmill.journal import Journal
from shardmill.load_config import load_config


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config_with(changes: dict[str, Any] | None = None) -> Config:
    """A configuration with some keys, by their paths, changed."""
    data: dict[str, Any] = {
        "run": {"name": "r"},
        "prompts": {"path": "p.jsonl"},
        "model": {"source": "hf://a/b@main"},
        "sampling": {"max_tokens": 64},
    }
    for path, value in (changes or {}).items():
        *above, name = path.split(".")
        section = data
        for part in above:
            section = section.setdefault(part, {})
        section[name] = value
    return load_config(data)


def refused(changes: dict[str, Any], call: Any = contract.check) -> str:
    with pytest.raises(UserError) as caught:
        call(config_with(changes))
    text = str(caught.value)
    assert text.startswith("run r: ")
    assert len(text.splitlines()) == 1
    return text


def run_with_answers(changes: dict[str, Any] | None = None, digest: str = "d" * 64) -> Config:
    """A run that was started and holds an answer."""
    config = config_with(changes)
    contract.check(config)
    contract.lock(config)
    contract.lock_model(config, digest)
    with Journal(config.layout.journal("00000")) as journal:
        journal.append({"id": "p", "fingerprint": "f", "kind": "answer"})
    return config


TEMPLATE = "chat.jinja"

# Every key that decides an answer, with two values for it as the refusal shows them.
DECIDES: dict[str, tuple[Any, Any, str, str]] = {
    "model.source": ("hf://a/b@main", "hf://a/c@main", "hf://a/b@main", "hf://a/c@main"),
    "prompts.field": (None, "question", "null", "question"),
    "prompts.id_field": ("id", "uid", "id", "uid"),
    "prompts.turns": ("last", "all", "last", "all"),
    "prompts.system": (None, "Be brief.", "null", "Be brief."),
    "sampling.temperature": (0.7, 0.8, "0.7", "0.8"),
    "sampling.top_p": (1.0, 0.95, "1.0", "0.95"),
    "sampling.top_k": (-1, 20, "-1", "20"),
    "sampling.min_p": (0.0, 0.1, "0.0", "0.1"),
    "sampling.repetition_penalty": (1.0, 1.1, "1.0", "1.1"),
    "sampling.presence_penalty": (0.0, 0.5, "0.0", "0.5"),
    "sampling.frequency_penalty": (0.0, 0.5, "0.0", "0.5"),
    "sampling.max_tokens": (64, 65, "64", "65"),
    "sampling.stop": ([], ["\n"], "[]", '["\\n"]'),
    "sampling.seed": (0, 1, "0", "1"),
    "thinking.enabled": (None, True, "null", "true"),
    "thinking.template_key": ("enable_thinking", "thinking", "enable_thinking", "thinking"),
}
OTHERWISE = {"model.chat_template", "sampling.extra"}  # a file and a mapping: see below

# Keys of the same sections that decide nothing.
HARMLESS = {
    "prompts.path",
    "prompts.duplicates",
    "model.files",
    "model.ram_disk",
    "model.trust_remote_code",
    "model.download_stall",
    "model.copy_threads",
}
# In all other sections no key decides an answer.
DECIDING_SECTIONS = {"prompts", "model", "sampling", "thinking"}
# Later attempts are drawn as this says; each answer tells how it was drawn.
ATTEMPTS = {"quality.retry_temperatures"}
DECIDES_NOTHING = sorted(
    HARMLESS | {path for path in key_paths() if path.split(".")[0] not in DECIDING_SECTIONS} - ATTEMPTS
)
ELSEWHERE = {"shards.size", "run.name", "run.results"}  # refused, or another run's


def harmless_change(path: str) -> Config:
    """A configuration whose value at `path` is another one, past all validation: any other at all."""

    def changed(section: Any, names: list[str]) -> Any:
        name, *below = names
        value = changed(getattr(section, name), below) if below else object()
        return section.model_copy(update={name: value})

    return changed(config_with(), path.split("."))


def test_every_key_of_the_deciding_sections_is_accounted_for():
    """Whoever adds a key says here whether it decides an answer."""
    keys = {path for path in key_paths() if path.split(".")[0] in DECIDING_SECTIONS}
    assert keys == DECIDES.keys() | OTHERWISE | HARMLESS
    settings = answer_settings(config_with())
    assert {f"{section}.{key}" for section in settings for key in settings[section]} == DECIDES.keys() | OTHERWISE


# The fingerprint


@pytest.mark.parametrize("path", DECIDES)
def test_what_decides_an_answer_is_in_the_fingerprint(path: str):
    old, new, _, _ = DECIDES[path]
    assert answer_fingerprint(config_with({path: old})) != answer_fingerprint(config_with({path: new}))
    assert answer_fingerprint(config_with({path: new})) == answer_fingerprint(config_with({path: new}))


@pytest.mark.parametrize("path", DECIDES_NOTHING)
def test_what_decides_nothing_is_not(path: str):
    changed = harmless_change(path)
    assert changed != config_with()
    assert answer_fingerprint(changed) == answer_fingerprint(config_with())
    assert answer_settings(changed) == answer_settings(config_with())


def test_a_chat_template_counts_by_its_content():
    Path(TEMPLATE).write_text("{{ messages }}")
    Path("copy.jinja").write_text("{{ messages }}")
    one = config_with({"model.chat_template": TEMPLATE})
    before = answer_fingerprint(one)
    assert before != answer_fingerprint(config_with())
    assert before == answer_fingerprint(config_with({"model.chat_template": "copy.jinja"}))
    Path(TEMPLATE).write_text("{{ messages }} ")
    assert before != answer_fingerprint(one)


@pytest.mark.parametrize("name", ["missing.jinja", ".", ""])
def test_a_chat_template_that_cannot_be_read_is_a_clear_line(name: str):
    with pytest.raises(UserError, match=r"model\.chat_template .*: cannot be read"):
        answer_fingerprint(config_with({"model.chat_template": name}))


def test_a_request_is_known_by_all_that_is_asked():
    messages = [{"role": "user", "content": "é\u2028"}]
    asked = ["a" * 32, "d" * 64, messages, None, {}]
    others = [
        ["b" * 32, *asked[1:]],
        [asked[0], "e" * 64, *asked[2:]],
        [*asked[:2], [*messages, {"role": "assistant", "content": ""}], *asked[3:]],
        [*asked[:2], [{"role": "system", "content": "é\u2028"}], *asked[3:]],
        [*asked[:3], [], {}],
        [*asked[:3], [{"type": "function"}], {}],
        [*asked[:4], {"temperature": 0.5}],
    ]
    prints = [request_fingerprint(*request) for request in [asked, *others]]
    assert len(set(prints)) == len(prints)
    assert all(len(fingerprint) == 32 for fingerprint in prints)
    again = [{"content": "é\u2028", "role": "user"}]
    assert request_fingerprint("a" * 32, "d" * 64, again, None, {}) == prints[0], "the order of keys is none"


# What is refused


@pytest.mark.parametrize("path", DECIDES)
def test_a_change_is_named_from_what_to_what(path: str):
    old, new, shown_old, shown_new = DECIDES[path]
    run_with_answers({path: old})
    contract.check(config_with({path: old}))
    text = refused({path: new})
    assert f"run r: {path} changed from {shown_old} to {shown_new}, but this run holds answers" in text
    assert text.endswith("use another `run.name`, or set `run.regenerate: true` to make every shard again")
    assert f"{path} changed from {shown_new} to {shown_old}," in refused_back(path, old, new)
    contract.check(config_with({path: new, "run.regenerate": True}))
    contract.check(config_with({path: new, "run.name": "another"}))


def refused_back(path: str, old: Any, new: Any) -> str:
    """The refusal of the old value once the new one was locked."""
    contract.lock(config_with({path: new, "run.regenerate": True}))
    contract.check(config_with({path: new}))
    return refused({path: old})


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 2}, "sampling.extra.a changed from 1 to 2"),
        ({"a": 1}, {"a": 1.0}, "sampling.extra.a changed from 1 to 1.0"),
        ({"a": 1}, {"a": True}, "sampling.extra.a changed from 1 to true"),
        ({}, {"top_k": None}, "sampling.extra.top_k changed from nothing to null"),
        ({"top_k": None}, {}, "sampling.extra.top_k changed from null to nothing"),
        ({"a": {"b": [1]}}, {"a": {"b": [2]}}, "sampling.extra.a.b changed from [1] to [2]"),
        ({"a": {}}, {"a": []}, "sampling.extra.a changed from {} to []"),
        ({"a": ""}, {"a": "x"}, 'sampling.extra.a changed from "" to x'),
        ({"a": {"b": 1}}, {}, 'sampling.extra.a changed from {"b":1} to nothing'),
    ],
)
def test_a_change_within_extra_is_named(old: dict[str, Any], new: dict[str, Any], expected: str):
    """Whatever makes another fingerprint is refused: what Python calls equal is not always the same to a server."""
    one, other = (config_with({"sampling.extra": extra}) for extra in (old, new))
    assert answer_fingerprint(one) != answer_fingerprint(other)
    run_with_answers({"sampling.extra": old})
    contract.check(config_with({"sampling.extra": dict(reversed(old.items()))}))
    assert expected + ", but" in refused({"sampling.extra": new})
    contract.lock(config_with({"sampling.extra": new, "run.regenerate": True}))
    contract.check(config_with({"sampling.extra": new}))


def test_several_changes_are_all_named():
    run_with_answers()
    text = refused({"sampling.seed": 5, "thinking.enabled": False, "sampling.extra": {"x": 1}})
    for part in ("sampling.seed changed from 0 to 5", "thinking.enabled changed from null to false", "extra.x changed"):
        assert part in text


def test_long_texts_are_shown_where_they_differ_and_on_one_line():
    prompt = "You are a helpful assistant.\nThink first.\n" * 20
    run_with_answers({"prompts.system": prompt + "Answer in French.\u2028" + "x" * 500})
    text = refused({"prompts.system": prompt + "Answer in German.\u2028" + "x" * 500})
    assert "French" in text and "German" in text
    assert len(text) < 500
    contract.lock(config_with({"prompts.system": prompt, "run.regenerate": True}))
    assert "!!!" in refused({"prompts.system": prompt + "!!!"}), "what was added to the end is shown too"


def test_an_edited_chat_template_is_refused():
    Path(TEMPLATE).write_text("one")
    run_with_answers({"model.chat_template": TEMPLATE})
    Path(TEMPLATE).write_text("two")
    assert "model.chat_template changed from " in refused({"model.chat_template": TEMPLATE})


@pytest.mark.parametrize("path", [path for path in DECIDES_NOTHING if path not in ELSEWHERE])
def test_what_decides_nothing_may_change(path: str):
    run_with_answers()
    contract.check(harmless_change(path))


# Shards


def test_another_shard_size_is_refused_unless_asked_for():
    run_with_answers()
    text = refused({"shards.size": 500})
    assert "run r: shards.size changed from 1000 to 500, but this run holds results" in text
    assert "`run.recut: true`" in text
    for allowed in ("run.recut", "run.regenerate"):
        contract.check(config_with({"shards.size": 500, allowed: True}))
    assert "shards.size" in refused({"shards.size": 500}), "a check alone changes nothing"
    contract.lock(config_with({"shards.size": 500, "run.recut": True}))
    contract.check(config_with({"shards.size": 500}))
    assert "from 500 to 1000" in refused({})


def test_recut_allows_no_other_answers():
    run_with_answers()
    assert "sampling.seed" in refused({"shards.size": 500, "sampling.seed": 1, "run.recut": True})


# What counts as a run that holds answers


def test_a_run_without_answers_may_change_in_any_way():
    contract.check(config_with())
    contract.lock(config_with())
    contract.check(config_with({"sampling.seed": 1, "shards.size": 5}))
    Journal(config_with().layout.journal("00000")).close()
    contract.check(config_with({"sampling.seed": 1, "shards.size": 5}))  # it was opened, but no answer ever came
    contract.lock(config_with({"sampling.seed": 1}))
    assert Contract.read(config_with().layout).answers["sampling"]["seed"] == 1


def test_completions_without_their_journals_are_answers_too():
    """Journals may be removed to save room; the answers made of them are not to be made again unasked."""
    config = run_with_answers()
    with zstd_writer(config.layout.completions("00000")) as stream:
        stream.write(b"{}\n")
    config.layout.journal("00000").unlink()
    assert "sampling.seed" in refused({"sampling.seed": 1})


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"null", b"3", b'{"answers":{},"shard_size":1,"model_digest":null}']
)
def test_a_damaged_contract_is_not_taken_for_none(content: bytes):
    """Going on without it would let any change through."""
    config = run_with_answers()
    write_bytes(config.layout.contract, content)
    for call in (contract.check, contract.lock, lambda config: contract.lock_model(config, "x")):
        with pytest.raises(UserError, match=r"results/r/run\.json: holds no contract of a run"):
            call(config)


def test_locking_again_writes_nothing():
    config = run_with_answers()
    before = config.layout.contract.stat()
    contract.lock(config)
    contract.lock_model(config, "d" * 64)
    after = config.layout.contract.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


# The model


def test_a_model_with_other_content_is_refused():
    run_with_answers(digest="1" * 64)

    def lock_other(config: Config) -> None:
        contract.lock_model(config, "2" * 64)

    text = refused({}, lock_other)
    assert "the files of hf://a/b@main changed (digest 111111111111 became 222222222222)" in text
    assert Contract.read(config_with().layout).model_digest == "1" * 64
    contract.lock_model(config_with({"run.regenerate": True}), "2" * 64)
    assert Contract.read(config_with().layout).model_digest == "2" * 64
    contract.lock_model(config_with(), "2" * 64)


def test_a_model_may_change_before_there_are_answers():
    contract.lock(config_with())
    contract.lock_model(config_with(), "1" * 64)
    contract.lock_model(config_with(), "2" * 64)
    assert Contract.read(config_with().layout).model_digest == "2" * 64


def test_the_model_stays_locked_while_its_source_does():
    run_with_answers()
    Path(TEMPLATE).write_text("one")
    for changes in ({"sampling.seed": 1}, {"shards.size": 5}, {"model.chat_template": TEMPLATE}):
        contract.lock(config_with(changes | {"run.regenerate": True}))
        # Nothing downloads the model again, so nothing would lock it again.
        assert Contract.read(config_with().layout).model_digest == "d" * 64
    contract.lock(config_with({"model.source": "hf://a/c@main", "run.regenerate": True}))
    assert Contract.read(config_with().layout).model_digest is None
    contract.lock_model(config_with({"model.source": "hf://a/c@main"}), "e" * 64)
    assert Contract.read(config_with().layout).model_digest == "e" * 64
