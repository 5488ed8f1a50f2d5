"""What a job asks of the Slurm that runs it: which job it is, when it ends, and to be queued again.

See squeue(1), scancel(1) and scontrol(1). Nothing here needs Slurm's accounting.
"""

from __future__ import annotations

import os
import subprocess
import time
from datetime import datetime

from .logs import get_logger

log = get_logger(__name__)

_PATIENCE = 60.0  # seconds for one answer; a busy controller can take many
_NO_END = ("N/A", "NONE", "UNKNOWN", "")


def job_id() -> str | None:
    """Id of the Slurm job that this process belongs to; None outside of Slurm."""
    return os.environ.get("SLURM_JOB_ID") or None


def end_time(job: str) -> float | None:
    """When a job will be ended for its time limit, in seconds since the epoch; None if never, or if nobody knows."""
    text = _ask("squeue", "--noheader", f"--jobs={job}", "--format=%e") or ""
    text = text.splitlines()[0].strip() if text.strip() else ""
    if text.upper() in _NO_END:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        log.warning("Slurm says that job %s ends at %r, which is no time", job, text)
        return None


def is_queued(job: str) -> bool:
    """Whether a job waits or runs, its last processes included; not knowing counts as yes."""
    try:
        answer = _run("squeue", "--noheader", f"--jobs={job}", "--format=%t")
    except (OSError, subprocess.TimeoutExpired):
        return True
    if answer.returncode:
        # A job that ended long ago is unknown; anything else is trouble with the controller.
        return "Invalid job id" not in answer.stderr
    return any(state.strip() in ("PD", "R", "CF", "CG", "S", "ST", "RQ", "SO", "SI") for state in answer.stdout.split())


def cancel(job: str) -> None:
    """Ask for a job's end; returns at once."""
    _ask("scancel", job)


def requeue(job: str) -> bool:
    """Queue a running job again under its id; it is killed for it. False if that is not allowed."""
    if _ask("scontrol", "requeue", job) is None:
        return False
    # The end comes from outside. Should it not come, the caller goes on as if it had been refused.
    time.sleep(2 * _PATIENCE)
    return False


def _ask(*command: str) -> str | None:
    """A command's output; None, with a line in the log, if it fails."""
    try:
        answer = _run(*command)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("%s: %s", command[0], error)
        return None
    if answer.returncode:
        log.warning("%s: %s", " ".join(command), answer.stderr.strip())
        return None
    return answer.stdout


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=_PATIENCE)
