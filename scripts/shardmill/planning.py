"""What the Snakefile needs to know before anything runs: the shards, and which of them still want work.

Cheap and offline: a survey of the prompts file (remembered in the prompt index by size and mtime) and
a look at each shard's statistics. The only thing ever written here is the removal of files that lie:
a readiness file without a server behind it, a damaged staged copy, an index whose shards are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from . import contract, disk
from .config import Config
from .engine_env import clear_broken_environment, environment_record
from .errors import UserError
from .files import canonical_json, read_json_or_none, sha256_hex
from .layout import Layout
from .lease import clear_stale
from .load_config import load_config
from .model.download import manifest_problem
from .model.staging import staged_file, staging_problem
from .owner import owner_is_alive
from .pool_plan import cut, holds, proof_problem
from .prompts.hub import is_fetched, prompts_file
from .prompts.shards import damaged_shards
from .prompts.survey import Survey, cached_survey
from .shard_files import is_answered, is_complete, locked_model_digest, set_cut_aside


@dataclass
class Plan:
    """A run as it stands."""

    config: Config
    survey: Survey

    @property
    def layout(self) -> Layout:
        return self.config.layout

    @property
    def awaits_prompts(self) -> bool:
        """Whether the prompts must come from a hub first; until then there are no shards."""
        return not self.survey.digests

    def look_again(self) -> None:
        """Plan anew, with the prompts that have come."""
        fresh = make_plan(self.config.model_dump())
        self.__dict__.clear()
        self.__dict__.update(fresh.__dict__)

    @cached_property
    def shards(self) -> list[str]:
        """All shards; within a pool its own."""
        only, names = self.config.pools.only, self.survey.shard_names
        return [name for name in names if holds(only, name)] if only else names

    @cached_property
    def pools(self) -> dict[str, list[str]]:
        """The pools, each with its shards, where this run leaves the shards to pools; else none."""
        return {} if self.config.pools.only else cut(self.shards, self.config.pools.shards)

    @cached_property
    def open_pools(self) -> frozenset[str]:
        """Pools that have something to make, or whose proof does not hold."""
        layout = self.layout
        return frozenset(
            pool
            for pool, shards in self.pools.items()
            if not self.pending.isdisjoint(shards)
            or not layout.pool_proof(pool).exists()
            or proof_problem(layout, pool, shards)
        )

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digest of each shard's input records."""
        return dict(zip(self.survey.shard_names, self.survey.digests, strict=True))

    @cached_property
    def answers(self) -> str:
        """Fingerprint of the settings that decide the answers."""
        return contract.answer_fingerprint(self.config)

    @cached_property
    def pending(self) -> frozenset[str]:
        """Shards whose files are not there, or were made of something else."""
        return self._shards_not(is_complete)

    @cached_property
    def in_need(self) -> frozenset[str]:
        """Those of them that need servers.

        A shard whose completions are gone but whose journal holds every answer needs none. One that has
        completions, but of something else or without their rejects, is given servers in any case: it is
        for their sake that Snakemake runs it again.
        """
        unanswered = self._shards_not(is_answered)
        layout = self.layout
        return frozenset(s for s in self.pending if s in unanswered or layout.completions(s).exists())

    def _shards_not(self, predicate: Callable[..., bool]) -> frozenset[str]:
        made_of = {"answers": self.answers, "model_digest": locked_model_digest(self.layout)}
        return frozenset(
            shard
            for shard in self.shards
            if not predicate(self.layout, shard, prompts_digest=self.digests[shard], **made_of)
        )

    @property
    def staged_manifest(self) -> Path | None:
        """The file that says the RAM-disk copy is whole; it lies beside the copy, so a reboot wipes both."""
        return staged_file(self.config)

    @property
    def engine_environment(self) -> Path | None:
        """The file that says the engine's own environment is whole; None where none is to be built."""
        return environment_record(self.config)

    @property
    def model_files(self) -> list[Path]:
        """The files that say that servers can read the model."""
        staged = self.staged_manifest
        return [self.layout.model_manifest, *([staged] if staged else [])]

    def opening_line(self) -> str:
        """What there is to do, in one line."""
        config = self.config
        if self.awaits_prompts:
            return f"run {config.run.name}: getting the prompts first, {config.prompts.path}"
        todo = f"{len(self.pending)} of {len(self.shards)} shards to make"
        if self.pools:
            todo += f" in {len(self.open_pools)} of {len(self.pools)} pools"
        by = f"pool {config.pools.only}" if config.pools.only else f"{self.survey.records} prompts"
        return f"run {config.run.name}: {by}, {todo}, {config.server_count} servers" + " each" * bool(self.pools)

    def check_room(self) -> list[str]:
        """Warnings about the disk.

        Raises:
            UserError: if it is full already, and there is something to make.
        """
        if not self.pending:
            return []
        if problem := disk.no_room(self.config):
            raise problem
        warning = disk.warning(self.config, len(self.pending) * self.config.shards.size)
        return [f"warning: {warning}"] if warning else []

    @property
    def engine_key(self) -> str:
        """Hash of the engine's settings: what is served anew is looked at anew. A hash, since it may hold secrets."""
        return sha256_hex(canonical_json(self.config.engine.model_dump(mode="json")))[:16]

    @property
    def prompts_key(self) -> dict[str, Any]:
        """All that decides what the prompt shards hold."""
        settings = self.config.prompts.model_dump(exclude={"path"})
        return {"digest": self.survey.digest, "size": self.config.shards.size, **settings}


