# make serve, make test: both set up .venv first. make help lists all.
SHELL := /bin/bash
# Kernels compile while packages are fetched. Several goals go one after the other: of clean and
# test, neither would live. Nor may two fetch packages at once, as wheel and test would.
ifeq ($(words $(MAKECMDGOALS)),1)
ifeq ($(filter test-wheel test-clients test-real-models test-vllm audit docs,$(MAKECMDGOALS)),)
MAKEFLAGS += -j2
endif
endif
PYTHON ?= python3
BIN := .venv/bin
# Compiling all of what is installed takes a minute; Python compiles what is imported.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile
# What is pinned is installed as it was pinned: by its hash (requirements/lock.py).
PINNED := --require-hashes -r
# Where Python may not keep what it has compiled, each of a hundred processes would do it anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install model serve test test-all fuzz test-dist test-architectures matrix test-isa test-arm test-schemas test-formats test-clients test-real-models test-vllm test-faults test-deploy check audit sbom size tree ab wheel test-wheel docs bench-cpu bench-peers card card-pack card-offline clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

install: .venv/runtime  ## create .venv with pinned dependencies
serve: .venv/runtime  ## start the server on the embedded model (MODEL=smollm2 on that; ARGS="--port 9000" adds flags)
	@exec $(BIN)/python -m aioserve $(if $(MODEL),--model $(MODEL)) $(ARGS)

model: .venv/runtime  ## fetch a small model that can talk, 98 MB, into models/: make serve MODEL=smollm2
	@$(BIN)/python -m aioserve fetch smollm2

# What `check` has run is not run again.
CHECKS := tests/test_patterns.py tests/test_docstrings.py
UNCHECKED := $(CHECKS:%=--ignore=%)

test: .venv/test check  ## install what tests need, check style and types, run the tests (ARGS=tests/lab adds words)
	$(BIN)/python -m pytest -q -n 3 --dist worksteal $(UNCHECKED) -m "not slow and not dist and not architectures and not browser and not real_models" $(ARGS)

test-all: .venv/test check  ## the slow tests as well
	$(BIN)/python -m pytest -q -n 2 --dist worksteal $(UNCHECKED) -m "not dist and not architectures and not browser and not real_models" $(ARGS)

test-dist: .venv/dist  ## several processes, and what becomes of them when one dies
	$(BIN)/python -m pytest -q -m dist $(ARGS)
	AIOSERVE_TEST_WORKER=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" tests/server

test-architectures: .venv/test  ## all text decoders that transformers has: served as docs/architectures.md says?
	$(BIN)/python -m pytest -q -n 2 --dist worksteal tests/architectures $(ARGS)

matrix: .venv/test  ## every feature beside every other; writes docs/compatibility.md, ten minutes (ARGS=workers)
	$(BIN)/python -m tests.matrix $(ARGS)

test-isa: .venv/test  ## runner, kernels, reference on every variant and type; lesser CPUs emulated
	$(BIN)/python -m tests.isa

test-schemas: .venv/test  ## the JSON-Schema test-suite against structured outputs
	$(BIN)/python -m tests.json_schema_suite

test-formats: .venv/test  ## round trips over public chat templates; writes docs/chat-templates.md (ARGS=QwQ: of these alone)
	$(BIN)/python -m tests.formats $(ARGS)

# Of pytest, 5: there is no test of that name.
CLIENTS := -m pytest -q -c tests/clients/pytest.ini --confcutdir tests/clients
test-clients: .venv/clients/done .venv/libraries/done .venv/agents/done model  ## LangChain, LiteLLM and its proxy, instructor, Ollama's client, openai-agents, pydantic-ai, LangGraph, smolagents, Codex and Claude Code against a server (ARGS="-k litellm")
	.venv/clients/bin/python $(CLIENTS) tests/clients --ignore tests/clients/libraries $(ARGS) || [ $$? = 5 ]
	.venv/libraries/bin/python $(CLIENTS) tests/clients/libraries $(ARGS) || [ $$? = 5 ]

