"""Loading a configuration, and saying in a user's words what is wrong with it."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from .config import Config, Conflict, key_paths
from .errors import UserError


def load_config(data: dict[str, Any]) -> Config:
    """Validate a configuration as read from YAML.

    Raises:
        UserError: naming every faulty key by its path, and what to write instead.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problems = [_explain(problem) for problem in error.errors()]
        raise UserError("; ".join(problems), where="config") from None


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


def _explain(problem: Any) -> str:
    """One pydantic error as `path: what is wrong, and what to write`."""
    location, kind, value = problem["loc"], problem["type"], problem["input"]
    path = ".".join(str(part) for part in location if part not in ("str", "bool"))
    if kind == "extra_forbidden":
        nearest = _nearest_key(location)
        return f"{path}: unknown key" + (f", did you mean `{nearest}`?" if nearest else _known_keys(location))
    if kind == "missing":
        return f"{path}: missing, and it has no default"
    if kind == "value_error" and isinstance(conflict := problem["ctx"]["error"], Conflict):
        return f"{conflict.key}: {conflict.problem}"
    if kind in _EXPECTED:
        return f"{path}: expected {_EXPECTED[kind]}, found {_shown(value)}"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{path}: {message}, found {_shown(value)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _section_at(path: tuple[Any, ...]) -> type[BaseModel] | None:
    """The model that holds the keys at `path`."""
    model: Any = Config
    for part in path:
        field = model.model_fields.get(part)
        model = field.annotation if field else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return None
    return model


def _nearest_key(location: tuple[Any, ...]) -> str | None:
    """The known key that a mistyped one most likely means, as a full path; looked for in its section first."""
    section = _section_at(location[:-1])
    name = str(location[-1])
    if section and (close := difflib.get_close_matches(name, section.model_fields, n=1)):
        return ".".join([*map(str, location[:-1]), close[0]])
    everywhere = {path.rsplit(".", 1)[-1]: path for path in key_paths()}
    if name in everywhere:
        return everywhere[name]
    close = difflib.get_close_matches(name, everywhere, n=1, cutoff=0.8)
    return everywhere[close[0]] if close else None


def _known_keys(location: tuple[Any, ...]) -> str:
    section = _section_at(location[:-1])
    return f"; known here: {', '.join(section.model_fields)}" if section else ""
