"""The planner's own cost, and what each checkpoint policy wears and saves on an agent workload.

    python benchmarks/plan_bench.py                    both parts
    python benchmarks/plan_bench.py --sessions 100     a larger workload
    python benchmarks/plan_bench.py --trace FILE       part 2 on a recorded trace

Part 1: microseconds for a plan with 64 restorable points, against pricing every way in full.

Part 2 (the seed's §2.8 metrics): a coding-agent trace on DeepSeek-V4-Pro, 8 x H200 by
roofline. A turn that comes back within IDLE_S finds its state on the device; later ones restore
from disk: global KV is all there, point state where the policy put it. Policies differ in nothing
else. Two simplifications: an agent's checkpoints are looked for in its own chain only, and the
device forgets by the clock, not by pressure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import msgspec

from ownerserve.kv.geometry import Geometry
from ownerserve.kv.messages import Tier
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.kv.specs import Role
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.cost.prices import Prices
from ownerserve.plan.cost.roofline import defaults, find_gpu
from ownerserve.plan.cost.shape import shape_of
from ownerserve.plan.inputs import FULL_ABILITIES, Piece, Point, RangeSpan, RestoreQuery
from ownerserve.plan.question import model_state
from ownerserve.plan.restore import Planner
from ownerserve.plan.swa.accounting import WriteAccount
from ownerserve.plan.swa.adaptive import Adaptive, Economics
from ownerserve.plan.swa.checkpoints import (
    Branched,
    CheckpointPolicy,
    Full,
    Periodic,
    Produced,
    Resumed,
    StateSize,
    TurnEnd,
    TurnSpan,
    Zero,
)
from ownerserve.trace.model import Trace
from ownerserve.trace.read import read_trace
from ownerserve.trace.reuse import by_arrival, ideal_reuse
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options
from result import Row, report, smaller_is_better

MODEL = "deepseek-v4-pro"
IDLE_S = 60.0
POINTS = 64


class Worker(msgspec.Struct):
    """A model on a machine, as the planner knows it."""

    geometry: Geometry
    planner: Planner
    prices: Prices
    size: StateSize


def make_worker() -> Worker:
    config = read_config(find_config(MODEL))
    spec = build_spec(config)
    geometry = Geometry.of(spec)
    costs = CostModel(defaults(shape_of(spec, config), find_gpu("H200"), gpus=8))
    rows = sum(s.entry.payload_bytes for s in spec.states if s.role is Role.SWA)
    window = sum(c.boundary_bytes for c in geometry.components if c.role is Role.SWA)
    size = StateSize(geometry.point_bytes, float(rows), geometry.point_bytes - window)
    planner = Planner(model_state(geometry), FULL_ABILITIES)
    return Worker(geometry, planner, costs.prices(), size)


# ---- part 1 -------------------------------------------------------------------------------------


def best_us(call: Callable[[], object], *, calls: int = 10, repeats: int = 600) -> float:
    """Microseconds a call in the best of `repeats`: the others measure the neighbours."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    return best


def query_of(worker: Worker, *, step: int, slowdown: int, lacks: tuple[str, ...]) -> RestoreQuery:
    """64 points every `step` tokens: half of the range on the device, the rest on host and disk."""
    token_bytes = round(worker.geometry.bytes_per_token) * slowdown
    end = POINTS * step
    half, most = end // 2, end * 3 // 4
    spans = (
        RangeSpan(0, half),
        RangeSpan(half, most, (Piece(Tier.HOST, (most - half) * token_bytes),)),
        RangeSpan(most, end, (Piece(Tier.DISK, (end - most) * token_bytes),)),
    )
    pieces = () if lacks else (Piece(Tier.DISK, worker.size.point_bytes * slowdown),)
    points = tuple(Point(i * step, pieces, lacks) for i in range(POINTS, 0, -1))
    return RestoreQuery(tokens=end + 758, spans=spans, points=points, known_tokens=end)


