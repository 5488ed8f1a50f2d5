"""What goes wrong in one chaotic run, drawn from a seed: pure data, so that a seed names a run."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Faults of processes and disks while the run is live. The number weighs how often each is drawn.
LIVE = {
    "kill engine": 4,
    "kill supervisor": 3,
    "kill reaper": 3,
    "kill shard job": 4,
    "kill snakemake": 4,
    "kill everything": 5,
    "kill all engines": 2,
    "kill supervisor and reaper": 2,
    "stop engine (SIGSTOP)": 2,
    "stop supervisor for a while (SIGSTOP)": 1,
    "stop shard job for a while (SIGSTOP)": 1,
    "SIGTERM to snakemake": 1,
    "ctrl-c": 1,
    "remove readiness file": 2,
    "remove status file": 1,
    "status file from the future": 1,
    "status file from the past": 1,
    "remove ledger": 1,
    "damage ledger": 1,
    "fill disk": 4,
}
# Faults of files between two starts.
REST = {
    "truncate journal": 4,
    "flip bit in journal": 4,
    "garbage at the end of journal": 1,
    "remove journal": 1,
    "truncate completions": 2,
    "flip bit in completions": 3,
    "remove completions": 2,
    "flip bit in rejects": 1,
    "truncate stats": 2,
    "flip bit in stats": 3,
    "truncate index": 2,
    "flip bit in index": 3,
    "truncate prompt shard": 2,
    "flip bit in prompt shard": 3,
    "flip bit in model manifest": 1,
    "truncate canary report": 1,
    "flip bit in dataset": 1,
    "flip bit in dataset manifest": 1,
    "stale readiness file": 2,
    "garbage in readiness file": 1,
    "garbage in status file": 1,
    "garbage in server spec": 1,
    "garbage in run lock": 1,
    "garbage in journal cut": 1,
    "forget .snakemake": 1,
    "file from the future (touch)": 2,
    "file from the past (touch)": 2,
    "prompts touched": 1,
}
# At the door before a server that is not ours (engine.kind: external).
DOOR = {
    "cut connections": 3,
    "answer 503": 3,
    "swallow requests": 1,
    "garbage answers": 2,
}
DOOR_LIVE = {
    **DOOR,
    "kill supervisor": 2,
    "kill shard job": 4,
    "kill snakemake": 4,
    "kill everything": 4,
    "SIGTERM to snakemake": 1,
    "remove ledger": 1,
    "fill disk": 3,
}


@dataclass(frozen=True)
class Live:
    """One fault while the run is live.

    Args:
        kind: a key of `LIVE` or `DOOR`.
        lines: journal lines that trigger it; 0: `delay` seconds after the start instead.
        delay: seconds after the trigger.
        seconds: how long it lasts, for those that end.
        server: which of the two.
        draw: seed of any further choice.
    """

    kind: str
    lines: int
    delay: float
    seconds: float
    server: int
    draw: int


@dataclass(frozen=True)
class Rest:
    """One fault of a file between two starts."""

    kind: str
    draw: int


@dataclass(frozen=True)
class Round:
    """One start of the same command, what happens to it, and what happens to its files afterwards."""

    live: tuple[Live, ...]
    rest: tuple[Rest, ...]
    pause: float


@dataclass(frozen=True)
class Schedule:
    """One chaotic run.

    Args:
        external: the servers are not the run's own; all requests pass a recording door.
        small_disk: the run's folder is a small tmpfs.
        turns: user turns per prompt, all answered.
        bad_share: share of answers that the model leaves empty, so that retries and rejects happen.
    """

    seed: int
    prompts: int
    shard_size: int
    cores: int
    external: bool
    canary: bool
    ram_disk: bool
    turns: int
    bad_share: float
    rounds: tuple[Round, ...]

    @property
    def small_disk(self) -> bool:
        return any(fault.kind == "fill disk" for each in self.rounds for fault in each.live)

    def kinds(self) -> list[str]:
        return [fault.kind for each in self.rounds for fault in (*each.live, *each.rest)]


def make(seed: int) -> Schedule:
    """The schedule that a seed names."""
    rng = random.Random(seed)
    external = rng.random() < 0.2
    prompts = rng.randrange(20, 61)
    rounds = tuple(_round(rng, prompts, external) for _ in range(rng.choice((1, 1, 1, 2, 2, 3))))
    return Schedule(
        seed=seed,
        prompts=prompts,
        shard_size=rng.choice((7, 12, 20, 20)),
        cores=rng.choice((1, 3, 7, 7)),
        external=external,
        canary=rng.random() < 0.6,
        ram_disk=not external and rng.random() < 0.3,
        turns=rng.choice((1, 1, 1, 2)),
        bad_share=rng.choice((0.0, 0.0, 0.0, 0.1)),
        rounds=rounds,
    )


def _round(rng: random.Random, prompts: int, external: bool) -> Round:
    live = tuple(_live(rng, prompts, DOOR_LIVE if external else LIVE) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    rest = tuple(Rest(_draw(rng, REST), rng.randrange(1 << 30)) for _ in range(rng.choice((0, 1, 1, 2, 3))))
    return Round(live, rest, rng.choice((0.0, 0.0, 0.5, 3.0)))


def _live(rng: random.Random, prompts: int, weights: dict[str, int]) -> Live:
    early = rng.random() < 0.2
    return Live(
        kind=_draw(rng, weights),
        lines=0 if early else rng.randrange(1, prompts),
        delay=rng.uniform(0.2, 6.0) if early else rng.choice((0.0, 0.0, rng.uniform(0, 0.5))),
        seconds=rng.uniform(0.5, 4.0),
        server=rng.randrange(2),
        draw=rng.randrange(1 << 30),
    )


def _draw(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