test-real-models: .venv/test .venv/libraries/done model  ## trained weights of strangers' packages, 730 MB: tokens beside transformers, tools by real clients (ARGS="-k qwen")
	$(BIN)/python -m tests.real_models
	$(BIN)/python -m pytest -q tests/real_models $(ARGS) || [ $$? = 5 ]
	.venv/libraries/bin/python $(CLIENTS) tests/clients/libraries/test_real_tool_loop.py $(ARGS) || [ $$? = 5 ]

test-vllm: .venv/vllm/done  ## aioserve's policies in a real vLLM on this CPU, 2 GB (ARGS="-k drafts"; SLOW=1: 300 prompts; make clean and VLLM=0.31.0: another one)
	.venv/vllm/bin/python -m pytest -q tests/vllm -m "$(if $(SLOW),,not slow)" $(ARGS) || [ $$? = 5 ]

test-faults: .venv/test  ## every kind of fault at every point of a request's way, and 300 random days (DAYS=1000)
	AIOSERVE_FAULT_DAYS=$(or $(DAYS),300) $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/faults $(ARGS)

test-deploy: .venv/deploy  ## the Dockerfile, unit and manifests of deploy/, and workflows, by linters too
	$(BIN)/python -m pytest -q tests/deploy $(ARGS)

fuzz: .venv/test  ## input at random for all that reads what others wrote (SECONDS=600, ARGS="http gguf")
	TQDM_DISABLE=1 $(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),600) $(ARGS)

test-page: .venv/test .venv/page/done  ## the page and the lab's report: types of their JavaScript; a real browser (apt-get install npm chromium)
	.venv/page/node_modules/.bin/tsc -p tests/page
	.venv/page/node_modules/.bin/tsc -p tests/page/report.json
	$(BIN)/python -m pytest -q -m "browser and not slow" tests/page $(ARGS)

# The flags are those of setup.py's baseline: keep in step.
ARM := aarch64-linux-gnu
test-arm:  ## every kernel on an emulated Arm
	@command -v qemu-aarch64 $(ARM)-gcc >/dev/null && [ -e /usr/$(ARM)/lib/libgomp.so.1 ] || \
		{ echo "needs: apt-get install qemu-user gcc-$(ARM) libc6-dev-arm64-cross"; exit 1; }
	@mkdir -p build/arm
	$(ARM)-gcc -shared -fPIC -O3 -std=gnu11 -fopenmp -fvisibility=default -Wno-psabi \
		-fno-math-errno -fno-trapping-math -o build/arm/kernels.so aioserve/kernels/src/kernels.c
	$(ARM)-gcc -shared -fPIC -O3 -g0 -std=gnu11 -fopenmp -Wno-psabi \
		-fno-math-errno -fno-trapping-math -o build/arm/tokens.so \
		aioserve/kernels/src/tokens/choose_tokens.c
	$(ARM)-gcc -O2 -std=gnu11 -o build/arm/check_kernels tests/kernels/check_kernels.c -ldl -lm
	OMP_NUM_THREADS=2 qemu-aarch64 -L /usr/$(ARM) build/arm/check_kernels build/arm/kernels.so \
		build/arm/tokens.so

check: .venv/test-packages  ## ruff, mypy, no regex that is made of data, docstrings that begin with a verb
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(CHECKS)

audit: .venv/audit/done .venv/test-packages  ## bandit's rules on the code, advisories on every pinned version (ARGS=--offline: the first alone must hold)
	$(BIN)/ruff check .
	@.venv/audit/bin/python requirements/audit.py $(ARGS)

sbom:  ## what a release is installed with, as CycloneDX JSON in dist/sbom.cdx.json (ARGS="runtime.txt ray.txt": of these pins)
	@mkdir -p dist
	$(PYTHON) requirements/sbom.py $(ARGS) > dist/sbom.cdx.json