def planning(worker: Worker) -> Iterator[Row]:
    """A plan's time in easy and in bad cases; the worst is where no load is worth its while."""
    cases = {
        "resume": query_of(worker, step=1792, slowdown=1, lacks=()),
        "no point state": query_of(worker, step=1792, slowdown=1, lacks=("swa",)),
        "slow media": query_of(worker, step=1792, slowdown=30, lacks=()),
        "hopeless media": query_of(worker, step=256, slowdown=2000, lacks=()),
    }
    for name, query in cases.items():
        ours = best_us(lambda q=query: worker.planner.plan(q, worker.prices))  # type: ignore[misc]
        full = best_us(
            lambda q=query: worker.planner.explain(q, worker.prices),  # type: ignore[misc]
            calls=3,
            repeats=5,
        )
        yield smaller_is_better(
            f"plan, 64 points, {name}",
            "us",
            ours,
            other=full,
            other_name="every way priced in full",
            goal="<= 50",
        )


# ---- part 2 -------------------------------------------------------------------------------------


class Tally(msgspec.Struct):
    """What one policy did on the trace."""

    account: WriteAccount
    restores: int = 0
    terms_ms: list[float] = msgspec.field(default_factory=lambda: [0.0] * 6)
    computed: int = 0
    prompt: int = 0
    policy_s: float = 0.0
    plans: int = 0


class Chain(msgspec.Struct):
    """One agent's prefix: where its checkpoints are, how far it is stored, when it last ran."""

    checkpoints: set[int] = msgspec.field(default_factory=set)
    prompt_end: int = 0
    end: int = 0
    last_s: float = float("-inf")


def replay_trace(worker: Worker, trace: Trace, policy: CheckpointPolicy) -> Tally:
    """Run `trace` under `policy`: restore when idle too long, then checkpoint what was computed."""
    tally = Tally(WriteAccount())
    reuse = ideal_reuse(trace)
    assert reuse is not None
    chains: dict[tuple[int, int], Chain] = {}
    for (number, request), shared in zip(
        by_arrival(trace), reuse.intra_tokens.tolist(), strict=True
    ):
        if request.input_tokens < 1:
            continue
        chain = chains.setdefault((number, request.agent), Chain())
        now_s = trace.sessions[number].start_s + request.start_s
        shared = min(shared, chain.end, request.input_tokens - 1)
        tally.prompt += request.input_tokens
        if shared and now_s - chain.last_s > IDLE_S:
            restore(worker, tally, policy, chain=chain, shared=shared, tokens=request.input_tokens)
        else:
            tally.computed += request.input_tokens - shared
        chain.checkpoints = {at for at in chain.checkpoints if at <= shared}
        end = request.input_tokens + request.output_tokens
        compute(worker, tally, policy, chain=chain, span=(shared, request.input_tokens, end))
        chain.last_s = now_s + (request.api_s or 0.0)
    return tally


