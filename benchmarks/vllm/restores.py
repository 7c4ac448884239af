"""Resume TTFT, and bytes a second into the store and out of it, end to end.

The same prompts go through each contender. Engines of all contenders stand side by side, and take
turns prompt by prompt, each time in another order: what else the machine does falls on all of them.
Measured at the engine:

    cold       TTFT with nothing cached
    resident   TTFT when the KV stands in the engine's own pool: the floor of every restore
    evicted    TTFT after the engine's pool was emptied; the contender's host memory is warm
    restart    TTFT in a fresh engine process; disk, and not the kernel's page cache, which a host
               that starts again does not have (lmcache: its server's DRAM)

A number is the median over the prompts, beside its middle half; the engine's CPU stands beside the
wall. A rate is bytes over the time a restore adds to the floor: what a user gets, lookup included.
Beside it stands what the store alone gives: the same records read and verified, by as many threads
in bites of the same size, with no engine in the process.
Storing: what it adds to a cold prefill of vLLM alone, and the time from the answer until all is
stored (the engine idle, nothing more on its way to disk).

Long sessions have 32k tokens, in a pool whose free blocks are in random order.
Attention over so many takes minutes on two cores and is no part of what is compared: it is left out
of every forward, so that their `cold` and vLLM alone are faster than they would be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import msgspec
from contenders import Contender

from ownerserve.node.storage.backing import open_backing
from ownerserve.store.disk.snapshot import StoreSnapshot
from ownerserve.store.format.model import ReadHit, Want
from tests.support.vllm import tiny
from tests.support.vllm.fleet import VllmWorker
from tests.support.vllm.wire import Answer

SETTLE_S = 60.0
BLOCK_TOKENS = 32
"""The least that vLLM's CPU kernels take, and the harness's default."""
BITE_BYTES, READERS = 16 << 20, 2
"""As the worker reads: engines.vllm.worker.BATCH_BYTES, settings.readers."""


class Case(msgspec.Struct, frozen=True):
    """A size of restore: a model, a prompt length, how many prompts, and a pool that holds two."""

    name: str
    family: str
    tokens: int
    repeats: int = 3
    is_long: bool = False


CASES = (
    Case("small", "qwen3", 1_025, repeats=15),
    Case("medium", "qwen3-wide", 1_025, repeats=9),
    Case("large", "qwen3-wide", 4_097, repeats=5),
    Case("32k thin", "qwen3-long-thin", 32_769, repeats=7, is_long=True),
    Case("32k", "qwen3-long", 32_769, repeats=5, is_long=True),
    Case("32k wide", "qwen3-long-wide", 32_769, is_long=True),
)


class Spread(msgspec.Struct, frozen=True):
    """The median of some draws, and where their middle half lies."""

    middle: float
    low: float
    high: float

    @property
    def span(self) -> tuple[float, float]:
        return self.low, self.high


def _spread(draws: Sequence[float]) -> Spread:
    ordered = sorted(draws)
    last = len(ordered) - 1
    return Spread(median(ordered), ordered[round(last * 0.25)], ordered[round(last * 0.75)])


class Draws(msgspec.Struct):
    """What one contender gave, prompt by prompt."""

    cold_ms: list[float] = []
    resident_ms: list[float] = []
    evicted_ms: list[float] = []
    restart_ms: list[float] = []
    evicted_cpu_ms: list[float] = []
    restart_cpu_ms: list[float] = []
    evicted_cached: list[float] = []
    restart_cached: list[float] = []
    store_s: list[float] = []
    store_cpu_s: list[float] = []


class Measured(msgspec.Struct):
    """A contender's numbers over a case's prompts; `bytes` is the KV that a restart brought."""

    cold_ms: float
    resident_ms: float
    evicted_ms: Spread
    restart_ms: Spread
    evicted_cpu_ms: Spread
    restart_cpu_ms: Spread
    evicted_cached: float
    restart_cached: float
    bytes: float
    store_s: float
    store_cpu_s: float
    store_alone_mb_s: float = 0.0

    def retrieve_mb_s(self, ttft_ms: float, floor_ms: float) -> float:
        """Restored bytes over what the restore added to the floor."""
        return _rate(self.bytes, (ttft_ms - floor_ms) / 1e3)

    def store_mb_s(self, cold_ms: float) -> float:
        """Stored bytes over what storing added: to a cold prefill of `cold_ms`, and after it."""
        return _rate(self.bytes, self.store_s + max(0.0, self.cold_ms - cold_ms) / 1e3)


def measure(contenders: Sequence[Contender], case: Case, model: Path) -> dict[str, Measured]:
    """Run a case through all contenders, side by side."""
    prompts = [tiny.prompt(case.tokens, seed=7000 + n) for n in range(case.repeats)]
    draws = {contender.name: Draws() for contender in contenders}
    with running(contenders, case, model) as workers:
        token_bytes = next(iter(workers.values())).hook("fill_kv_bytes")
        for number, prompt in enumerate(prompts):
            for contender in in_turn(contenders, number):
                worker = workers[contender.name]
                _come_and_go(worker, contender, prompt, draws[contender.name])
                _empty(worker, case, seed=number)
        for worker in workers.values():
            worker.shutdown()
    for contender in contenders:
        contender.leave_page_cache()
    with running(contenders, case, model) as workers:
        for number, prompt in enumerate(prompts):
            for contender in in_turn(contenders, number):
                own = draws[contender.name]
                answer, cpu_ms = timed(workers[contender.name], prompt)
                own.restart_ms.append(answer.ttft_s * 1e3)
                own.restart_cpu_ms.append(cpu_ms)
                own.restart_cached.append(answer.cached)
                settle(workers[contender.name])
    return {
        contender.name: _measured(draws[contender.name], contender, token_bytes)
        for contender in contenders
    }


def in_turn(contenders: Sequence[Contender], number: int) -> Sequence[Contender]:
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


@contextmanager
def running(
    contenders: Sequence[Contender], case: Case, model: Path
) -> Iterator[dict[str, VllmWorker]]:
    """A fresh engine of each contender, by name, that has answered once."""
    arguments = {
        "max_model_len": case.tokens + 255,
        "num_gpu_blocks_override": 2 * (case.tokens // BLOCK_TOKENS) + 40,
        "max_num_batched_tokens": 2048,
        **tiny.ENGINE_ARGS.get(case.family, {}),
    }
    with ExitStack() as stack:
        workers = {}
        for contender in contenders:
            worker = contender.worker(model, contender.data / "worker.log", **arguments)
            stack.callback(worker.kill)
            if case.is_long:
                worker.hook("skip_attention")
            worker.generate(tiny.prompt(64, seed=1), max_tokens=2)  # the first one warms kernels
            _empty(worker, case, seed=-1)
            workers[contender.name] = worker
        yield workers


def _come_and_go(worker: VllmWorker, contender: Contender, prompt: list[int], own: Draws) -> None:
    """A prompt's first life: computed, asked again, evicted, brought back."""
    own.cold_ms.append(worker.generate(prompt, max_tokens=1, top=0).ttft_s * 1e3)
    took_s, cpu_s = stored(worker, contender)
    own.store_s.append(took_s)
    own.store_cpu_s.append(cpu_s)
    own.resident_ms.append(worker.generate(prompt, max_tokens=1, top=0).ttft_s * 1e3)
    settle(worker)
    worker.ask("reset")
    answer, cpu_ms = timed(worker, prompt)
    own.evicted_ms.append(answer.ttft_s * 1e3)
    own.evicted_cpu_ms.append(cpu_ms)
    own.evicted_cached.append(answer.cached)


