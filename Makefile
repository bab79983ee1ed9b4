# Everything a person or a machine needs to do with the project. `make setup` is implied by every other target.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
# An index to take torch from, and nothing else: name one with the CPU build to save 2.5 GB of CUDA libraries.
TORCH_INDEX ?=
# Passed on unchanged: make demo ARGS="run.seed=2", make test PYTEST_ARGS="tests/data -x", make bench BENCH_ARGS="".
ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?= --quick
SOAK_MINUTES ?= 60

BIN := .venv/bin
STAMP := .venv/.stamp
INPUTS := requirements/cpu.txt requirements/dev.txt requirements/cpu-nodeps.txt \
	requirements/dev-nodeps.txt setup.py scripts/setup.sh

# Tests that find one core each are steadier than tests that fight for two.
export OMP_NUM_THREADS ?= 1
# Many containers set it; every process would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-trl demo test bench soak lint format gpu-check lock clean

help: ## Show the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

$(STAMP): $(INPUTS)
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash scripts/setup.sh
	@touch $(STAMP)

setup: $(STAMP) ## Make .venv with the locked packages (Linux x86-64, Python 3.11).

setup-trl: $(STAMP) ## Make .venv-trl, with the peer that the end-to-end benchmark compares with.
	@$(BIN)/python -m benchmarks.peer_trl.environment --torch-index "$(TORCH_INDEX)"

demo: $(STAMP) ## A tiny mixture-of-experts model learns arithmetic, asynchronously, on this machine.
	@$(BIN)/moe-asyncrl demo $(ARGS)

test: lint ## Lint, then every test.
	@bash scripts/system_packages.sh
	@bash scripts/test.sh $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, mypy --strict, import-linter.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "lint: run 'make format'"; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(STAMP) ## Let ruff rewrite what it can.
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench: $(STAMP) ## Every program in benchmarks/, each printing one JSON line last.
	@bash scripts/bench.sh $(BENCH_ARGS)

soak: $(STAMP) ## Conversions on all layouts and killed 40 times; a run whose gap is watched; then the demo again and again for SOAK_MINUTES.
	@$(BIN)/python -m tests.checkpoint.convert.soak --kills 20
	@$(BIN)/python -m tests.replay.soak_matrix
	@$(BIN)/python -m tests.train.mismatch.soak --steps 100
	@$(BIN)/python -m tests.weights.soak_updates
	@$(BIN)/python -m tests.weights.soak_storm
	@$(BIN)/python -m tests.weights.soak_kills
	@$(BIN)/python -m pytest -q tests/engine/soak_receiver.py
	@$(BIN)/python scripts/soak.py --minutes $(SOAK_MINUTES) $(ARGS)

gpu-check: $(STAMP) ## Every path that only a GPU can run, in under ten minutes, without network.
	@$(BIN)/python -m moe_asyncrl.cluster.gpu_check $(ARGS)

lock: $(STAMP) ## Resolve requirements/*.in into the locks anew.
	@$(BIN)/python scripts/lock.py

clean: ## Remove what the tools left behind; .venv, .venv-trl and runs/ stay.
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path "./.venv*/*" -prune -exec rm -rf {} +
