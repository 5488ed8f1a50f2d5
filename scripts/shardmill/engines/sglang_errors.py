"""What SGLang's error responses mean, where that goes beyond any OpenAI-like server's."""

from __future__ import annotations

import re

from .base import Fault

_TOO_LONG = re.compile(
    r"is longer than the model's context length|exceeds the model's maximum context length|"
    r"max_(completion_)?tokens is too large|"
    r"(input|prompt).{0,80}(too long|exceeds the maximum|longer than)",
    re.IGNORECASE | re.DOTALL,
)
# A template's own complaint comes back as it stands, without a word that it is the template's.
_TEMPLATE = re.compile(
    r"jinja|chat[ _]template|template (error|syntax)|no user query found|system message must be|"
    r"unexpected message role|unexpected item type|roles must alternate|no messages provided|"
    r"conversation roles|system message cannot|"
    r"is undefined\b|has no attribute",
    re.IGNORECASE,
)
# The request quoted in a complaint about its form may hold any words at all.
_INVALID = re.compile(r"\bvalidation errors?:")
_SOURCE_LINES = re.compile(r'\s+File "/.*', re.DOTALL)


def refine_fault(fault: Fault, status: int, body: bytes) -> Fault:
    """The fault with SGLang's own words taken into account."""
    message = _SOURCE_LINES.sub("", fault.message)
    if status != 400:
        return Fault(fault.kind, message)
    text = body.decode("utf-8", "replace")
    if _INVALID.search(text):
        return Fault("bad_request", message)
    if _TOO_LONG.search(text):
        return Fault("too_long", message)
    return Fault("template_error" if _TEMPLATE.search(text) else "bad_request", message)
