# Each target sets up what it needs in .venv; nothing outside the checkout is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help setup core demo test test-core check bench clean

help:            ## this list
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/' | expand -t 14

# pip comes first and new: older ones do not see a CPU build of torch that is already at hand.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/.setup: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --group dev --editable '.[engine]'
	@touch $@

setup: $(VENV)/.setup   ## everything: core, reference engine, test tools

demo: setup      ## gateway + two workers + an agent workload, end to end
	$(BIN)/ownerserve demo

test: setup      ## all tests that need no GPU
	$(BIN)/python -m pytest

test-core: setup ## the part that needs no engine, in about 10 s
	$(BIN)/python -m pytest -m "not engine and not slow and not crash"

check: setup     ## lint, types, layers, size ratchet
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/ratchet.py

bench: setup     ## every benchmark; results in benchmarks/results/
	$(BIN)/python benchmarks/run.py

clean:           ## forget the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
