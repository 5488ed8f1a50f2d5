"""The base of every section of the configuration."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, field_validator


class Section(BaseModel):
    """A section refuses unknown keys and wrong types: nothing is coerced, nothing ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _check_json(cls, value: Any) -> Any:
        """Settings are hashed, stored and sent as JSON, so each must come back from it as it was."""
        if isinstance(value, Section):
            return value
        try:
            same = orjson.loads(orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATETIME)) == value
        except TypeError:
            same = False
        if not same:
            raise ValueError("holds what JSON cannot (a date, nan, a number beyond 64 bits, a key that is no text)")
        return value
