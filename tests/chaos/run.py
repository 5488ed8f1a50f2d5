"""One chaotic run: the same command again and again under a schedule's faults, then the checker's word."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.pipeline import REPO, Workspace, check_nothing_left
from tests.tiny.gguf_model import Knobs, make
from tests.tiny.server import serve

from . import check as checker
from .door import Door, open_door
from .faults import Inflictor
from .schedule import Schedule

TRIES = 6  # starts of the same command after the last fault, of which the last must succeed
PATIENCE = 240.0  # seconds for one start
DISK = "24m"
CONTEXT = 2048
MAX_TOKENS = 512


@dataclass
class Outcome:
    """How a chaotic run went.

    Args:
        seed: of its schedule.
        done: faults that hit something, by kind.
        starts: starts of the command, the last good one included.
        found: what the checker found.
        seconds: in all.
        errors: error lines of the starts after the last fault, but for the good one.
    """

    seed: int
    done: list[str] = field(default_factory=list)
    starts: int = 0
    found: checker.Found = field(default_factory=checker.Found)
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return self.found.problems


class Stage:
    """What many chaotic runs share: the models, and a fresh server of each that answers the checker's questions."""

    def __init__(self, folder: Path, code: Path = REPO) -> None:
        self.folder, self.code = folder, code
        self._stack = contextlib.ExitStack()
        self._made: dict[float, tuple[Path, str]] = {}

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def model(self, bad_share: float) -> tuple[Path, str]:
        """(a model, URL of a server of it that no run touches)."""
        if bad_share not in self._made:
            path = self.folder / f"tiny-{bad_share:g}.gguf"
            make(path, Knobs(answer_clauses=9, empty_answers=bad_share))
            url = self._stack.enter_context(serve(path, path.with_suffix(".log"), slots=4, context=CONTEXT))
            self._made[bad_share] = path, url
        return self._made[bad_share]


def inputs_of(schedule: Schedule) -> list[dict[str, Any]]:
    """Prompts that differ; with several turns each where the schedule says so."""
    if schedule.turns == 1:
        return [{"id": f"p{n:04}", "prompt": f"What does mill {n} grind?"} for n in range(schedule.prompts)]
    texts = ("What does mill {n} grind?", "And how does mill {n} grind it?")
    return [{"id": f"p{n:04}", "turns": [text.format(n=n) for text in texts]} for n in range(schedule.prompts)]


def _doors(stack: contextlib.ExitStack, oracle: str) -> list[Door]:
    first = stack.enter_context(open_door(oracle))
    return [first, stack.enter_context(open_door(oracle, beside=first))]


def settings_of(schedule: Schedule, folder: Path, urls: list[str]) -> dict[str, Any]:
    """Sections of the configuration.

    Args:
        urls: of servers that are not the run's own; empty: it starts two.
    """
    settings: dict[str, Any] = {
        "shards": {"size": schedule.shard_size},
        "prompts": {"turns": "all" if schedule.turns > 1 else "last"},
        "engine": {"llamacpp": {"context_length": CONTEXT}},
        "servers": {"stall_after": 3, "linger": 2, "stop_timeout": 1, "max_restarts": 20},
        "sampling": {"max_tokens": MAX_TOKENS},
        "dispatch": {"no_server_timeout": 60},
        "quality": {
            "canary": {"skip": not schedule.canary, "prompts": 8, "max_bad_rate": 1},
            "max_reject_rate": 1,
            "stop_run_above": 1,
        },
    }
    if schedule.ram_disk:
        settings["model"] = {"ram_disk": str(folder / "ram")}
    if urls:
        external = {"urls": urls, "flavor": "llamacpp"}
        settings["engine"] = {"kind": "external", "external": external, "llamacpp": None}
        settings["servers"]["start_timeout"] = 20
    return settings


def request_template() -> dict[str, Any]:
    """The fields of every request, as docs/config.md describes the settings above and llama.cpp names them."""
    return {
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "repeat_last_n": 1 << 16,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "chat_template_kwargs": {"enable_thinking": True},
    }


