"""Errors of the hub and the network in a user's words: one line, never with the token."""

from __future__ import annotations

import errno
import re

from ..errors import UserError
from .hub_files import FetchJob

_TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)


class Retryable(Exception):
    """A fault of the network or the hub that may be gone a little later."""


def is_transient(error: BaseException) -> bool:
    """Whether a later attempt may go better. Transport errors are told by their module, httpx or httpx2."""
    if type(error).__name__ == "OfflineModeIsEnabled":  # a ConnectionError that the user asked for
        return False
    if isinstance(error, (Retryable, ConnectionError, TimeoutError)):
        return True
    if (status := _status(error)) is not None:
        return status in _TRANSIENT_STATUS
    return type(error).__module__.partition(".")[0].startswith("httpx")


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def explain(error: Exception, job: FetchJob) -> tuple[str, str, bool]:
    """An error as (what, hint, whether to try again), in one line and without the token."""
    from huggingface_hub import constants, get_token

    token = get_token()
    told = _explain(error, job, hub=constants.ENDPOINT, has_token=bool(token))
    # Addresses of proxies and mirrors can carry a password.
    what, hint = (re.sub(r"//[^/@\s]*@", "//", " ".join(text.split())) for text in told)
    return what.replace(token, "***") if token else what, hint, is_transient(error)


def _explain(error: Exception, job: FetchJob, *, hub: str, has_token: bool) -> tuple[str, str]:
    from huggingface_hub import errors

    status = _status(error)
    if isinstance(error, UserError):
        return error.what, error.hint
    if isinstance(error, errors.GatedRepoError):
        token = "the account of your token (HF_TOKEN) has no access" if has_token else "no token is given"
        return f"{job.repo} is gated and {token}", f"ask for access at {hub}/{job.repo} and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{job.repo} has no branch, tag or commit `{job.revision}`", "correct the part after `@`"
    if status in (401, 403) and has_token and not isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub} refuses the token (HTTP {status})", "check HF_TOKEN, or unset it for a public repo"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        token = "your token (HF_TOKEN) has no access" if has_token else "no token (HF_TOKEN) is given"
        return f"{hub} has no repo {job.repo}, or it is private and {token}", "check the name, or set HF_TOKEN"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "the model is not here yet and HF_HUB_OFFLINE forbids to fetch it", "unset it for this run"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {job.store} is full", "make room and run again; what has come is kept"
    if isinstance(error, Retryable):
        return str(error), "run again; what has come is kept"
    if status is not None:
        return f"{hub} answers HTTP {status}", "try again later; what has come is kept"
    if is_transient(error):
        return f"cannot reach {hub} ({error})", "check the network, proxies and HF_ENDPOINT"
    return f"{type(error).__name__}: {error}", "run again; what has come is kept"
