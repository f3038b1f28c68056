# make serve, make test: both set up .venv first. make help lists all.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help install serve test check ab bench-cpu bench-peers clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-11s %s\n", $$1, $$2}'

install: .venv/runtime  ## create .venv with pinned dependencies
serve: .venv/runtime  ## start the server on the embedded model (ARGS="--port 9000" adds flags)
	@exec $(BIN)/python -m aioserve $(ARGS)

test: .venv/test check  ## install what tests need, check style and types, run the tests (ARGS=tests/lab adds words)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal $(ARGS)

check: .venv/test  ## ruff and mypy alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ab: .venv/runtime  ## compare the three main policies in virtual time (ARGS="--html ab.html" adds flags)
	@$(BIN)/python -m aioserve compare configs/fcfs.yaml configs/chunked_prefill.yaml \
		configs/priority.yaml --workload configs/workloads/mixed.yaml $(ARGS)

bench-cpu: .venv/runtime  ## steps against their floors (MODEL=135m, 0.6b, 2m or a directory)
	@$(BIN)/python benchmarks/cpu.py $(or $(MODEL),135m) $(ARGS)

bench-peers: .venv/runtime  ## the same loads on servers (PEERS="ours=URL other=URL" LOADS="W1 W5")
	@$(BIN)/python benchmarks/peers.py $(PEERS) $(if $(LOADS),--loads $(LOADS)) $(ARGS)

clean:  ## remove .venv and caches
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "aioserve needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv

KERNELS := setup.py $(wildcard aioserve/kernels/src/*)

.venv/runtime: requirements/runtime.txt pyproject.toml $(KERNELS) | .venv/bin/python
	$(BIN)/pip install -q --disable-pip-version-check -r requirements/runtime.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

.venv/test: requirements/test.txt .venv/runtime
	$(BIN)/pip install -q --disable-pip-version-check -r requirements/test.txt
	@touch $@
