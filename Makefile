# Two commands, from a fresh clone: `make quickstart` and `make test`. Both make their own environment in .venv.
# Arguments for the quickstart: make quickstart ARGS="--updates 3"       Another Python: make test PYTHON=python3.12
# Without a GPU torch comes as a CPU build; TORCH=any takes the build that pip takes.

PYTHON ?= python3
ARGS ?=
TORCH ?= cpu
BIN := .venv/bin
BOOTSTRAP := $(PYTHON) scripts/bootstrap.py $(if $(filter any,$(TORCH)),--any-torch)

# torch's threads spin and starve each other: one each, and sleeping while they wait.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help quickstart test lint env env-dev

help:
	@echo "make quickstart    train a coding agent here, in minutes, and show the result"
	@echo "make test          linters, types, import rules and the fast tests"
	@echo "make lint          linters, types and import rules alone"

env:
	@$(BOOTSTRAP)

env-dev:
	@$(BOOTSTRAP) --dev

quickstart: env
	@$(BIN)/farflung quickstart $(ARGS)

lint: env-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 8
