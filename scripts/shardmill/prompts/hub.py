"""Prompts from a dataset of the Hugging Face hub: fetched once, at a commit, into one local file.

From then on they are a local prompts file like any other: planning stays offline, and a run never mixes
two commits of a dataset.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..config import Config
from ..errors import UserError
from ..files import canonical_json, read_json_or_none, sha256_hex, write_json, zstd_writer
from ..layout import slug
from ..logs import get_logger
from ..model import inventory
from ..model.hub import fetch_repo
from ..model.hub_files import FetchJob, stored_commit
from ..model.locks import FileLock
from .source import WHERE, Batch, check_unchanged, iter_batches, open_source

logger = get_logger(__name__)

FORM = "hf://datasets/owner/name@revision/path/in/repo.parquet"
_DATASET = re.compile(
    r"hf://datasets/(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^/]+))?/(?P<pattern>.+)", re.ASCII
)


@dataclass(frozen=True)
class DatasetSource:
    """Files of a dataset repo, by a pattern (`data/train-*.parquet`), at a branch, tag or commit."""

    repo: str
    revision: str
    pattern: str


def is_remote(path: str) -> bool:
    """Whether `prompts.path` names files of a hub, or means to."""
    return path.lower().startswith("hf:")


def parse_dataset(path: str) -> DatasetSource:
    """Parse the remote form of `prompts.path`; a revision with slashes has them quoted (`refs%2Fpr%2F1`).

    Raises:
        UserError: showing the right form.
    """
    match = _DATASET.fullmatch(path.strip())
    if not match:
        raise UserError(f"{path} names no files of a hub dataset", where=WHERE, hint=f"write {FORM}; * may stand in it")
    return DatasetSource(match["repo"], unquote(match["revision"] or "main"), match["pattern"])


def prompts_file(config: Config) -> str:
    """The local prompts file: the user's own, or what is fetched from the hub."""
    return str(config.layout.fetched_prompts) if is_remote(config.prompts.path) else config.prompts.path


def is_fetched(config: Config) -> bool:
    """Whether the prompts are here: a local file, or all of what the configuration names on the hub."""
    if not is_remote(config.prompts.path):
        return True
    parse_dataset(config.prompts.path)
    record, path = read_json_or_none(config.layout.fetched_record), config.layout.fetched_prompts
    if not isinstance(record, dict) or record.get("source") != config.prompts.path:
        return False
    return path.exists() and path.stat().st_size == record.get("bytes")


def fetch_prompts(config: Config) -> dict[str, Any]:
    """Download the dataset's files, verify them, and write their records, in order of file names, as one file.

    Memory: one batch of records. Returns the record, written last: `source` (as configured), `repo`, `revision` (the
    commit), `files` (name, size, sha256), `records` and `bytes` (of the local file).

    Raises:
        UserError: with what is wrong and what to do, in one line.
    """
    source, layout = parse_dataset(config.prompts.path), config.layout
    where = f"{WHERE} {config.prompts.path}"
    key = sha256_hex(canonical_json(["dataset", source.repo, source.pattern]))[:12]
    store = layout.model_store / f"{slug(source.repo.replace('/', '--'))}-{key}"
    store.mkdir(parents=True, exist_ok=True)
    store = Path(os.path.abspath(store))
    with FileLock(store / "lock", waiting=f"waiting for another run that downloads the same dataset ({store})") as lock:
        job = FetchJob(source.repo, source.revision, str(store), (source.pattern,), kind="dataset")
        state = stored_commit(store, source.revision)
        commit = source.revision
        if not state or inventory.first_problem(store / commit, state["files"]):
            commit = fetch_repo(
                job, lock, stall=config.model.download_stall, where=where, on_commit=lambda commit: None
            )
            state = stored_commit(store, commit) or {}
        records = _write_lines(layout.fetched_prompts, [store / commit / entry["name"] for entry in state["files"]])
    record = {
        "source": config.prompts.path,
        "repo": source.repo,
        "revision": commit,
        "files": [{key: entry[key] for key in ("name", "size", "sha256")} for entry in state["files"]],
        "records": records,
        "bytes": layout.fetched_prompts.stat().st_size,
    }
    write_json(layout.fetched_record, record)
    logger.info("%d prompts of %s at %s", records, source.repo, commit)
    return record


def _write_lines(path: Path, files: list[Path]) -> int:
    count = 0
    with zstd_writer(path) as stream:
        for batch in _batches(files):
            stream.write(batch.text)
            count += len(batch.lines)
    return count


def _batches(files: list[Path]) -> Iterator[Batch]:
    for file in files:
        source = open_source(str(file))
        yield from iter_batches(source)
        check_unchanged(source)
