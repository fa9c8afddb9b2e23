# `make demo` and `make test` set themselves up on a machine with Python 3.11+, git and make.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Hundreds of tests start the program: it is compiled once.
unexport PYTHONDONTWRITEBYTECODE

# The first interpreter that is new enough; `make PYTHON=/path/to/python test` picks another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$python; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
# What is imported is compiled then: of all that is installed that is a tenth.
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
INSTALL := $(PIP) install --no-compile --constraint constraints.txt
# numpy is no need of ours: torch warns on import where it is missing.
TORCH := $(shell grep -E '^(torch|numpy)==' constraints.txt)
RUNS ?= 15
PLANS ?= 100
CASES ?= 1500
SEED ?= 0
# Workers of pytest, for two cores: tests that start process groups share one of them, those of Slurm
# another (tests/conftest.py); both mostly wait.
WORKERS ?= 3

# Releases of torch that are claimed, the newest last; `make VERSION=2.9.1 test-torch` takes one.
TORCH_VERSIONS := 2.8.0 2.9.1 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1 2.15.0
VERSION ?= $(TORCH_VERSIONS)
# What depends on torch; `make TESTS=tests/trainer/test_losses.py test-torch` runs less.
TESTS ?= tests/trainer tests/ground_truth tests/run/rehearse/test_rehearse.py tests/cli/commands/test_rehearse.py
# Pythons of all releases that are installed, which exchange checkpoints.
TORCH_PYTHONS = $(wildcard .torch/*/bin/python)

.PHONY: help demo test quick test-whole test-torch lint types numbers bench link tight nearest brute fuzz browser rehearse-many links-of-mixtures docs site fit package release-notes clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 8

demo: $(VENV)/.runtime  ## plan, emit and run a small decoder on four CPU processes
	@PATH="$(abspath $(BIN)):$$PATH" docs/tutorial/demo.sh demo

test: $(VENV)/.dev  ## run the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

quick: $(VENV)/.dev  ## run the tests of what differs from main: of few modules in a minute or two
	$(BIN)/python -m tests.quick

test-whole: $(VENV)/.dev  ## run the tests with all cases of each sampled matrix
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --whole

test-torch: $(VERSION:%=.torch/%/.dev)  ## run what depends on torch under other releases of it
	status=0; for version in $(VERSION); do echo "torch $$version"; \
		.torch/$$version/bin/python -m pytest -q -p tests.torch_versions.record \
		--torch-record tests/golden/torch_versions.json $(TESTS) || status=$$?; done; \
	python3 tests/torch_versions/exchange.py $(TORCH_PYTHONS) || status=$$?; exit $$status

lint: $(VENV)/.dev  ## check style and formatting, and the shell scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck .ci/run docs/tutorial/demo.sh tests/gpu/session.sh

types: $(VENV)/.dev  ## check types
	$(BIN)/mypy

numbers: $(VENV)/.dev  ## try the numerical preflight on every layout of the tests, in half an hour
	$(BIN)/python -m tests.trainer.numbers_layouts

bench: $(VENV)/.dev  ## measure the start-up of the command line
	$(BIN)/python tests/benchmarks/startup.py --runs $(RUNS)

link: $(VENV)/.dev  ## measure a link of a known bandwidth, as root, on a machine that does nothing else
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.link

brute: $(VENV)/.dev  ## compare the search with brute force, and with pairs of rare settings, in 20 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.search.brute
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.search.pairs

nearest: $(VENV)/.dev  ## 100 questions that nothing answers: no layout is nearer than the named one, in 20 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.search.nearest

tight: $(VENV)/.dev  ## 60 questions where memory is tight and 40 small ones: no pin beats the free search, in half an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.search.tight

fuzz: $(VENV)/.dev  ## 1,500 bad inputs and 200 signals at random moments, in a quarter of an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.safety.fuzz --cases $(CASES) --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.safety.fuzz --cases 150 --seed $(SEED) --as nobody
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.safety.signals --signals 200 --seed $(SEED)

browser: $(VENV)/.dev  ## open reports of all sizes in Chromium, at all widths, light and dark
	$(BIN)/python -m pytest -n 0 --whole tests/report

rehearse-many: $(VENV)/.dev  ## rehearse a hundred recommended plans, and sixty with units of several blocks, in about half an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.rehearse_many --plans $(PLANS) --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.rehearse_many --plans 60 --seed $(SEED) --wraps

links-of-mixtures: $(VENV)/.dev  ## hold 500 recommended mixtures to what their links carry, in a quarter of an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.links_of_mixtures --plans 500 --seed $(SEED)

package: $(VENV)/.dev  ## build the wheel and the source archive, and try both in clean environments
	$(BIN)/python -m tests.packages --out dist

release-notes: $(VENV)/.dev  ## print the notes of a release: make VERSION=0.2.0 release-notes
	@$(BIN)/python docs/release_notes.py $(VERSION) $(LINKS)

docs: $(VENV)/.dev  ## write the generated pages and outputs again
	$(BIN)/python docs/validation.py
	$(BIN)/python docs/recipes.py
	$(BIN)/python docs/generate.py

site: $(VENV)/.docs  ## make the documentation a site in build/site, searchable and without a network
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs 2 \
		--conf-dir docs -d build/site-cache . build/site
	@echo 'site: open build/site/index.html'

recipes: $(VENV)/.dev  ## search for the recipes' questions again, in two minutes
	$(BIN)/python docs/recipes.py --search

fit: $(VENV)/.dev  ## fit the profiles' constants to the tables again, in about five minutes; OWN= a folder of tests/gpu/session.sh joins them
	test -z "$(OWN)" || PYTHONPATH=. $(BIN)/python tests/benchmarks/single_gpu_rows.py "$(OWN)"
	$(BIN)/python -m fsdpplan.validate.fit.kernels
	$(BIN)/python -m fsdpplan.validate.fit.steps
	$(BIN)/python -m fsdpplan.validate.fit.memory
	$(BIN)/python -m fsdpplan.validate.fit.held_out
	$(BIN)/python -m fsdpplan.validate.fit.bands
	$(BIN)/python -m fsdpplan.validate.learn.fit_widths
	$(BIN)/python -m fsdpplan.validate.learn.curve --fit

clean:  ## remove what make made
	rm -rf $(VENV) .torch demo dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch first and by itself: where a build for this machine is at hand, pip takes that one.
$(VENV)/.torch: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'make: no Python 3.11 or newer on PATH; install one, or' \
		'name it: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual" \
		'environments; on Debian: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	@touch $@

$(VENV)/.runtime: $(VENV)/.torch
	$(INSTALL) --editable '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch
	$(INSTALL) --editable '.[dev]'
	@$(BIN)/python -c 'import fsdpplan.trainer.train'  # compiled once, not by each worker
	@# what its source would warn of is an error in the tests
	@$(BIN)/python -W ignore -m compileall -qq $(VENV)/lib/python*/site-packages/torchao
	@touch $(VENV)/.runtime $@

$(VENV)/.docs: $(VENV)/.runtime
	$(INSTALL) --editable '.[docs]'
	@touch $@

# An environment of its own for a release of torch, with the torchao that it takes.
.torch/%/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .torch/$*
	grep -vE '^(torch|torchao)==' constraints.txt > .torch/$*/constraints.txt
	.torch/$*/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint .torch/$*/constraints.txt torch==$* numpy
	.torch/$*/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint .torch/$*/constraints.txt --editable .
	wanted=$$(.torch/$*/bin/python -c \
		'from fsdpplan.trainer.torch_versions import torchao_wanted; print(torchao_wanted())'); \
	.torch/$*/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint .torch/$*/constraints.txt --editable '.[dev]' "$$wanted"
	@touch $@