def _empty(worker: VllmWorker, case: Case, *, seed: int) -> None:
    """Forget what the engine's pool holds; of a long case its blocks are scattered then."""
    settle(worker)
    worker.ask("reset")
    if case.is_long:
        worker.hook("scatter_free_blocks", seed=seed)


def timed(worker: VllmWorker, prompt: list[int]) -> tuple[Answer, float]:
    """An answer of one token, and the CPU milliseconds that the engine's process took for it."""
    before = worker.hook("cpu_s")
    answer = worker.generate(prompt, max_tokens=1, top=0)
    return answer, (worker.hook("cpu_s") - before) * 1e3


def _measured(own: Draws, contender: Contender, token_bytes: int) -> Measured:
    store = contender.data / "store"
    return Measured(
        store_alone_mb_s=store_alone_mb_s(store) if store.exists() else 0.0,
        cold_ms=median(own.cold_ms),
        resident_ms=median(own.resident_ms),
        evicted_ms=_spread(own.evicted_ms),
        restart_ms=_spread(own.restart_ms),
        evicted_cpu_ms=_spread(own.evicted_cpu_ms),
        restart_cpu_ms=_spread(own.restart_cpu_ms),
        evicted_cached=median(own.evicted_cached),
        restart_cached=median(own.restart_cached),
        bytes=token_bytes * median(own.restart_cached),
        store_s=median(own.store_s),
        store_cpu_s=median(own.store_cpu_s),
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


def stored(worker: VllmWorker, contender: Contender) -> tuple[float, float]:
    """Wall and CPU seconds from now until nothing more reaches the disk and the engine is idle."""
    start, usage = time.monotonic(), worker.ask("usage")["cpu_s"]
    last_change, size = start, -1
    settle(worker)
    while time.monotonic() - last_change < 0.3:
        now = contender.stored_bytes()
        if now != size:
            size, last_change = now, time.monotonic()
        time.sleep(0.005)
        worker.ask("drain", SETTLE_S)
    return last_change - start, worker.ask("usage")["cpu_s"] - usage


def settle(worker: VllmWorker) -> None:
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
