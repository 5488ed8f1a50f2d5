"""Continuous batching in simulated time, for the stand-in.

All requests of a batch gain tokens at the same pace, so one number, the tokens gained by a request that has been
running since the start, tells when each of them is done. Time moves from one finished request to the next: the cost
is a heap operation per request, whatever the length of its answer, and the result does not depend on how late a timer
fires.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Job:
    """One request in the batch: `tokens` to produce, `prompt` tokens to read first, and whom to tell."""

    payload: Any
    tokens: int
    prompt: int
    state: str = "new"  # new, waiting, running, done
    start: float = 0.0  # pace count at which its first token begins
    end: float = 0.0
    arrived: float = 0.0

    def __lt__(self, other: Job) -> bool:
        return self.end < other.end


class Batch:
    """At most `capacity` running jobs within `pool` tokens; the others wait in order.

    A step with b running jobs takes (base + per_job * b) * scale seconds and gives each of them one token.
    `on_finish(job)` is called when a job has all its tokens. All times are seconds of the caller's clock.
    """

    def __init__(
        self,
        *,
        capacity: int,
        pool: int,
        base: float,
        per_job: float,
        prefill: float,
        on_finish: Callable[[Job], None],
    ) -> None:
        self.capacity, self.pool = capacity, pool
        self.base, self.per_job, self.prefill = base, per_job, prefill
        self.on_finish = on_finish
        self.running: set[Job] = set()
        self.waiting: deque[Job] = deque()
        self.frozen = False
        self.prompt_total = 0
        self._pace = 0.0
        self._time = 0.0
        self._heap: list[Job] = []
        self._running_prompt = 0
        self._start_sum = 0.0
        self._closed_tokens = 0.0

    def step_time(self, count: int | None = None) -> float:
        """Seconds that one token takes with `count` jobs running (default: as many as run now)."""
        return self.base + self.per_job * (len(self.running) if count is None else count)

    def add(self, job: Job, now: float) -> None:
        """Start the job, or let it wait."""
        self.advance(now)
        job.state, job.arrived = "waiting", now
        self.waiting.append(job)
        self._admit()

    def advance(self, now: float) -> None:
        """Move simulated time to `now`, finishing every job that is done by then."""
        if self.frozen:
            self._time = now
            return
        heap, running = self._heap, self.running
        while heap:
            job = heap[0]
            if job.state != "running":
                heapq.heappop(heap)
                continue
            at = self._time + (job.end - self._pace) * self.step_time(len(running))
            if at > now:
                break
            heapq.heappop(heap)
            self._pace, self._time = max(self._pace, job.end), max(self._time, at)
            self._leave(job, job.tokens)
            self._admit()
            self.on_finish(job)
        if running and now > self._time:
            self._pace += (now - self._time) / self.step_time(len(running))
        self._time = max(self._time, now)

    def cancel(self, job: Job, now: float) -> int:
        """Take a job out; returns how many tokens it had got."""
        self.advance(now)
        if job.state == "waiting":
            job.state = "done"
            self.waiting.remove(job)
            return 0
        if job.state != "running":
            return 0
        got = self.produced(job)
        self._leave(job, got)
        self._admit()
        return got

    def freeze(self, frozen: bool, now: float) -> None:
        """Stop or go on producing tokens."""
        self.advance(now)
        self.frozen, self._time = frozen, now

    def next_finish(self) -> float | None:
        """When the next job will be done if nothing else happens; None if nothing runs."""
        if self.frozen:
            return None
        while self._heap and self._heap[0].state != "running":
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        return self._time + (self._heap[0].end - self._pace) * self.step_time()

    def produced(self, job: Job) -> int:
        """Tokens that a running job has got so far."""
        return max(0, min(job.tokens, int(self._pace - job.start)))

    def tokens_total(self) -> int:
        """Tokens produced since the start, those of unfinished jobs included."""
        return int(self._closed_tokens) + sum(self.produced(job) for job in self.running)

    def tokens_held(self) -> int:
        """Tokens in the KV pool now: prompts and answers of the running jobs."""
        return self._running_prompt + sum(self.produced(job) for job in self.running)

    def _admit(self) -> None:
        waiting, running = self.waiting, self.running
        while waiting and len(running) < self.capacity:
            job = waiting[0]
            if running and self._held_estimate() + job.prompt + 1 > self.pool:
                return
            waiting.popleft()
            running.add(job)
            job.state = "running"
            job.start = self._pace + self.prefill * job.prompt / self.step_time(len(running))
            job.end = job.start + max(1, job.tokens)
            self._running_prompt += job.prompt
            self._start_sum += job.start
            self.prompt_total += job.prompt
            heapq.heappush(self._heap, job)

    def _held_estimate(self) -> float:
        return self._running_prompt + len(self.running) * self._pace - self._start_sum

    def _leave(self, job: Job, got: int) -> None:
        job.state = "done"
        self.running.discard(job)
        self._running_prompt -= job.prompt
        self._start_sum -= job.start
        self._closed_tokens += got