def make_plan(settings: dict[str, Any]) -> Plan:
    """Validate the settings, refuse what would mix answers, and survey the prompts.

    Raises:
        UserError: one clear line.
    """
    config = load_config(settings)
    contract.check(config)
    plan = Plan(config, _look(config))
    if config.pools.only:
        _check_pool(plan, config.pools.only)
    return plan


def _look(config: Config) -> Survey:
    """A survey of the prompts; an empty one as long as they are not here."""
    path = prompts_file(config)
    if not is_fetched(config):
        return Survey(path, 0, 0, 0, config.shards.size, [])
    return cached_survey(path, config.shards.size, config.layout.prompt_index)


def _check_pool(plan: Plan, pool: str) -> None:
    """What a pool builds on was made before it, and is not made again by it: other pools use the same."""
    index, where = read_json_or_none(plan.layout.prompt_index), f"pool {pool}"
    if not index or index.get("digest") != plan.survey.digest:
        hint = "run the whole workflow again: it cuts the prompts, then the pools"
        raise UserError("the prompts are not the ones that were cut into shards", where=where, hint=hint)
    if not plan.shards:
        raise UserError(f"no such shards; there are {len(plan.survey.digests)}", where=where)
    if not plan.layout.model_manifest.exists():
        raise UserError("the model is not there yet", where=where, hint="run the whole workflow, which gets it first")


def clear_lies(plan: Plan) -> list[str]:
    """Remove files that claim what is no longer so; returns a line to be told for each.

    While another process owns the run, nothing is touched: what looks wrong from here may be what it is working on.
    """
    config, layout = plan.config, plan.layout
    if owner_is_alive(layout):
        return []
    told = clear_stale(config)
    told += _clear_proofs(plan)
    index = read_json_or_none(layout.prompt_index)
    if not config.pools.only and index is None and layout.prompt_index.exists():
        layout.prompt_index.unlink()
        told.append("the prompts are cut anew: prompts/index.json was damaged")
    if not plan.pending:
        return told
    told += _clear_cut_files(plan)
    if not plan.pools:
        told += clear_broken_environment(config)
    if not config.pools.only and (problem := manifest_problem(config)):
        layout.model_manifest.unlink(missing_ok=True)
        told.append(f"the model is checked anew: {problem}")
    staged = None if plan.pools else plan.staged_manifest
    if staged and staged.exists() and (problem := staging_problem(config)):
        staged.unlink(missing_ok=True)
        told.append(f"the staged model is made anew: {problem}")
    # An index of another input is made again in any case.
    if not config.pools.only and index and index.get("digest") == plan.survey.digest:
        damaged = damaged_shards(layout, index, sorted(plan.pending))
        if damaged:
            layout.prompt_index.unlink(missing_ok=True)
            told.append(f"the prompt shards are made anew: {len(damaged)} of them are missing or damaged")
    return told


def _clear_cut_files(plan: Plan) -> list[str]:
    """Set aside completions whose files are not those that were written; with pools, each sees to its own."""
    if plan.pools:
        return []
    set_aside = {shard: path for shard in sorted(plan.pending) if (path := set_cut_aside(plan.layout, shard))}
    return [
        f"shard {shard} is written anew: its files are missing or damaged ({path})" for shard, path in set_aside.items()
    ]


def _clear_proofs(plan: Plan) -> list[str]:
    """Take back the proofs of pools that have work again; a pool without its proof is submitted."""
    layout = plan.layout
    taken = [pool for pool in plan.pools if pool in plan.open_pools and layout.pool_proof(pool).exists()]
    if not taken:
        return []
    problem = proof_problem(layout, taken[0], plan.pools[taken[0]]) or "its prompts or settings changed"
    for pool in taken:
        layout.pool_proof(pool).unlink(missing_ok=True)
    others = f" (and {len(taken) - 1} more pools)" if len(taken) > 1 else ""
    return [f"pool {taken[0]} has work again: {problem}{others}"]
