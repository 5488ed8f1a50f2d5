"""Where everything of a run lies. The one place that knows the names of files."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def slug(text: str, *, length: int = 40) -> str:
    """`text` as a safe, readable part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:length] or "x"


@dataclass(frozen=True)
class Layout:
    """Paths of one run, relative to the working directory, as Snakemake wants them.

    Args:
        results: folder of all runs (`run.results`).
        run: name of this run (`run.name`).
        pool: name of the pool whose view this is, in a run over several machines.
    """

    results: str
    run: str
    pool: str | None = None

    @property
    def root(self) -> Path:
        return Path(self.results) / self.run

    @property
    def home(self) -> Path:
        """What one machine has for itself: the run's folder, or in a run over several machines the pool's.

        Locks, servers, progress and logs lie here; what lies under `root` is of the whole run, and each
        shard's files are written by the one pool that the shard belongs to.
        """
        return self.pools / self.pool if self.pool else self.root

    # The run itself
    @property
    def lock(self) -> Path:
        """Held by the live owner of the run, or of the pool; says who that is."""
        return self.home / "run.lock"

    @property
    def contract(self) -> Path:
        """The settings that decide the answers, as locked by the first start."""
        return self.root / "run.json"

    @property
    def api_key(self) -> Path:
        return self.home / "servers" / "api_key"

    # Prompts
    @property
    def fetched_prompts(self) -> Path:
        """Prompts that come from a hub, as one local file."""
        return self.root / "prompts" / "fetched.jsonl.zst"

    @property
    def fetched_record(self) -> Path:
        """What was fetched: repo, commit, files."""
        return self.root / "prompts" / "fetched.json"

    @property
    def prompt_index(self) -> Path:
        return self.root / "prompts" / "index.json"

    @property
    def prompt_rejects(self) -> Path:
        return self.root / "prompts" / "rejected.jsonl"

    def prompt_shard(self, shard: str) -> Path:
        return self.root / "prompts" / "shards" / f"{shard}.jsonl.zst"

    # Model
    @property
    def model_manifest(self) -> Path:
        return self.root / "model" / "manifest.json"

    @property
    def model_store(self) -> Path:
        """Downloads of all runs, so that a second run of the same model downloads nothing."""
        return Path(self.results) / ".models"

    # Servers
    def ready(self, server: str) -> Path:
        return self.home / "servers" / f"{server}.ready"

    def server_status(self, server: str) -> Path:
        return self.home / "servers" / f"{server}.status.json"

    def server_info(self, server: str) -> Path:
        """What a server said of itself when it became ready; stays for the manifest."""
        return self.home / "servers" / f"{server}.info.json"

    def server_spec(self, server: str) -> Path:
        return self.home / "servers" / f"{server}.spec.json"

    def server_secret(self, server: str) -> Path:
        """A server's api key as its engine wants to read it; there only while the server starts."""
        return self.home / "servers" / f"{server}.secret.yaml"

    def server_log(self, server: str) -> Path:
        return self.home / "logs" / "servers" / f"{server}.engine.log"

    def supervisor_log(self, server: str) -> Path:
        return self.home / "logs" / "servers" / f"{server}.supervisor.log"

    @property
    def ledger(self) -> Path:
        """Shared in-flight counters of the jobs on this machine: node-local, so its locks hold."""
        key = hashlib.sha256(os.path.abspath(self.home).encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"shardmill-{os.getuid()}-{slug(self.run, length=20)}-{key}.ledger"

    @property
    def canary(self) -> Path:
        return self.home / "quality" / "canary.json"

    # Samples
    @property
    def samples(self) -> Path:
        return self.home / "samples"

    def server_samples(self, server: str) -> Path:
        return self.samples / f"server-{server}.jsonl"

    def shard_samples(self, shard: str) -> Path:
        return self.samples / "shards" / f"{shard}.jsonl"

    @property
    def forecasts(self) -> Path:
        """How far the whole run was, and when it was to end, minute by minute."""
        return self.samples / "run.jsonl"

    @property
    def alarms(self) -> Path:
        """Alarms as they were raised and cleared."""
        return self.samples / "alarms.jsonl"

    # Pools
    @property
    def pools(self) -> Path:
        """What belongs to each pool of a run over several machines."""
        return self.root / "pools"

    def of_pool(self, pool: str) -> Layout:
        """The same run as one of its pools sees it."""
        return Layout(self.results, self.run, pool)

    def pool_proof(self, pool: str) -> Path:
        """What a finished pool says of its shards' files."""
        return self.pools / f"{pool}.json"

    @property
    def pool_config(self) -> Path:
        """The configuration that a pool runs with."""
        return self.home / "config.json"

    @property
    def pool_job(self) -> Path:
        """The job that a pool was last worked on by, and what it left."""
        return self.home / "job.json"

    @property
    def calibration(self) -> Path:
        """What `snakemake calibrate` measured."""
        return self.root / "calibration.json"

    # Shards
    @property
    def journal_cut(self) -> Path:
        """Which prompts each journal was last known to belong to."""
        return self.root / "journals" / "cut.json"

    def journal(self, shard: str) -> Path:
        return self.root / "journals" / f"{shard}.jsonl"

    def progress(self, shard: str) -> Path:
        return self.home / "progress" / f"{shard}.json"

    def completions(self, shard: str) -> Path:
        return self.root / "completions" / f"{shard}.jsonl.zst"

    def rejects(self, shard: str) -> Path:
        return self.root / "rejected" / f"{shard}.jsonl.zst"

    def stats(self, shard: str) -> Path:
        return self.root / "stats" / f"{shard}.json"

    # Result
    @property
    def dataset(self) -> Path:
        return self.root / "dataset" / "completions.jsonl.zst"

    @property
    def dataset_rejects(self) -> Path:
        return self.root / "dataset" / "rejected.jsonl.zst"

    @property
    def manifest(self) -> Path:
        return self.root / "dataset" / "manifest.json"

    def training(self, name: str) -> Path:
        """A format of the training view."""
        files = {"conversations": "conversations.jsonl.zst", "tokens": "tokens.parquet"}
        return self.root / "dataset" / "training" / files[name]

    @property
    def training_report(self) -> Path:
        return self.root / "dataset" / "training" / "report.json"

    @property
    def card(self) -> Path:
        """The dataset card."""
        return self.root / "dataset" / "README.md"

    def training_files(self, formats: Iterable[str]) -> list[Path]:
        """All that the training view in these formats makes; nothing for none."""
        views = [self.training(name) for name in formats]
        return [*views, self.training_report, self.card] if views else []

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def log(self, *parts: str) -> Path:
        """A rule's log path mirrors its output path."""
        return self.home.joinpath("logs", *parts)
