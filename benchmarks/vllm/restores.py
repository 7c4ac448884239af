"""Resume TTFT, and bytes a second into the store and out of it, end to end.

The same prompts go through each contender. Measured at the engine:

    cold       TTFT with nothing cached
    resident   TTFT when the KV stands in the engine's own pool: the floor of every restore
    evicted    TTFT after the engine's pool was emptied; the contender's host memory is warm
    restart    TTFT in a fresh engine process; disk (lmcache: its server's DRAM)

A rate is bytes over the time a restore adds to the floor: what a user gets, lookup included. Beside
it stands what the store alone gives: the same records read and verified, by as many threads in
bites of the same size, with no engine in the process.
Storing: what it adds to a cold prefill of vLLM alone, and the time from the answer until all is
stored (the engine idle, nothing more on its way to disk).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import msgspec
from contenders import Contender

from ownerserve.node.storage.backing import open_backing
from ownerserve.store.disk.snapshot import StoreSnapshot
from ownerserve.store.format.model import ReadHit, Want
from tests.support.vllm import tiny
from tests.support.vllm.fleet import VllmWorker

SETTLE_S = 60.0
BITE_BYTES, READERS = 16 << 20, 2
"""As the worker reads: engines.vllm.worker.BATCH_BYTES, settings.readers."""


class Case(msgspec.Struct, frozen=True):
    """A size of restore: a model, a prompt length and a pool that holds one prompt."""

    name: str
    family: str
    tokens: int
    repeats: int = 3


CASES = (
    Case("small", "qwen3", 1_025, repeats=9),
    Case("medium", "qwen3-wide", 1_025, repeats=5),
    Case("large", "qwen3-wide", 4_097),
)


class Measured(msgspec.Struct):
    """Medians over a case's prompts."""

    cold_ms: float
    resident_ms: float
    evicted_ms: float
    restart_ms: float
    evicted_cached: float
    restart_cached: float
    bytes: float
    store_s: float
    store_cpu_s: float
    retrieve_cpu_s: float
    store_alone_mb_s: float = 0.0

    def retrieve_mb_s(self, ttft_ms: float, floor_ms: float) -> float:
        """Restored bytes over what the restore added to the floor."""
        return _rate(self.bytes, (ttft_ms - floor_ms) / 1e3)

    def store_mb_s(self, cold_ms: float) -> float:
        """Stored bytes over what storing added: to a cold prefill of `cold_ms`, and after it."""
        return _rate(self.bytes, self.store_s + max(0.0, self.cold_ms - cold_ms) / 1e3)


def measure(contender: Contender, case: Case, model: Path) -> Measured:
    """Run a case through a contender."""
    log = contender.data / "worker.log"
    blocks = 2 * (case.tokens // 32) + 40
    arguments = {
        "max_model_len": case.tokens + 255,
        "num_gpu_blocks_override": blocks,
        "max_num_batched_tokens": 2048,
        **tiny.ENGINE_ARGS.get(case.family, {}),
    }
    prompts = [tiny.prompt(case.tokens, seed=7000 + n) for n in range(case.repeats)]
    worker = contender.worker(model, log, **arguments)
    worker.generate(tiny.prompt(64, seed=1), max_tokens=2)  # the first request warms kernels
    token_bytes = worker.hook("fill_kv_bytes")
    cold, resident, evicted, store_s, store_cpu_s = [], [], [], [], []
    for prompt in prompts:
        cold.append(worker.generate(prompt, max_tokens=1, top=0))
        took_s, cpu_s = _stored(worker, contender)
        store_s.append(took_s)
        store_cpu_s.append(cpu_s)
        resident.append(worker.generate(prompt, max_tokens=1, top=0))
        _settle(worker)
        worker.ask("reset")
        evicted.append(worker.generate(prompt, max_tokens=1, top=0))
        _settle(worker)
        worker.ask("reset")
    worker.shutdown()
    worker = contender.worker(model, log, **arguments)
    worker.generate(tiny.prompt(64, seed=1), max_tokens=2)
    restarted, cpu_s = [], []
    for prompt in prompts:
        before = worker.ask("usage")["cpu_s"]
        restarted.append(worker.generate(prompt, max_tokens=1, top=0))
        cpu_s.append(worker.ask("usage")["cpu_s"] - before)
        _settle(worker)
    worker.kill()
    store = contender.data / "store"
    return Measured(
        store_alone_mb_s=store_alone_mb_s(store) if store.exists() else 0.0,
        cold_ms=median(a.ttft_s for a in cold) * 1e3,
        resident_ms=median(a.ttft_s for a in resident) * 1e3,
        evicted_ms=median(a.ttft_s for a in evicted) * 1e3,
        restart_ms=median(a.ttft_s for a in restarted) * 1e3,
        evicted_cached=median(a.cached for a in evicted),
        restart_cached=median(a.cached for a in restarted),
        bytes=token_bytes * median(a.cached for a in restarted),
        store_s=median(store_s),
        store_cpu_s=median(store_cpu_s),
        retrieve_cpu_s=median(cpu_s),
    )


def store_alone_mb_s(store: Path, *, repeats: int = 3) -> float:
    """What our store gives of all it holds, read and verified: 10^6 bytes a second."""
    backing = open_backing(store, 0)
    assert backing is not None
    bites = list(_bites(store))
    total = sum(size for _, size in bites)

    def read(bite: tuple[list[Want], int]) -> None:
        outcome = backing.tiers.read(bite[0])
        assert isinstance(outcome, ReadHit), outcome

    rates = []
    with ThreadPoolExecutor(READERS) as readers:
        for _ in range(repeats):
            start = time.monotonic()
            for _ in readers.map(read, bites):
                pass
            rates.append(total / 1e6 / (time.monotonic() - start))
    backing.close()
    return median(rates)


def _bites(store: Path) -> Iterator[tuple[list[Want], int]]:
    """All records in the order they were written, in bites, with the bytes of each."""
    snapshot = StoreSnapshot(store)
    wants: list[Want] = []
    held = 0
    for entry in snapshot.entries():
        if held and held + entry.payload_bytes > BITE_BYTES:
            yield wants, held
            wants, held = [], 0
        wants.append(Want(entry.meta.id))
        held += entry.payload_bytes
    if held:
        yield wants, held
    snapshot.close()


def _stored(worker: VllmWorker, contender: Contender) -> tuple[float, float]:
    """Wall and CPU seconds from now until nothing more reaches the disk and the engine is idle."""
    start, usage = time.monotonic(), worker.ask("usage")["cpu_s"]
    last_change, size = start, -1
    _settle(worker)
    while time.monotonic() - last_change < 0.3:
        now = contender.stored_bytes()
        if now != size:
            size, last_change = now, time.monotonic()
        time.sleep(0.005)
        worker.ask("drain", SETTLE_S)
    return last_change - start, worker.ask("usage")["cpu_s"] - usage


def _settle(worker: VllmWorker) -> None:
    """Step until the engine is idle and no block is held."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        worker.ask("drain", SETTLE_S)
        if not worker.ask("pool")["referenced"]:
            return
        time.sleep(0.002)
    raise RuntimeError(f"still busy after {SETTLE_S} s: {worker.ask('pool')}")


def _rate(count: float, seconds: float) -> float:
    """MB/s (10^6); 0 when nothing was moved."""
    return count / 1e6 / max(seconds, 1e-4) if count else 0.0
