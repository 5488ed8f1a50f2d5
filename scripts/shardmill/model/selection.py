"""Which of a model's files a server needs, and which path it is given. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from ..errors import UserError

# Weights in order of preference: a repo often holds the same ones in several formats.
_FORMATS = (".safetensors", ".bin", ".gguf", ".pth", ".pt")
_CONFIGS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_LICENCES = re.compile(r"(license|licence|notice|use_policy)([._-].*)?", re.IGNORECASE)
# States of a training run, and what an image or speech encoder adds to a GGUF model.
_NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|rng_state.*|random_states.*|mmproj.*)\..*", re.IGNORECASE)
_GGUF_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


def choose_files(
    names: Iterable[str], patterns: Iterable[str] = (), *, trust_remote_code: bool = False, prefer_gguf: bool = False
) -> list[str]:
    """The names in a repo to take, sorted.

    With `patterns` (shell style; `*` matches `/` too) what matches one of them; without, the weights
    in one format, configurations, tokenizer and chat templates. Python code is taken only with
    `trust_remote_code`, whatever the patterns say: code that is not there cannot be run.
    """
    known = sorted(name for name in set(names) if trust_remote_code or not name.endswith(".py"))
    if patterns := list(patterns):
        return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]
    weights = _choose_weights(known, prefer_gguf=prefer_gguf)
    return sorted({*weights, *(name for name in known if _is_config(name))})


def _is_config(name: str) -> bool:
    path = PurePosixPath(name)
    if path.suffix in (".py", ".jinja"):
        return True
    return len(path.parts) == 1 and (path.suffix in _CONFIGS or bool(_LICENCES.fullmatch(path.name)))


def _choose_weights(names: list[str], *, prefer_gguf: bool) -> list[str]:
    """Weights of the preferred format, from the top folder where that holds any."""
    by_format = {suffix: _of_format(names, suffix) for suffix in _FORMATS}
    order = (".gguf", *_FORMATS) if prefer_gguf else _FORMATS
    chosen = next((by_format[suffix] for suffix in order if by_format[suffix]), [])
    # Some publishers add all weights once more in their own layout.
    usual = [name for name in chosen if not PurePosixPath(name).name.startswith("consolidated")]
    return usual or chosen


def _of_format(names: list[str], suffix: str) -> list[str]:
    found = [name for name in names if is_weights(name, (suffix,))]
    return [name for name in found if "/" not in name] or found


def is_weights(name: str, suffixes: tuple[str, ...] = _FORMATS) -> bool:
    """Whether a file holds model weights, going by its name."""
    path = PurePosixPath(name)
    return path.suffix in suffixes and not _NO_WEIGHTS.fullmatch(path.name)


def check_model_files(names: list[str], where: str, *, required: Iterable[str] = ()) -> None:
    """Refuse a set of files that no server can load.

    Args:
        names: the files, relative to the model's folder.
        where: what to name in the message.
        required: files that the weights' index names.

    Raises:
        UserError: no weights, or weights missing.
    """
    if not names:
        raise UserError("no file to take", where=where, hint="check `model.source` and `model.files`")
    if not any(is_weights(name) for name in names):
        shown = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
        raise UserError(f"holds no model weights (found: {shown})", where=where, hint="check the source")
    if all(name.endswith(".gguf") for name in names if is_weights(name)):
        return
    if "config.json" not in names:
        raise UserError("holds weights but no config.json", where=where, hint="give the folder that holds both")
    if missing := sorted(set(required) - set(names)):
        raise UserError(
            f"the weights' index names {len(missing)} files that are not there, such as {missing[0]}",
            where=where,
            hint="complete the copy, or correct `model.files`",
        )


def entry_name(names: list[str], where: str, *, prefer_gguf: bool = False) -> str | None:
    """Which of the files a server is given: the single GGUF model, or None for the whole folder.

    Where there are other weights too, that is the folder, or with `prefer_gguf` the GGUF model.

    Raises:
        UserError: several GGUF models, and nothing that says which one is meant.
    """
    weights = [name for name in names if is_weights(name)]
    models = [name for name in weights if name.endswith(".gguf")]
    if not models or (len(models) < len(weights) and not prefer_gguf):
        return None
    parts = {name: _GGUF_PART.fullmatch(name) for name in models}
    first = [name for name, part in parts.items() if part is None or int(part["part"]) == 1]
    if len(first) != 1:
        shown = ", ".join(sorted(first or models)[:6])
        raise UserError(
            f"holds {len(first)} GGUF models ({shown}{' ...' if len(first) > 6 else ''})",
            where=where,
            hint=f'name the one to use, such as model.files: ["{sorted(first or models)[0]}"]',
        )
    if (part := parts[first[0]]) and len(models) != int(part["parts"]):
        raise UserError(f"holds {len(models)} of the {int(part['parts'])} parts of {first[0]}", where=where)
    return first[0]
