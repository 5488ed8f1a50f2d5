"""Shardmill: prompts in, verified LLM completions out. This package knows nothing of Snakemake."""

import sys
from types import TracebackType

__version__ = "0.1.0"


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """No traceback for a Ctrl-C that hits a script while it still imports; `logs.configure` takes over from here."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _end_quietly
