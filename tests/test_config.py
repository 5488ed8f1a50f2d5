"""The configuration: every key documented, every fault named by its key and in one line, nothing coerced."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import document_config
from shardmill import contract
from shardmill.config import Config, key_paths
from shardmill.errors import UserError
from shardmill.load_config import load_config

ROOT = Path(__file__).parent.parent
SECTIONS = list(Config.model_fields)


def minimal(**sections: Any) -> dict[str, Any]:
    """The least that is valid, with some sections laid over it."""
    data: dict[str, Any] = {"prompts": {"path": "p.jsonl"}, "model": {"source": "m"}, "sampling": {"max_tokens": 64}}
    for name, section in sections.items():
        data[name] = data.get(name, {}) | section if isinstance(section, dict) else section
    return data


def fault(data: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_config(data)
    return str(caught.value)


def with_key(path: str, value: Any) -> dict[str, Any]:
    """A minimal configuration with one key set."""
    data = minimal()
    *above, name = path.split(".")
    section = data
    for part in above:
        section = section.setdefault(part, {})
    section[name] = value
    return data


def annotation(path: str) -> Any:
    model: Any = Config
    for part in path.split("."):
        model = model.model_fields[part].annotation
    return model


# Documentation


def test_every_key_and_section_says_what_it_is():
    def check(model: type[BaseModel], prefix: str) -> None:
        assert (model.__doc__ or "").strip(), model
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                check(field.annotation, f"{prefix}{name}.")
            else:
                assert (field.description or "").strip(), f"{prefix}{name} has no description"

    check(Config, "")


def test_the_documentation_names_every_key():
    text = document_config.config_markdown()
    for path in key_paths():
        section, _, name = path.rpartition(".")
        part = text.split(f"`{section}`\n", 1)[1].split("\n#", 1)[0]
        assert f"| `{name}` |" in part, path


def test_the_generated_pages_are_up_to_date():
    hint = "run `make docs`"
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == document_config.config_markdown(), hint
    assert (ROOT / "schemas" / "config.schema.json").read_bytes() == document_config.config_schema(), hint


@pytest.mark.parametrize(
    "path",
    [ROOT / "config.yaml", *sorted(ROOT.glob("configs/*.yaml"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_shipped_configurations_are_valid(path: Path):
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "source" not in data.get("model", {}):  # such a file is laid over config.yaml
        base = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
        data = {name: base.get(name, {}) | data.get(name, {}) for name in base | data}
    assert load_config(data).prompts.path


def test_defaults_make_a_whole_configuration():
    config = load_config(minimal())
    assert (config.server_count, config.server_names) == (1, ["0"])
    assert str(config.layout.root) == "results/default"
    assert config.sampling.temperature == 1.0
    assert config.thinking.enabled is None


# Unknown keys


def misplaced() -> list[tuple[str, str]]:
    """Every known key, put at the top and into every other section that has no key of its name."""
    return [
        (path, f"{where}.{name}" if where else name)
        for path in key_paths()
        for name in [path.rsplit(".", 1)[-1]]
        for where in ["", *SECTIONS]
        if name not in (annotation(where) if where else Config).model_fields
    ]


def test_a_key_in_the_wrong_section_is_told_its_place():
    for path, place in misplaced():
        message = fault(with_key(place, 1))
        assert message.startswith(f"config: {place}: unknown key, did you mean "), message
        assert f"`{path}`" in message, (place, message)


@pytest.mark.parametrize(
    ("place", "meant"),
    [
        ("samplng", "sampling"),
        ("sampling.temprature", "sampling.temperature"),
        ("sampling.max_token", "sampling.max_tokens"),
        ("servers.prot", "servers.port"),
        ("engine.sglang.context_len", "engine.sglang.context_length"),
        ("temprature", "sampling.temperature"),
        ("servers.temprature", "sampling.temperature"),
        ("llamacpp", "engine.llamacpp"),
        ("servers.sglang", "engine.sglang"),
        ("model.thinking", "thinking"),
    ],
)
def test_a_mistyped_key_is_told_its_name(place: str, meant: str):
    assert f"{place}: unknown key, did you mean `{meant}`?" in fault(with_key(place, {}))


def test_a_key_like_no_other_is_told_what_there_is():
    assert fault(with_key("output.qqqqqq", 1)).startswith(
        "config: output.qqqqqq: unknown key; known here: zstd_level, token_ids"
    )
    assert "known here: run, prompts, shards" in fault(with_key("qqqqqq", 1))


@pytest.mark.parametrize("name", ["str", "bool", "int", "0", "", "a\nb", "a\u2028b", "k" * 500])
@pytest.mark.parametrize("section", ["", "sampling"])
def test_odd_keys_are_named(section: str, name: str):
    data = minimal()
    (data[section] if section else data)[name] = 1
    message = fault(data)
    assert "unknown key" in message
    assert "\n" not in message and "\u2028" not in message
    assert len(message) < 400
    if name.isalnum() and len(name) < 10:
        assert f"config: {section + '.' if section else ''}{name}: unknown key" in message


# Types


WRONG = {int: (True, "10", 1.5, None, [1]), float: (True, "1.5", None, [1.5]), str: (1, True, None, ["a"])}
WRONG[bool] = (1, 0, "true", None)


def test_nothing_is_coerced():
    checked = 0
    for path in key_paths():
        for value in WRONG.get(annotation(path), ()):
            message = fault(with_key(path, value))
            assert message.startswith(f"config: {path}: "), message
            assert message.endswith(f", found {value!r}"), message
            checked += 1
    assert checked > 150


def test_optional_keys_take_null_and_no_other_type():
    for path in key_paths():
        if annotation(path) in (int | None, str | None, bool | None):
            load_config(with_key(path, None) | {"engine": with_key(path, None).get("engine", {})})
            assert fault(with_key(path, {})).startswith(f"config: {path}: expected ")


def test_whole_numbers_are_numbers():
    assert load_config(minimal(sampling={"temperature": 1})).sampling.temperature == 1.0
    one, same = (load_config(minimal(sampling={"temperature": value})) for value in (1, 1.0))
    assert contract.answer_fingerprint(one) == contract.answer_fingerprint(same)


def test_a_choice_of_types_is_one_fault():
    assert fault(minimal(model={"ram_disk": 1})) == "config: model.ram_disk: expected text, true or false, found 1"
    assert load_config(minimal(model={"ram_disk": "/mnt/ram"})).model.ram_disk == "/mnt/ram"
    assert load_config(minimal(model={"ram_disk": False})).model.ram_disk is False


@pytest.mark.parametrize("data", [None, [], "x", 3, [{}]])
def test_what_is_no_mapping_is_refused(data: Any):
    assert "expected a section with keys, found" in fault(data)
    assert f"sampling: expected a section with keys, found {data!r}" in fault(minimal() | {"sampling": data})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("sampling.seed", 2**64),
        ("sampling.max_tokens", 10**30),
        ("sampling.temperature", float("nan")),
        ("servers.linger", float("inf")),
        ("sampling.extra", {"a": float("nan")}),
        ("sampling.extra", {"a": [float("inf")]}),
        ("sampling.extra", {"a": {1: 2}}),
        ("sampling.extra", {"a": {1}}),
        ("sampling.extra", {"a": 10**30}),
        ("sampling.extra", {"a": datetime.date(2026, 11, 30)}),
        ("sampling.extra", {"a": "\ud800"}),
    ],
)
def test_what_json_cannot_hold_is_refused(path: str, value: Any):
    assert fault(with_key(path, value)).startswith(f"config: {path}: ")


def test_a_mapping_within_itself_is_refused():
    endless: dict[str, Any] = {}
    endless["again"] = endless
    assert fault(with_key("sampling.extra", endless)).startswith("config: sampling.extra: ")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-a", "a\n", "a b", "x" * 101, "é"])
def test_a_run_name_is_a_safe_folder_name(name: str):
    assert fault(minimal(run={"name": name})).startswith("config: run.name: ")


# Combinations


def external(*urls: str) -> dict[str, Any]:
    return {"kind": "external", "external": {"urls": list(urls)}}


CONFLICTS = {
    "gpu twice": ({"servers": {"gpus": [0, 0]}}, "servers.gpus: names a GPU twice ([0, 0])"),
    "gpu below 0": ({"servers": {"gpus": [-1]}}, "servers.gpus: names a GPU below 0"),
    "uneven sets": ({"servers": {"gpus": [0, 1, 2], "gpus_per_server": 2}}, "servers.gpus: 3 GPUs cannot be cut"),
    "count and gpus": ({"servers": {"gpus": [0, 1], "count": 3}}, "servers.count: is 3, but `servers.gpus` makes 2"),
    "too many gpus": (
        {"servers": {"gpus": list(range(65))}},
        "servers.gpus: makes 65 servers; the most in one pool is",
    ),
    "no urls": ({"engine": {"kind": "external"}}, "engine.external.urls: is empty"),
    "no url": ({"engine": external("10.0.0.5:30000")}, "engine.external.urls: '10.0.0.5:30000' is no http URL"),
    "bad port": ({"engine": external("http://a:99999")}, "engine.external.urls: 'http://a:99999' is no http URL"),
    "bad host": ({"engine": external("http://[::1")}, "engine.external.urls: 'http://[::1' is no http URL"),
    "url twice": (
        {"engine": external("http://a:1/v1", "http://a:1/")},
        "engine.external.urls: names 'http://a:1' twice",
    ),
    "too many urls": (
        {"engine": external(*(f"http://a:{port}" for port in range(1, 66)))},
        "engine.external.urls: makes 65 servers",
    ),
    "sglang without gpus": ({"engine": {"kind": "sglang"}}, "servers.gpus: is empty; write the GPUs to use"),
    "no room for ports": ({"servers": {"port": 65530, "count": 7}}, "servers.port: 65530 leaves no room for 7 ports"),
    "no room for a prompt": (
        {"engine": {"llamacpp": {"context_length": 64}}},
        "sampling.max_tokens: is 64, which leaves no room for a prompt in `engine.llamacpp.context_length` (64)",
    ),
    "no room for a prompt, sglang": (
        {"engine": {"kind": "sglang", "sglang": {"context_length": 64}}, "servers": {"gpus": [0]}},
        "sampling.max_tokens: is 64, which leaves no room for a prompt in `engine.sglang.context_length` (64)",
    ),
    "extra streams": ({"sampling": {"extra": {"stream": True}}}, "sampling.extra: holds `stream`"),
    "extra thinking": (
        {
            "sampling": {"extra": {"chat_template_kwargs": {"enable_thinking": False}}},
            "thinking": {"enabled": True},
        },
        "sampling.extra: holds `enable_thinking`, which `thinking.enabled` sets",
    ),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_combinations_that_cannot_work_are_refused(case: str):
    sections, expected = CONFLICTS[case]
    message = fault(minimal(**sections))
    assert expected in message
    assert message.count(expected.split(":")[0]) == 1, "one fault, named once"


@pytest.mark.parametrize(
    "sections",
    [
        {"servers": {"gpus": list(range(64))}},
        {"servers": {"port": 65535}},
        {"servers": {"gpus": [0, 1, 2, 3], "gpus_per_server": 2, "count": 2}},
        {"servers": {"port": 65535}, "engine": external("http://a:1", "http://a:2", "https://b/path/v1")},
        {"sampling": {"extra": {"top_k": None, "chat_template_kwargs": {"x": 1}}}, "thinking": {"enabled": True}},
        {"engine": {"llamacpp": {"context_length": 65}}},
    ],
)
def test_combinations_at_the_edge_work(sections: dict[str, Any]):
    load_config(minimal(**sections))


def test_several_faults_are_all_named_at_once():
    message = fault(
        {
            "promts": {},
            "run": {"regenerate": 1},
            "shards": {"size": 0},
            "servers": {"gpus": ["a", 1, None]},
            "sampling": {"temperature": "hot"},
            "model": {"source": "m"},
        }
    )
    for part in (
        "promts: unknown key, did you mean `prompts`?",
        "prompts: missing, and it has no default",
        "run.regenerate: expected true or false, found 1",
        "shards.size: input should be greater than or equal to 1, found 0",
        "servers.gpus.0: expected a whole number, found 'a'",
        "servers.gpus.2: expected a whole number, found None",
        "sampling.temperature: expected a number, found 'hot'",
    ):
        assert part in message


def test_several_conflicts_are_all_named_at_once():
    message = fault(
        minimal(
            servers={"gpus": [0, 0, -1], "gpus_per_server": 2},
            engine={"llamacpp": {"context_length": 64}},
            sampling={"extra": {"n": 2, "messages": []}},
        )
    )
    for part in ("twice", "below 0", "cannot be cut", "no room for a prompt", "`n`", "`messages`"):
        assert part in message


# Whatever a file may hold

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["str", "bool", "\ud800", "a\nb", 10**400])
    | st.dates()
)
KEYS = st.sampled_from([*SECTIONS, *(path.rsplit(".", 1)[-1] for path in key_paths()), "str"]) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.integers(), inner, max_size=4),
    max_leaves=8,
)


def apply(data: dict[str, Any], path: str, value: Any) -> None:
    *above, name = path.split(".")
    for part in above:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            return
    data[name] = value


def check_outcome(data: Any) -> None:
    try:
        config = load_config(data)
    except UserError as error:
        message = str(error)
        assert message.startswith("config: ") and len(message) > len("config: ")
        assert len(message.splitlines()) == 1
        message.encode()
    else:
        # Whatever was let in can be hashed, stored, and read again as the same.
        contract.answer_fingerprint(config)
        assert load_config(config.model_dump()) == config


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_anything_at_all_is_a_configuration_or_a_clear_line(data: Any):
    check_outcome(data)


@settings(max_examples=250, deadline=None)
@given(st.dictionaries(st.sampled_from([*key_paths(), *SECTIONS]), VALUES, max_size=4))
def test_any_values_of_known_keys_are_a_configuration_or_a_clear_line(changes: dict[str, Any]):
    data = minimal()
    for path, value in changes.items():
        if path != "model.chat_template":  # names a file, whose absence is said elsewhere
            apply(data, path, value)
    if isinstance(data["model"], dict):
        data["model"].pop("chat_template", None)
    check_outcome(data)