def run(schedule: Schedule, stage: Stage, sample: int = 6) -> Outcome:
    """Do it all once. Needs root for a small disk of its own, where the schedule wants one."""
    began = time.monotonic()
    outcome = Outcome(schedule.seed)
    model, oracle = stage.model(schedule.bad_share)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)))
        work_folder = folder / "work"
        if schedule.small_disk:
            stack.enter_context(small_disk(work_folder, DISK))
        doors = _doors(stack, oracle) if schedule.external else []
        work = Workspace(work_folder, model)
        stack.callback(work.kill_everything)
        work.code = stage.code
        work.configure(**settings_of(schedule, folder, [door.url for door in doors]))
        inputs = inputs_of(schedule)
        work.write_prompts(inputs)
        inflictor = Inflictor(work, doors)
        arguments = ("--cores", str(schedule.cores))
        kept = _suffer(schedule, work, inflictor, outcome, arguments)
        outcome.done = inflictor.done
        if _finish(work, outcome, arguments) and _prove(work, outcome, arguments):
            outcome.found = checker.check(
                work.results,
                inputs,
                kept=kept,
                journals_damaged=inflictor.journals_damaged,
                rejects_damaged="flip bit in rejects" in inflictor.done,
                oracle=oracle,
                template=request_template(),
                asked=doors[0].asked if doors else [],
                sample=sample,
                seed=schedule.seed,
            )
            if inflictor.crashes >= 3:
                outcome.found.problems = [p for p in outcome.found.problems if "set aside as poison" not in p]
            try:
                check_nothing_left(work)
            except AssertionError as left:
                outcome.problems.append(str(left)[:600])
        if outcome.problems:
            _keep_evidence(work, schedule)
    outcome.seconds = time.monotonic() - began
    return outcome


def _suffer(
    schedule: Schedule, work: Workspace, inflictor: Inflictor, outcome: Outcome, arguments: tuple[str, ...]
) -> dict[tuple[str, int], tuple[str, str]]:
    """All rounds of faults; returns the finished answers that were there and not damaged since."""
    kept: dict[tuple[str, int], tuple[str, str]] = {}
    journals = work.results / "journals"
    for part in schedule.rounds:
        command = work.start(*arguments)
        outcome.starts += 1
        for fault in sorted(part.live, key=lambda fault: (fault.lines > 0, fault.lines)):
            inflictor.live(fault, command)
        try:
            result = command.wait(PATIENCE)
        except AssertionError as late:
            outcome.problems.append(f"a start under faults did not end: {late}"[-1500:])
            work.kill_everything()
            return kept
        inflictor.end_of_round()
        if "Traceback" in result.output:
            outcome.problems.append("a traceback on the console: " + _around(result.output, "Traceback"))
        now = checker.good_answers(journals)
        lost = [key for key, text in kept.items() if now.get(key) != text]
        if lost:
            outcome.problems.append(f"finished answers lost: {lost[:5]}")
        for fault in part.rest:
            inflictor.rest(fault)
        kept = checker.good_answers(journals)
        time.sleep(part.pause)
    return kept


def _finish(work: Workspace, outcome: Outcome, arguments: tuple[str, ...]) -> bool:
    """The same command, a few times at most, until it says that it is done."""
    for _ in range(TRIES):
        outcome.starts += 1
        try:
            result = work.start(*arguments).wait(PATIENCE)
        except AssertionError as late:
            outcome.problems.append(f"a start without faults did not end: {late}"[-1500:])
            return False
        if "Traceback" in result.output:
            outcome.problems.append("a traceback on the console: " + _around(result.output, "Traceback"))
        if result.code == 0:
            return True
        errors = re.findall(r"error: (.*)", result.output) or [result.output[-300:]]
        outcome.errors += errors
    outcome.problems.append(f"not finished after {TRIES} starts; the last said: {outcome.errors[-3:]}"[:1500])
    return False


def _prove(work: Workspace, outcome: Outcome, arguments: tuple[str, ...]) -> bool:
    """A finished dataset that was damaged is found by `verify`, and made again once it is removed."""
    if not {"flip bit in dataset", "flip bit in dataset manifest"} & set(outcome.done):
        return True
    if work.run("verify", "--cores", "1").code == 0:
        return True
    shutil.rmtree(work.path("dataset"))
    return _finish(work, outcome, arguments)


def _around(text: str, word: str) -> str:
    at = text.index(word)
    return text[max(0, at - 200) : at + 1500]


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of that size at `folder`, for root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "chaos", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def can_mount(folder: Path) -> bool:
    """Whether this user may mount a small disk."""
    try:
        with small_disk(folder, "1m"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _keep_evidence(work: Workspace, schedule: Schedule) -> None:
    """Copy the folder of a run that went wrong to where a person can look at it."""
    target = Path(tempfile.gettempdir()) / f"chaos-evidence-{schedule.seed}"
    shutil.rmtree(target, ignore_errors=True)
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(work.folder, target / "work", ignore=shutil.ignore_patterns("filler"))
        for console in work.folder.parent.glob("console-*.txt"):
            shutil.copy2(console, target)
