"""A model that lies on this machine: described where it is, never copied or changed."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UserError
from .selection import choose_files
from .source import KEY, LocalSource


def absolute_path(source: LocalSource) -> Path:
    """The source as an absolute path. Symlinks stay: a link that is moved on to a new version means just that."""
    return Path(os.path.abspath(Path(source.path).expanduser()))


def list_local(source: LocalSource, patterns: list[str]) -> tuple[Path, list[str]]:
    """The model's folder and the names of its files.

    Hidden files and folders are left out: a clone's `.git` holds all weights once more. Symlinks are
    followed, and a file behind one is known by the link's name.

    Raises:
        UserError: nothing there, nothing usable in it, or a link that leads nowhere.
    """
    path = absolute_path(source)
    if path.is_file():
        return path.parent, [path.name]
    if not path.is_dir():
        what = "is neither a file nor a folder" if path.exists() else f"no such file or folder (looked for {path})"
        raise UserError(what, where=f"{KEY} {source.path}", hint=_hub_hint(source.path))
    names = sorted(_walk(path, path, set()))
    return path, choose_files(names, patterns, trust_remote_code=True) if patterns else names


def _hub_hint(text: str) -> str:
    looks_like_repo = text.count("/") == 1 and not text.startswith((".", "/", "~"))
    return f"for the hub's repo of that name write hf://{text}" if looks_like_repo else "check the path"


def _walk(root: Path, folder: Path, above: set[tuple[int, int]]) -> list[str]:
    """Names of all files below `folder`, relative to `root`; `above` are the folders on the way, against loops."""
    names = []
    try:
        status = folder.stat()
        children = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(folder)) from None
    key = (status.st_dev, status.st_ino)
    if key in above:
        raise UserError("a symlink leads back to a folder above it", where=str(folder), hint="remove the link")
    for child in children:
        if child.name.startswith("."):
            continue
        if child.is_dir():
            names += _walk(root, child, above | {key})
        elif child.is_file():
            names.append(child.relative_to(root).as_posix())
        elif child.is_symlink():
            raise UserError("is a symlink that leads nowhere", where=str(child), hint="complete the model's folder")
    return names
