"""One shard: its prompts answered, its files written."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from . import contract
from .answering import Answering, Task
from .config import Config
from .conversation import Conversation, Terms
from .errors import UserError
from .files import read_json, write_json
from .journal import Journal
from .monitor.jobs import JobLog
from .monitor.watchman import Watchman
from .prompts.shards import read_shard
from .quality.verdicts import Policy, RateGate, rate_table
from .run_state import outcome_counts
from .shard_files import locked_model_digest, shard_entry, write_shard

RUN_CHECK_INTERVAL = 5.0  # seconds
# A shard of at least this many prompts that ends with no completion at all fails, however few that is for statistics.
NOTHING_LEFT = 5


class ShardRun:
    """Answers all prompts of one shard.

    Args:
        config: the run's configuration.
        shard: the shard's name.
        model_digest: content hash of the model that the servers run.
    """

    def __init__(self, config: Config, shard: str, model_digest: str) -> None:
        self.config = config
        self.layout = config.layout
        self.shard = shard
        self.terms = make_terms(config, model_digest)
        self._samples, self._watchman = JobLog(config, shard), Watchman(config, shard)
        self.answering = Answering(
            config,
            f"shard {shard}",
            on_progress=self._write_progress,
            on_settled=self._check_rate,
            on_request=self._samples.note_request,
        )
        quality = config.quality
        self._gate = RateGate(quality.max_reject_rate, quality.min_samples)
        self._run_gate = RateGate(quality.stop_run_above, quality.min_samples)
        self._settled: list[Conversation] = []
        self._total = 0
        self._next_run_check = 0.0

    def run(self) -> dict[str, Any]:
        """Make the shard's completions, rejects and statistics; returns the statistics.

        Raises:
            UserError: if no server can be had, the disk fails, or too many answers are bad.
            Interrupted: if it was stopped or the owning run died.
        """
        started = time.monotonic()
        entry = shard_entry(self.layout, self.shard)
        prompts = read_shard(self.layout, self.shard, entry)
        self._total = len(prompts)
        # Should this job fail, the next one must not believe that the journal holds everything.
        self.layout.stats(self.shard).unlink(missing_ok=True)
        with Journal(self.layout.journal(self.shard)) as journal:
            conversations = [Conversation(prompt, self.terms) for prompt in prompts]
            self._watchman.start()
            try:
                self.answering.run([Task(conversation, journal) for conversation in conversations])
            finally:
                self._end_samples(conversations)
                self.layout.progress(self.shard).unlink(missing_ok=True)
            journal.sync()
            self._check_whole(conversations)
            return write_shard(
                self.config,
                self.shard,
                conversations,
                journal,
                entry=entry,
                terms=self.terms,
                sent=self.answering.sent,
                hedged=self.answering.hedged,
                seconds=time.monotonic() - started,
            )

    def _check_rate(self, conversation: Conversation) -> None:
        """Stop at once when the rate of rejects is surely too high: bad answers cost as much as good ones."""
        self._settled.append(conversation)
        if conversation.outcome == "rejected":
            settled = self._settled[:]
            if self._gate.fails(_rejected(settled), len(settled)):
                raise too_many_rejects(f"shard {self.shard}", settled, self._gate)

    def _check_whole(self, conversations: list[Conversation]) -> None:
        """The same at the end, over what the journal brought as well."""
        rejected = _rejected(conversations)
        nothing_left = rejected == len(conversations) >= NOTHING_LEFT
        if nothing_left or self._gate.fails(rejected, len(conversations)):
            raise too_many_rejects(f"shard {self.shard}", conversations, self._gate)

    def _end_samples(self, conversations: list[Conversation]) -> None:
        """Write the last sample; a shard that its journal alone made has none."""
        self._watchman.stop()
        if self.answering.sent:
            done = sum(c.outcome is not None for c in conversations)
            rejected = sum(c.outcome == "rejected" for c in self._settled)
            self._samples.write(done=done, prompts=self._total, in_flight=0, rejected=rejected)
        self._samples.close()

    def _write_progress(self, done: int, in_flight: int) -> None:
        """Say how far the shard is, and stop with the rest if the whole run goes wrong."""
        settled = self._settled[:]
        rejected = _rejected(settled)
        value = {
            "shard": self.shard,
            "prompts": self._total,
            "done": done,
            "in_flight": in_flight,
            "accepted": len(settled) - rejected,
            "rejected": rejected,
            "at": time.time(),
        }
        write_json(self.layout.progress(self.shard), value, fsync=False, indent=False)
        self._samples.tick(done=done, prompts=self._total, in_flight=in_flight, rejected=rejected)
        if rejected and time.monotonic() >= self._next_run_check:
            self._next_run_check = time.monotonic() + RUN_CHECK_INTERVAL
            accepted_all, rejected_all = outcome_counts(self.layout)
            if self._run_gate.fails(rejected_all, accepted_all + rejected_all):
                raise too_many_rejects("run", settled, self._run_gate, (rejected_all, accepted_all + rejected_all))


def make_terms(config: Config, model_digest: str) -> Terms:
    """What all requests of the run have in common."""
    return Terms(
        answers=contract.answer_fingerprint(config),
        model_digest=model_digest,
        seed=config.sampling.seed,
        all_turns=config.prompts.turns == "all",
        policy=Policy.from_config(config.quality),
        poison_after=config.dispatch.poison_after,
    )


def _rejected(conversations: list[Conversation]) -> int:
    return sum(c.outcome == "rejected" for c in conversations)


def too_many_rejects(
    where: str, settled: list[Conversation], gate: RateGate, figures: tuple[int, int] | None = None
) -> UserError:
    """The error that says what the bad answers were, with examples.

    Args:
        figures: (rejected, total) that the decision rests on, where that is more than `settled`.
    """
    rejected = [c for c in settled if c.outcome == "rejected"]
    examples: dict[str, list[tuple[str, str]]] = {}
    for conversation in rejected:
        examples.setdefault(conversation.verdict or "", []).append((conversation.id, conversation.detail))
    table = rate_table(Counter(c.verdict or "" for c in settled), examples=examples)
    return UserError(
        f"too many rejects: {gate.describe(*(figures or (len(rejected), len(settled))))}\n{table}\n",
        where=where,
        hint="mend the cause, or raise `quality.max_reject_rate` (one shard) or `quality.stop_run_above` (the run)",
    )


def model_digest(config: Config) -> str:
    """Content hash of the run's model: what the run is bound to, else what its manifest has."""
    return locked_model_digest(config.layout) or read_json(config.layout.model_manifest)["digest"]