def restore(
    worker: Worker,
    tally: Tally,
    policy: CheckpointPolicy,
    *,
    chain: Chain,
    shared: int,
    tokens: int,
) -> None:
    """Plan a cold resume of [0, shared) and count what it takes."""
    block, geometry = worker.geometry.block_tokens, worker.geometry
    boundary = shared // block * block
    if not boundary:
        tally.computed += tokens
        return
    piece = (Piece(Tier.DISK, worker.size.point_bytes),)
    held = sorted((at for at in chain.checkpoints if at <= boundary), reverse=True)
    # Few are needed: the deepest, and an even choice of the rest.
    held = held[: POINTS // 2] + held[POINTS // 2 :: max(1, len(held) // (POINTS // 2))]
    points = [Point(at, piece) for at in held]
    if not held or held[0] != boundary:
        points.insert(0, Point(boundary, (), ("point",)))
    spans = (RangeSpan(0, boundary, (Piece(Tier.DISK, geometry.range_bytes(boundary)),)),)
    query = RestoreQuery(tokens=tokens, spans=spans, points=tuple(points), known_tokens=shared)
    started = time.thread_time()
    chosen = worker.planner.plan(query, worker.prices).chosen
    tally.policy_s += time.thread_time() - started
    tally.plans += 1
    tally.restores += 1
    for i, ms in enumerate(msgspec.structs.astuple(chosen.terms)):
        tally.terms_ms[i] += ms
    tally.computed += chosen.computed_tokens
    if chosen.checkpoint is not None:
        tally.account.read_point(worker.size.point_bytes)
    at_end = boundary >= chain.prompt_end // block * block
    policy.observe(Resumed(boundary) if at_end else Branched(boundary))


def compute(
    worker: Worker,
    tally: Tally,
    policy: CheckpointPolicy,
    *,
    chain: Chain,
    span: tuple[int, int, int],
) -> None:
    """A turn computes [start, end): its global KV is stored, its point state as the policy says."""
    start, prompt_end, end = span
    turn = TurnSpan(start, prompt_end, end, worker.geometry.block_tokens)
    started = time.thread_time()
    chosen = policy.checkpoints(turn)
    tally.policy_s += time.thread_time() - started
    written = worker.geometry.range_bytes(end) - worker.geometry.range_bytes(start)
    tally.account.wrote_range(written)
    payload = policy.written_bytes(turn, worker.size)
    tally.account.wrote_points(payload, records=1 if policy.name == "full" else len(chosen))
    chain.checkpoints |= set(chosen)
    chain.prompt_end, chain.end = prompt_end, end
    policy.observe(Produced(turn))


def policies(worker: Worker) -> dict[str, Callable[[], CheckpointPolicy]]:
    prices = worker.prices
    mean_ms = prices.prefill.b_ms + prices.prefill.c_ms * 100_000
    load_ms = prices.tiers[Tier.DISK].ms(worker.size.point_bytes)
    economics = Economics(
        worker.size.point_bytes, mean_ms, load_ms, worker.planner.model.exact_replay_tokens
    )
    return {
        "full": Full,
        "periodic 1,024": lambda: Periodic(1024),
        "periodic 8,192": lambda: Periodic(8192),
        "zero": Zero,
        "turn-end": TurnEnd,
        "adaptive": lambda: Adaptive(economics),
    }


def checkpointing(worker: Worker, trace: Trace) -> Iterator[Row]:
    """Each policy's metrics beside those of full checkpointing."""
    found = {
        name: metrics(replay_trace(worker, trace, make()))
        for name, make in policies(worker).items()
    }
    for name, values in found.items():
        for (metric, unit), value in values.items():
            full = found["full"][metric, unit]
            if metric in COMPARED:
                yield smaller_is_better(
                    f"{name}: {metric}", unit, value, other=full, other_name="full"
                )
            else:
                yield Row(f"{name}: {metric}", unit, value)


COMPARED = ("restore mean", "write amplification")


def metrics(tally: Tally) -> dict[tuple[str, str], float]:
    """The seed's §2.8 metrics by name and unit."""
    n = max(tally.restores, 1)
    queue, load, recompute, stall, _, hidden = (ms / n for ms in tally.terms_ms)
    return {
        ("restore mean", "ms"): queue + load + recompute + stall,
        ("  load before compute", "ms"): load,
        ("  recompute", "ms"): recompute,
        ("  stall", "ms"): stall,
        ("  load hidden", "ms"): hidden,
        ("restores", "count"): float(tally.restores),
        ("write amplification", "ratio"): tally.account.write_amplification,
        ("point bytes written per read", "ratio"): tally.account.point_bytes_written_per_read,
        ("prefill tokens saved", "share"): 1.0 - tally.computed / max(tally.prompt, 1),
        ("policy overhead a restore", "us"): tally.policy_s / max(tally.plans, 1) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=30)
    parser.add_argument("--trace", help="A recorded trace instead of a generated one.")
    parser.add_argument("--only", choices=("planning", "checkpointing"))
    chosen = parser.parse_args()
    worker = make_worker()
    rows: list[Row] = []
    if chosen.only != "checkpointing":
        rows += planning(worker)
    if chosen.only != "planning":
        made = Options(sessions=chosen.sessions, seed=1)
        trace = read_trace(chosen.trace) if chosen.trace else generate("coding-agent", made)
        rows += checkpointing(worker, trace)
    report("plan_trace" if chosen.trace else "plan", rows)


if __name__ == "__main__":
    main()
