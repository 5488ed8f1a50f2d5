"""What the hub says of a repo: its commit, its files, and which of them to take."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import orjson

from ..errors import UserError
from ..files import read_json_or_none
from .selection import check_model_files, choose_files, entry_name
from .source import is_safe_name


@dataclass(frozen=True)
class FetchJob:
    """What to download, and to where.

    Args:
        repo: owner/name.
        revision: branch, tag or commit.
        store: folder of this repo and selection; the files go to `<store>/<commit>/`.
        patterns, trust_remote_code, prefer_gguf: see `selection.choose_files`.
        kind: `model`, or `dataset`, of which exactly the files that match a pattern are taken.
    """

    repo: str
    revision: str
    store: str
    patterns: tuple[str, ...] = ()
    trust_remote_code: bool = False
    prefer_gguf: bool = False
    kind: str = "model"

    def to_json(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @staticmethod
    def from_json(text: str) -> FetchJob:
        return FetchJob(**orjson.loads(text))


def state_file(store: Path, commit: str) -> Path:
    """The store's own manifest of a commit: which of its files are there and verified."""
    return store / f"{commit}.json"


def stored_commit(store: Path, commit: str) -> dict[str, Any] | None:
    """The store's manifest of a commit, if all of it has come once."""
    state = read_json_or_none(state_file(store, commit))
    return state if isinstance(state, dict) and state.get("complete") else None


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it. `sha256` is known for LFS files, `git_sha1` (of the blob) for the others."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None


def list_repo(job: FetchJob) -> tuple[str, list[RemoteFile]]:
    """The commit that the revision means now, and the files of that commit."""
    from huggingface_hub import HfApi

    info = HfApi().repo_info(job.repo, repo_type=job.kind, revision=job.revision, files_metadata=True, timeout=30)
    if not re.fullmatch(r"[0-9a-f]{40}", info.sha or ""):
        raise UserError("the hub names no commit", hint="check HF_ENDPOINT")
    if re.fullmatch(r"[0-9a-f]{40}", job.revision) and info.sha != job.revision:
        raise UserError(f"the hub answers with commit {info.sha} when asked for {job.revision}")
    files = []
    for sibling in info.siblings or []:
        sha256 = sibling.lfs["sha256"] if sibling.lfs else None
        size = sibling.lfs["size"] if sibling.lfs else sibling.size
        files.append(RemoteFile(sibling.rfilename, -1 if size is None else size, sha256, sibling.blob_id))
    return info.sha, files


def select(listed: list[RemoteFile], job: FetchJob) -> list[RemoteFile]:
    """The files to take.

    Raises:
        UserError: a name that leads out of the folder, or a file that cannot be verified.
    """
    for file in listed:
        if file.name.startswith("/") or ".." in re.split(r"[/\\]", file.name):
            raise UserError(f"the repo holds a file named {file.name!r}, which leads out of its folder; refused")
    names = _names(listed, job)
    chosen = [file for file in listed if file.name in set(names)]
    for file in chosen:
        if not is_safe_name(file.name):
            raise UserError(f"the repo holds a file with an unsafe name, {file.name!r}; refused")
        if file.size < 0 or not (file.sha256 or file.git_sha1):
            raise UserError(f"the hub lists no size or hash for {file.name}, so it cannot be verified")
    if job.kind == "dataset":
        if not chosen:
            raise UserError(f"the repo holds no file {', '.join(job.patterns)}", hint="see its files on the hub")
        return chosen
    if not chosen:
        asked = f" that match model.files {list(job.patterns)}" if job.patterns else ""
        raise UserError(f"the repo holds no files{asked}", hint="check `model.source` and `model.files`")
    # Asked before the first byte comes: a repo of twenty quantisations is a long download.
    check_model_files(names, "")
    entry_name(names, "")
    return chosen


def _names(listed: list[RemoteFile], job: FetchJob) -> list[str]:
    names = [file.name for file in listed]
    if job.kind == "dataset":
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in job.patterns)]
    return choose_files(names, job.patterns, trust_remote_code=job.trust_remote_code, prefer_gguf=job.prefer_gguf)


def safe_target(folder: Path, name: str) -> Path:
    """Where a file of the repo goes, its folders made; never through a symlink."""
    path = folder
    for part in name.split("/")[:-1]:
        path = path / part
        path.mkdir(exist_ok=True)
        if path.is_symlink():
            raise UserError(f"{path} is a symlink, which could lead anywhere; refused", hint="remove it")
    return folder / name
