# Sets up and runs Crab on Debian or Ubuntu, as root. Says nothing unless there is something to do or something is wrong.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup image demo test bench lint format clean

CRAB_STATE ?= /var/lib/crab
CRAB_PRIVATE ?= /var/lib/crab/private
PYTHON ?= python3
ARGS ?=
export CRAB_STATE CRAB_PRIVATE

BIN := .venv/bin

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(BIN)/.stamp ## Distribution packages, .venv, private CRIU, C programs (a second time takes a second)
	@$(BIN)/python -m crab.host.provision
	@$(BIN)/python -m crab.native

# Brought up to date when the dependencies change. Debian's own Python comes without venv and pip.
$(BIN)/.stamp: pyproject.toml
	@export DEBIAN_FRONTEND=noninteractive; \
	say() { echo "crab: $$*" >&2; }; \
	get() { said=$$(apt-get -qq install -y --no-install-recommends "$$@" 2>&1); }; \
	install() { say "installing $$*"; get "$$@" || { apt-get -qq update && get "$$@"; } || { echo "$$said" >&2; exit 1; }; }; \
	recent() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; \
	if ! recent $(BIN)/python; then \
	    command -v $(PYTHON) >/dev/null || install python3 python3-venv; \
	    recent $(PYTHON) || { say "$(PYTHON) is older than 3.11: make PYTHON=/path/to/a/newer/one"; exit 1; }; \
	    $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || install python3-venv; \
	    $(PYTHON) -m venv --clear .venv; \
	fi; \
	say "installing Python packages into .venv (half a minute)"; \
	$(BIN)/pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@

image: setup ## The default image of sandboxes (a minute, once)
	@$(BIN)/crab --embedded image add --if-missing debian debian:bookworm

demo: setup ## A recorded agent at work, killed and brought back
	@$(BIN)/python -m crab.replay.demo $(ARGS)

test: setup ## All tests; ARGS='-k name' for some
	@$(BIN)/pytest -q $(ARGS)

bench: setup ## Measure what single operations cost on this machine (ARGS=--quick)
	@$(BIN)/python -m bench.latency $(ARGS)

lint: $(BIN)/.stamp ## Style, types and the table of layers
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --warnings
	@$(BIN)/lint-imports --no-logo

format: $(BIN)/.stamp ## Repair what the tools can repair of the style
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

clean: ## Remove what was made in this folder (state in $(CRAB_STATE) and the private CRIU stay)
	@rm -rf .venv build dist .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/crab/native/bin
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
