# `make demo` and `make test` set themselves up on a machine with Python 3.11+, git and make.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first interpreter that is new enough; `make PYTHON=/path/to/python test` picks another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$python; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# numpy is no need of ours: torch warns on import where it is missing.
TORCH := $(shell grep -E '^(torch|numpy)==' constraints.txt)
RUNS ?= 15
# Workers of pytest. Tests that start process groups or Slurm share one of them (tests/conftest.py).
WORKERS ?= 2

.PHONY: help demo test lint types bench docs fit clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 8

demo: $(VENV)/.runtime  ## plan, emit and run a small decoder on four CPU processes
	@PATH="$(abspath $(BIN)):$$PATH" docs/tutorial/demo.sh demo

test: $(VENV)/.dev  ## run the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

lint: $(VENV)/.dev  ## check style and formatting, and the shell scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck .ci/run docs/tutorial/demo.sh tests/gpu/session.sh

types: $(VENV)/.dev  ## check types
	$(BIN)/mypy

bench: $(VENV)/.dev  ## measure the start-up of the command line
	$(BIN)/python tests/benchmarks/startup.py --runs $(RUNS)

docs: $(VENV)/.dev  ## write the generated pages and outputs again
	$(BIN)/python docs/validation.py
	$(BIN)/python docs/generate.py

fit: $(VENV)/.dev  ## fit the profiles' constants to the tables again, in about five minutes
	$(BIN)/python -m fsdpplan.validate.fit_kernels
	$(BIN)/python -m fsdpplan.validate.fit_steps
	$(BIN)/python -m fsdpplan.validate.fit_memory
	$(BIN)/python -m fsdpplan.validate.held_out
	$(BIN)/python -m fsdpplan.validate.fit_bands

clean:  ## remove what make made
	rm -rf $(VENV) demo dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch first and by itself: where a build for this machine is at hand, pip takes that one.
$(VENV)/.runtime: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'make: no Python 3.11 or newer on PATH; install one, or' \
		'name it: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual" \
		'environments; on Debian: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt $(TORCH)
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@
