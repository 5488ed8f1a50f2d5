"""Discrete-event model of one node or many: what dispatch rules, shard tails and slow GPUs cost.

    python -m benchmarks.simulate [--prompts N] [--jobs J] [--pools P]

For what no test machine can run at its real size: thousands of shards, a hundred pools. A server runs at most
`CAPACITY` requests, each gaining a token every (`BASE` + `PER_REQUEST` * running) seconds, divided by the server's
speed; the rest wait in its queue. The figures are those of one B200 with Qwen3.6-27B: 245 tokens/s from one request,
2,309 from 48.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardmill.ledger import is_due

BASE, PER_REQUEST, CAPACITY = 3.72e-3, 0.356e-3, 48  # seconds, seconds, requests
_serial = itertools.count()  # no two entries of a heap are alike
QUEUE = 6  # requests kept waiting at a server by dispatch: an eighth of what it runs
MEAN_TOKENS, SIGMA, MOST_TOKENS = 2306, 1.0, 32768


def full_rate(speed: float = 1.0) -> float:
    """Tokens per second of a full server: the ideal that utilisation is measured against."""
    return speed * CAPACITY / (BASE + PER_REQUEST * CAPACITY)


def answer_lengths(count: int, seed: int, *, sigma: float = SIGMA) -> list[int]:
    """Tokens of `count` answers: log-normal, cut at the cap."""
    chance, location = random.Random(seed), math.log(MEAN_TOKENS) - sigma**2 / 2
    return [min(MOST_TOKENS, max(16, int(chance.lognormvariate(location, sigma)))) for _ in range(count)]


@dataclass
class Job:
    """A shard job: what it has still to send, what it has in flight."""

    number: int
    todo: deque[int]
    total: int
    in_flight: int = 0


@dataclass
class Server:
    """One server. `pace` is the tokens that a request running since the start would have got."""

    speed: float
    pace: float = 0.0
    time: float = 0.0
    running: list[tuple[float, int, int, Job]] = field(default_factory=list)
    queue: deque[tuple[int, Job]] = field(default_factory=deque)

    def step(self) -> float:
        return (BASE + PER_REQUEST * len(self.running)) / self.speed

    def advance(self, now: float) -> None:
        if self.running:
            self.pace += (now - self.time) / self.step()
        self.time = now

    def next_end(self) -> float:
        return self.time + (self.running[0][0] - self.pace) * self.step() if self.running else math.inf

    def add(self, now: float, tokens: int, job: Job) -> None:
        self.advance(now)
        if len(self.running) < CAPACITY:
            heapq.heappush(self.running, (self.pace + tokens, next(_serial), tokens, job))
        else:
            self.queue.append((tokens, job))

    def finish(self, now: float) -> tuple[int, Job]:
        self.advance(now)
        _, _, tokens, job = heapq.heappop(self.running)
        if self.queue:
            waiting, owner = self.queue.popleft()
            heapq.heappush(self.running, (self.pace + waiting, next(_serial), waiting, owner))
        return tokens, job

    @property
    def load(self) -> int:
        return len(self.running) + len(self.queue)


Chooser = Callable[[list[Job], int], Job]


def fair(hungry: list[Job], places: int) -> Job:
    """The poorest job: equal shares."""
    return min(hungry, key=lambda job: job.in_flight)


def ledger(hungry: list[Job], places: int) -> Job:
    """Shardmill's own rule: the job with the smallest part left, and a sure part for each."""
    left = {job.number: 1000 * len(job.todo) // job.total for job in hungry}
    for job in hungry:
        rivals = [(other.in_flight, left[other.number]) for other in hungry if other is not job]
        if is_due(job.in_flight, left[job.number], rivals, places / len(hungry)):
            return job
    return hungry[0]


@dataclass(frozen=True)
class Result:
    """Utilisations are shares of what full servers make. `steady` is from the time when all servers have been full
    once until the last request has been handed out."""

    whole: float
    steady: float
    seconds: float
    first_shard: float


def run(
    lengths: Sequence[int],
    *,
    speeds: Sequence[float],
    choose: Chooser,
    shard: int = 1000,
    jobs: int = 7,
    start_delay: float = 2.0,
    queue: int = QUEUE,
) -> Result:
    """One pool to its end.

    Args:
        start_delay: seconds between the end of one shard's job and the first request of the next one's.
    """
    servers = [Server(speed) for speed in speeds]
    limit, places = CAPACITY + queue, (CAPACITY + queue) * len(servers)
    waiting = deque(
        Job(number, deque(lengths[at : at + shard]), len(lengths[at : at + shard]))
        for number, at in enumerate(range(0, len(lengths), shard))
    )
    starting: list[tuple[float, int, Job]] = []
    active: list[Job] = []
    now = done_tokens = 0.0
    last_sent = (0.0, 0.0)
    first_shard = 0.0

    def launch() -> None:
        if waiting:
            job = waiting.popleft()
            heapq.heappush(starting, (now + start_delay, job.number, job))

    def feed() -> None:
        nonlocal last_sent
        while True:
            server = min(servers, key=lambda one: one.load)
            hungry = [job for job in active if job.todo]
            if server.load >= limit or not hungry:
                return
            job = choose(hungry, places)
            server.add(now, job.todo.popleft(), job)
            job.in_flight += 1
            last_sent = (now, done_tokens)

    for _ in range(jobs):
        launch()
    warm: tuple[float, float] | None = None
    while active or starting:
        server = min(servers, key=Server.next_end)
        if starting and starting[0][0] <= server.next_end():
            now, _, job = heapq.heappop(starting)
            active.append(job)
        else:
            now = server.next_end()
            tokens, job = server.finish(now)
            done_tokens += tokens
            job.in_flight -= 1
            if not job.todo and not job.in_flight:
                active.remove(job)
                first_shard = first_shard or now
                launch()
        feed()
        # Answers count when they end, so both ends of the window must be well inside the steady state.
        if warm is None and done_tokens > sum(lengths) * 0.15:
            warm = (now, done_tokens)
    ideal = sum(full_rate(speed) for speed in speeds)
    begin = warm or (0.0, 0.0)
    steady = (last_sent[1] - begin[1]) / max(last_sent[0] - begin[0], 1e-9) / ideal
    return Result(sum(lengths) / now / ideal, steady, now, first_shard)


def many_pools(pools: int, shards: int, gpus: int) -> None:
    """Pools that share nothing: each has its own shards, and the run ends with the slowest."""
    share = shards // pools
    results = [
        run(answer_lengths(share * 1000, seed), speeds=[1.0] * gpus, choose=ledger, jobs=gpus) for seed in range(pools)
    ]
    longest = max(result.seconds for result in results)
    busy = sum(result.whole * result.seconds for result in results) / pools
    print(
        f"{pools} pools of {gpus} GPUs, {share} shards each: {longest / 3600:.2f} h, whole run {busy / longest:.3f}, "
        f"each pool {min(result.whole for result in results):.3f} to {max(result.whole for result in results):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sigma", type=float, default=SIGMA)
    parser.add_argument("--pools", type=int, help="pools that share nothing, of 8 GPUs each")
    options = parser.parse_args()
    if options.pools:
        return many_pools(options.pools, options.shards, 8)
    for name, speeds in (("even", [1.0] * 7), ("one at 0.6", [1.0] * 6 + [0.6])):
        for choose in (fair, ledger):
            for seed in range(options.seeds):
                lengths = answer_lengths(options.shards * 1000, seed, sigma=options.sigma)
                result = run(lengths, speeds=speeds, choose=choose, jobs=options.jobs)
                print(
                    f"{name:12} {choose.__name__:8} {seed}  steady {result.steady:.3f}  whole {result.whole:.3f}  "
                    f"{result.seconds:.0f} s  first shard {result.first_shard:.0f} s"
                )
    return None


if __name__ == "__main__":
    main()
