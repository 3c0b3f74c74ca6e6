# `make demo` and `make test` work on a bare machine with Python 3.12: they make .venv and install what they need.

# Processes that run tests side by side; a file's tests stay together.
WORKERS ?= 2
PYTHON ?= $(shell command -v python3.12 || command -v python3 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
# The release that development and demo are pinned to; the library supports more (see README).
PINS := torch==2.11.0 megatron-core==0.19.2

.PHONY: help install demo bench bench-gpu bench-overlap gpu-static test test-whole test-npu fuzz pairs lint format fingerprints matrix matrix-python docs docs-site clean

help:
	@echo "make demo          train a small GPT on real text with features off and on (under 10 minutes)"
	@echo "make bench         the standing benchmarks, into docs/benchmarks/ (about half an hour on an idle machine)"
	@echo "make bench-gpu     correctness, kernels and trainings on one GPU, in 570 seconds (docs/bench.md)"
	@echo "make bench-overlap communication overlapped with computation on links of chosen speed (about 3 minutes)"
	@echo "make gpu-static    predicted times of CUDA kernels and of overlap, without a GPU (about 2 minutes)"
	@echo "make test          lint, types and tests, on four Megatron-core releases and one older; with test-npu where it can run"
	@echo "make test-whole    the same with every layout on every release, and what is long; MAIN=DIR: a checkout of Megatron's main, too"
	@echo "make test-npu      every call of torch_npu on its real wheel, without an NPU (needs gcc; one download of 44 MB)"
	@echo "make fuzz          drawn calls of every operator on this processor: SECONDS=60, SEED= repeats a run"
	@echo "make pairs         features against each other, layouts and options, off and on: SECONDS=3600, SEED= repeats a run"
	@echo "make lint          ruff, mypy, generated files up to date"
	@echo "make fingerprints  recompute the tables of verified releases from .releases"
	@echo "make matrix        every feature on every release, trained off and on, into docs/support.md (about 20 minutes)"
	@echo "make matrix-python a handful of features with another interpreter and torch: PYTHON=python3.10 TORCH=2.6.0"
	@echo "make docs          regenerate docs/support.md and the marked parts of the pages"
	@echo "make docs-site     build the documentation site into build/site; warnings are errors"

install: $(VENV)/.installed

$(VENV)/.installed: setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
	  echo "Python 3.12 or newer is needed for the demo and the tests (megatron-core 0.19.2 requires it); $(PYTHON) is" \
	  "$$($(PYTHON) -V 2>&1). Set PYTHON=/path/to/python3.12. The library itself works from Python 3.10." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[test,bench]'
	@touch $@

demo: install
	@$(BIN)/python -m demo

bench: install
	@PATH="$(CURDIR)/$(BIN):$$PATH" python -m benchmarks

# Downloads nothing: the environment if it is there, else PYTHON or python3 as it is. WHEELS=DIR holds what that lacks
# (`python -m benchmarks.gpu.wheels DIR` fetches them); DEVICE=cpu TINY=1 shows that it runs; ARGS: further options.
bench-gpu:
	@python=$(BIN)/python; [ -x $$python ] || python=$(if $(filter file,$(origin PYTHON)),python3,$(PYTHON)); \
	exec $$python -m benchmarks.gpu $(if $(DEVICE),--device $(DEVICE)) $(if $(TINY),--tiny) $(if $(WHEELS),--wheels $(WHEELS)) \
	  $(ARGS)

bench-overlap: install
	@$(BIN)/python -m benchmarks.overlap --page docs/benchmarks/overlap.md

gpu-static: install
	@$(BIN)/python -m lab.gpu_static
	@$(BIN)/python -m lab.queues

.releases/.prepared: $(VENV)/.installed tests/harness/checkouts.py
	@$(BIN)/python -m tests.harness.checkouts
	@touch $@

lint: .releases/.prepared
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m tools.fingerprints --check

# Includes test-npu where its environment can be made; elsewhere the summary says why its tests were skipped.
# No registry has Megatron's main branch: test-whole trains it, with Transformer Engine, where MAIN=DIR names a checkout.
test: PART = -m "not whole"
test-whole: export MEGATRON_MAIN = $(abspath $(MAIN))
test: export PYTHONHASHSEED = 0
test test-whole: install lint .releases/.prepared
	NPU_CONTRACT=auto $(BIN)/python -m pytest -rs --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(PART)

# torch_npu and stubs for CANN live in .npu, apart from the environment; made once.
test-npu: install
	@$(BIN)/python -m tests.npu_contract.environment
	NPU_CONTRACT=1 $(BIN)/python -m pytest tests/npu_contract

# Each environment in processes of its own: instruction sets, no oneDNN, no compiler, no cache.
fuzz: SECONDS = 60
fuzz: install
	$(BIN)/python -m tools.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# Rows that have not been trained come first; two processes at a time.
pairs: SECONDS = 3600
pairs: install
	$(BIN)/python -W ignore -m tools.pairs --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

fingerprints: .releases/.prepared
	$(BIN)/python -m tools.fingerprints

matrix: .releases/.prepared
	$(BIN)/python -m tools.matrix
	$(BIN)/python docs/generate.py

# An environment of its own, deleted afterwards. Python 3.12 is the least that releases from 0.17 take.
matrix-python: TORCH = 2.11.0
matrix-python: ON = 0.16.1
matrix-python: .releases/.prepared
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv $$folder && \
	  $$folder/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) numpy wrapt packaging einops && \
	  $$folder/bin/python -m tools.matrix --environment $(ON)
	$(BIN)/python docs/generate.py

docs: install
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/picture.py

$(VENV)/.docs-installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

docs-site: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .demo .bench .npu .releases build dist *.egg-info