size: .venv/test  ## what a process loads to serve, and lines per folder
	@$(BIN)/python -m tests.size

tree:  ## every folder and file, with a sentence about each (ARGS=aioserve/engine: of one folder)
	@$(PYTHON) -m tests.tree $(ARGS)

ab: .venv/runtime  ## compare the three main policies in virtual time (ARGS="--html ab.html" adds flags)
	@$(BIN)/python -m aioserve compare fcfs chunked_prefill priority --workload mixed $(ARGS)

wheel: .venv/build  ## one wheel with all kernels, and an sdist, in dist/, which twine checks
	rm -rf dist
	AIOSERVE_BUILD=release $(BIN)/python -m build --no-isolation
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair -w dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(BIN)/python -m twine check --strict dist/*

test-wheel: .venv/test wheel  ## install it where there is no compiler, and run the commands of README.md
	AIOSERVE_WHEEL="$$(echo dist/*.whl)" $(BIN)/python -m pytest -q tests/test_wheel.py $(ARGS)

docs: .venv/docs/done  ## the site of docs/ in site/; a broken link is an error (ARGS=serve shows it while you write)
	@NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs $(or $(ARGS),build --strict)

bench-cpu: .venv/runtime  ## steps against their floors (MODEL=135m, 0.6b, 2m or a directory)
	@$(BIN)/python benchmarks/steps.py $(or $(MODEL),135m) $(ARGS)

bench-peers: .venv/runtime  ## aioserve beside llama.cpp, vLLM and others, which it builds (ARGS=--write: tables into the pages; PEERS="ours=URL other=URL" LOADS="W1 W5": servers that run)
ifdef PEERS
	@$(BIN)/python benchmarks/peers.py $(PEERS) $(if $(LOADS),--loads $(LOADS)) $(ARGS)
else
	@[ -e models/smollm2.gguf ] || $(BIN)/python -m aioserve fetch smollm2
	@$(BIN)/python benchmarks/build_peers.py || echo "going on without what is missing"
	@$(BIN)/python benchmarks/peers.py $(if $(LOADS),--loads $(LOADS)) $(ARGS)
endif

card: .venv/runtime  ## whether a CUDA card computes right and fast, in stages, 9 minutes (ARGS="--stages ..sampler", --resume, --rehearse)
	@$(BIN)/python benchmarks/card.py run $(ARGS)

card-pack: .venv/runtime  ## wheels for card-offline, with compiled attention kernels, in build/card/wheels; needs nvcc, an hour (ARGS="--python 3.12")
	@$(BIN)/python benchmarks/card_pack.py kernels
	@$(BIN)/python benchmarks/card_pack.py wheels $(ARGS)

card-offline:  ## make card without a network or .venv: $(PYTHON) has torch and transformers, build/card/wheels the rest
	@$(PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade \
		--target build/card/site build/card/wheels/*.whl
	@PYTHONPATH=$(CURDIR)/build/card/site:$(CURDIR) FLASHINFER_WORKSPACE_BASE=$(CURDIR)/build/card \
		FLASHINFER_DISABLE_JIT=$${FLASHINFER_DISABLE_JIT-1} \
		$(PYTHON) benchmarks/card.py run $(ARGS)

clean:  ## remove .venv, what was built, and caches
	rm -rf .venv build dist site *.egg-info aioserve/kernels/*.so .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "aioserve needs Python 3.11 or newer, and $(PYTHON) is" \
		"$$($(PYTHON) -V 2>/dev/null || echo "not there"). Another one: make ... PYTHON=python3.13"; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

KERNELS := setup.py $(wildcard aioserve/kernels/src/*) $(wildcard aioserve/kernels/src/tokens/*)

.venv/runtime: .venv/packages .venv/kernels
	@touch $@

.venv/packages: requirements/runtime.txt | .venv/bin/python
	@$(BIN)/python requirements/install_torch.py
	@echo "the rest of requirements/runtime.txt: 50 MB"
	@$(PIP) $(PINNED) requirements/runtime.txt
	@touch $@

.venv/kernels: pyproject.toml $(KERNELS) | .venv/bin/python
	@echo "aioserve itself, compiling its kernels"
	@$(BIN)/python -m pip --disable-pip-version-check uninstall -q -y aioserve 2>/dev/null || true  # its name before 0.3
	@$(PIP) --no-deps -e .
	@[ "$$(uname)" != Linux ] || [ -e aioserve/kernels/_baseline.so ] || \
		echo "The kernels were not compiled: plain torch does their work, slower. Is there a C" \
		"compiler? Install gcc, then: make -B install"
	@touch $@

.venv/test-packages: requirements/test.txt .venv/packages
	@echo "requirements/test.txt: 310 MB; a model, which the tests fetch themselves: 98 MB"
	@$(PIP) $(PINNED) requirements/test.txt
	@touch $@

.venv/test: .venv/test-packages .venv/runtime
	@touch $@

.venv/dist: requirements/ray.txt .venv/test
	@echo "requirements/ray.txt: 90 MB"
	@$(PIP) $(PINNED) requirements/ray.txt
	@touch $@

.venv/deploy: requirements/deploy.txt .venv/test
	@echo "requirements/deploy.txt: 35 MB"
	@$(PIP) $(PINNED) requirements/deploy.txt
	@touch $@

.venv/clients/done: requirements/clients.txt .venv/test
	@echo "requirements/clients.txt: 180 MB"
	@$(BIN)/python -m venv .venv/clients
	@.venv/clients/bin/python -m pip --disable-pip-version-check install -q $(PINNED) requirements/clients.txt
	@touch $@

.venv/vllm/done: requirements/install_vllm.py .venv/test
	@echo "vLLM's CPU build: 2 GB"
	@$(BIN)/python requirements/install_vllm.py .venv/vllm --with-aioserve
	@touch $@

.venv/libraries/done: requirements/libraries.txt .venv/test
	@echo "requirements/libraries.txt: 50 MB"
	@$(BIN)/python -m venv .venv/libraries
	@.venv/libraries/bin/python -m pip --disable-pip-version-check install -q $(PINNED) requirements/libraries.txt
	@touch $@

# Where there is no npm, it is asked for again the next time.
.venv/agents/done: tests/clients/package.json | .venv/bin/python
	@mkdir -p .venv/agents && cp tests/clients/package.json .venv/agents/
	@if ! command -v npm >/dev/null; then \
		echo "there is no npm: Codex and Claude Code are left out (apt-get install npm)"; \
	else \
		echo "tests/clients/package.json: 640 MB"; \
		npm install --prefix .venv/agents --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
			&& touch $@; \
	fi

.venv/page/done: tests/page/package.json | .venv/bin/python
	@command -v npm >/dev/null || { echo "needs: apt-get install npm"; exit 1; }
	@mkdir -p .venv/page && cp tests/page/package.json .venv/page/
	@npm install --prefix .venv/page --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error
	@touch $@

.venv/audit/done: requirements/audit.txt | .venv/bin/python
	@$(BIN)/python -m venv .venv/audit
	@.venv/audit/bin/python -m pip --disable-pip-version-check install -q $(PINNED) requirements/audit.txt
	@touch $@

.venv/docs/done: requirements/docs.txt | .venv/bin/python
	@echo "requirements/docs.txt: 30 MB"
	@$(BIN)/python -m venv .venv/docs
	@.venv/docs/bin/python -m pip --disable-pip-version-check install -q $(PINNED) requirements/docs.txt
	@touch $@

.venv/build: requirements/build.txt .venv/runtime
	@$(PIP) $(PINNED) requirements/build.txt
	@touch $@
