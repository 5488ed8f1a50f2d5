"""Command-line overrides: `--config 'shards={"size": 10}'` arrives with every inner value as text.

Snakemake reads nested values without types, so what is a number or a switch is decided here by what the
key takes. Text stays text where the key takes text: `run={"name": "2026"}` is a name.
"""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from .config import Config


def with_types(overrides: Any) -> dict[str, Any]:
    """The overrides with the types their keys take; what fits no key is left for the validation to refuse."""
    return _typed(overrides, Config) if isinstance(overrides, dict) else {}


def merge(settings: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Lay overrides over settings, section by section, in place."""
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(settings.get(key), dict):
            merge(settings[key], value)
        else:
            settings[key] = value


def _typed(value: Any, annotation: Any) -> Any:
    choices = _choices(annotation)
    if isinstance(value, dict):
        models = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)]
        fields = models[0].model_fields if models else {}
        return {key: _typed(item, fields[key].annotation if key in fields else Any) for key, item in value.items()}
    if isinstance(value, list):
        inner = next((get_args(choice) for choice in choices if get_origin(choice) is list), (Any,))
        return [_typed(item, inner[0]) for item in value]
    return _scalar(value, choices) if isinstance(value, str) else value


def _scalar(text: str, choices: tuple[Any, ...]) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if Any in choices:
        return value
    fits = type(value) in choices or (isinstance(value, int) and not isinstance(value, bool) and float in choices)
    return value if fits else text


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type: members of a union, or the type itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)
