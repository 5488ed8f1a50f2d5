# The two commands that matter: `make run` (a first dataset) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help env dev slurm run monitor report test test-slow chaos test-slurm test-sglang bench lint lock docs clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST) | column -s: -t

env: $(VENV)/.env ## build the environment, so that .venv/bin/snakemake is there
dev: $(VENV)/.dev ## the same, with what tests and checks need

$(VENV)/.env: envs/requirements.lock
	@$(PYTHON) envs/build.py $(VENV) envs/requirements.lock
	@touch $@

$(VENV)/.dev: envs/requirements-dev.lock $(VENV)/.env
	@$(PYTHON) envs/build.py $(VENV) envs/requirements-dev.lock
	@touch $@

slurm: env ## what submits pools to Slurm (docs/many-machines.md)
	@$(PYTHON) envs/build.py $(VENV) envs/slurm.lock

run: env ## make the demo dataset: a real model, real answers
	@$(BIN)/snakemake --cores 7

monitor: env ## see the run of config.yaml while it goes on
	@$(BIN)/python scripts/monitor.py

report: env ## its report, finished or not
	@$(BIN)/python scripts/report.py

test: dev ## the tests
	@$(BIN)/python -m pytest -q -n 4 --dist worksteal -m "not slow and not slurm and not sglang"

test-slow: dev ## minutes of real faults, full disks, object storage and environments
	@$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "slow and not slurm and not sglang"

chaos: dev ## whole runs under seeded kills, full disks and damage: make chaos RUNS=20 SEED=1 (docs/reliability.md)
	@$(BIN)/python -m tests.chaos --runs $(or $(RUNS),20) --seed $(or $(SEED),1)

bench: dev ## how full the servers are, and what a shard job costs (minutes; see docs/benchmarks.md)
	@PYTHONPATH=scripts:. $(BIN)/python -m benchmarks.client_cost
	@PYTHONPATH=scripts:. $(BIN)/python -m benchmarks.dispatch

test-slurm: dev ## the tests on a real Slurm of three emulated nodes; installs that with apt-get, as root
	@$(PYTHON) envs/build.py $(VENV) envs/slurm.lock
	@$(BIN)/python -m pytest -q -m slurm tests/slurm

test-sglang: dev ## the tests on the real SGLang on CPU; its first run builds that (3 GB)
	@$(BIN)/python tests/sglang/build_env.py
	@$(BIN)/python -m pytest -q -m sglang tests/sglang

lint: dev ## what CI checks beside the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/snakemake --lint

lock: ## resolve the lock files anew (needs uv)
	uv pip compile --universal --generate-hashes --python-version 3.11 --no-annotate --no-header -q envs/requirements.in -o envs/requirements.lock
	uv pip compile --universal --generate-hashes --python-version 3.11 --no-annotate --no-header -q -c envs/requirements.lock envs/requirements-dev.in -o envs/requirements-dev.lock
	uv pip compile --universal --generate-hashes --python-version 3.11 --no-annotate --no-header -q -c envs/requirements.lock envs/slurm.in -o envs/slurm.lock
	$(PYTHON) envs/pin_conda.py

docs: dev ## docs/config.md and the schema, from the configuration's models
	@$(BIN)/python scripts/document_config.py

clean: ## remove what tests and tools left; results/ stays
	rm -rf .pytest_cache .ruff_cache .hypothesis .cache
