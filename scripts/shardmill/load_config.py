"""Loading a configuration, and saying in a user's words what is wrong with it."""

from __future__ import annotations

import difflib
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from .config import Config, Conflicts, key_paths
from .errors import UserError
from .overrides import merge


def read_settings(path: str, default: str = "config.yaml") -> dict[str, Any]:
    """The settings of a configuration file, as a run with `--configfile path` sees them.

    A file that names its own `model.source` stands alone; one that does not is laid over `default`.

    Raises:
        OSError, yaml.YAMLError: if a file cannot be read.
    """
    with open(path, encoding="utf-8") as handle:
        settings = yaml.safe_load(handle) or {}
    if not isinstance(settings, dict) or "source" in (settings.get("model") or {}):
        return settings
    with open(default, encoding="utf-8") as handle:
        whole = yaml.safe_load(handle) or {}
    merge(whole, settings)
    return whole


def load_config(data: dict[str, Any]) -> Config:
    """Validate a configuration as read from YAML.

    Raises:
        UserError: naming every faulty key by its path, and what to write instead.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problems = [line for problem in error.errors() for line in _explain(problem)]
        raise UserError("; ".join(dict.fromkeys(problems)), where="config") from None


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section with keys",
    "model_attributes_type": "a section with keys",
}


def _explain(problem: Any) -> list[str]:
    """One pydantic error as `path: what is wrong, and what to write`; a validator of ours may name several."""
    location, kind, value = problem["loc"], problem["type"], problem["input"]
    path, field = _path(location), _field_at(location[:-1])
    if field and not _section_of(field) and location[-1] in ("str", "bool"):  # the members of a union
        return [f"{_path(location[:-1])}: expected text, true or false, found {_shown(value)}"]
    if kind == "extra_forbidden":
        nearest = [f"`{known}`" for known in _nearest_keys(location)]
        return [f"{path}: unknown key" + (f", did you mean {' or '.join(nearest)}?" if nearest else _known(location))]
    if kind == "missing":
        return [f"{path}: missing, and it has no default"]
    if kind == "value_error":
        error = problem["ctx"]["error"]
        if isinstance(error, Conflicts):
            return [f"{key}: {text}" for key, text in error.problems]
        return [f"{path}: {error}"]
    if kind in _EXPECTED:
        return [f"{path}: expected {_EXPECTED[kind]}, found {_shown(value)}"]
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return [f"{path}: {message}, found {_shown(value)}"]


def _path(location: tuple[Any, ...]) -> str:
    """A key's place as people write it; what cannot stand on one line is escaped."""
    is_plain = [isinstance(part, str) and 0 < len(part) <= 60 and part.isprintable() for part in location]
    parts = [part if plain else _shown(part) for part, plain in zip(location, is_plain, strict=True)]
    return ".".join(parts) or "the whole of it"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: an int of more digits than Python will print
        text = f"a {type(value).__name__}"
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 60 else text[:57] + "..."


def _field_at(path: tuple[Any, ...]) -> FieldInfo | None:
    """The known field at `path`, be it a section or a value."""
    model: type[BaseModel] | None = Config
    field = None
    for part in path:
        field = model.model_fields.get(part) if model else None
        if field is None:
            return None
        model = _section_of(field)
    return field


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _section_at(path: tuple[Any, ...]) -> type[BaseModel] | None:
    """The model that holds the keys at `path`."""
    if not path:
        return Config
    field = _field_at(path)
    return _section_of(field) if field else None


def _nearest_keys(location: tuple[Any, ...]) -> list[str]:
    """The known keys, as full paths, that a misplaced or mistyped one most likely means.

    A slip of the pen in its own section comes first, and a key of that very name elsewhere; failing both, likeness.
    """
    name, here = str(location[-1]), location[:-1]
    everywhere: dict[str, list[str]] = {}
    for path in key_paths(sections=True):
        everywhere.setdefault(path.rsplit(".", 1)[-1], []).append(path)
    section = _section_at(here)
    slips = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.85) if section else []
    if slips or name in everywhere:
        return [*(".".join([*map(str, here), slip]) for slip in slips), *everywhere.get(name, [])]
    if section and (close := difflib.get_close_matches(name, section.model_fields, n=1)):
        return [".".join([*map(str, here), close[0]])]
    close = difflib.get_close_matches(name, everywhere, n=1, cutoff=0.8)
    return everywhere[close[0]] if close else []


def _known(location: tuple[Any, ...]) -> str:
    section = _section_at(location[:-1])
    return f"; known here: {', '.join(section.model_fields)}" if section else ""
