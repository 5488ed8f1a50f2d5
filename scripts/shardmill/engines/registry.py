"""Which adapter a configuration asks for."""

from __future__ import annotations

from ..config import Config
from .base import Engine


def engine_for(config: Config) -> Engine:
    """The adapter of the configured engine; of external servers, the one of their flavor."""
    kind = config.engine.external.flavor if config.engine.kind == "external" else config.engine.kind
    if kind == "llamacpp":
        from .llamacpp import LlamaCpp

        return LlamaCpp()
    if kind == "sglang":
        from .sglang import SGLang

        return SGLang()
    from .openai import OpenAI

    return OpenAI()
