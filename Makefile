# Everything sets itself up: the first target that is run makes .venv (see scripts/make_venv.sh).

SHELL := /bin/bash
BIN := .venv/bin
.DEFAULT_GOAL := help

# One thread per process: the tests and the demo run several ranks on few cores.
export OMP_NUM_THREADS ?= 1
# Arguments handed through: make pretrain ARGS="--iterations 60", make test ARGS="tests/unit -x"
ARGS ?=

.PHONY: help venv pretrain test test-all chaos lint clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

venv:  ## find Python 3.12, make .venv, install what setup.py asks for (once)
	@scripts/make_venv.sh

pretrain: venv  ## the demo: pre-train on 4 CPU replicas, kill two, compare with a run without failures
	@$(BIN)/python scripts/demo/pretrain.py $(ARGS)

test: lint  ## lint, the fast tests and the pairwise part of the failure matrix (about 15 minutes)
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: lint  ## everything, with the whole failure matrix
	@mkdir -p runs
	@$(BIN)/python -m pytest --junitxml runs/test-all.xml $(ARGS)

chaos: venv  ## random failures of every kind at every moment, on a small trainer (a few minutes; ARGS for more)
	@$(BIN)/python scripts/chaos.py --failures 60 $(ARGS)

lint: venv  ## ruff and mypy
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/mypy --no-error-summary

clean:  ## remove what the demo and the tools left behind (not .venv, not your own runs and data)
	rm -rf runs/pretrain data/demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
