"""How much of what prompts share with earlier ones they find, by where point state is kept.

    python benchmarks/point_policy.py [--traces ../shared/traces] [--fit]

A hybrid model goes on where its window or recurrent state is kept, and nowhere else. The script
walks recorded prompts by block ids, nothing evicted: each goes on at the deepest kept boundary that
it shares, and leaves what the policy names, by the code that decides in production
(plan.swa.branches). Deterministic, no clock, no model.

    short    turns with something in common that go on before its end
    lost     tokens between both, a turn with something in common

Constants were chosen on the Claude-Code sessions of even number (`--fit` shows others there); the
odd ones and the other traces were looked at afterwards.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ownerserve.kv.geometry import Geometry
from ownerserve.kv.registry import build_spec
from ownerserve.kv.specs import Coverage, Recurrent, Role
from ownerserve.plan.swa import branches
from ownerserve.plan.swa.branches import Branches, PointCost
from ownerserve.plan.swa.checkpoints import CheckpointPolicy, TurnEnd, TurnSpan
from ownerserve.trace.model import Runs, Trace, TraceRequest
from ownerserve.trace.read import read_trace
from ownerserve.trace.reuse import by_arrival
from ownerserve.trace.runs import IntervalSet
from ownerserve.trace.runs import blocks as blocks_of
from result import Row, report, smaller_is_better

ROOT = Path(__file__).resolve().parent.parent
STEP_TOKENS = 8192
"""Tokens of one prefill step."""
TRACES = {
    "claude-code": "claude-code-weka",
    "mini-swe": "lmcache-agent/miniswe.jsonl.zst",
    "tau-bench": "lmcache-agent/taubench.jsonl.zst",
    "conversation": "mooncake-fast25/conversation_trace.jsonl.zst",
}
MODELS = {
    "gpt-oss-120b": 64,
    "gemma-3-27b": 64,
    "deepseek-v4-pro": 256,
    "qwen3-next-80b": 512,
}
"""With the tokens between their boundaries in vLLM, or between a trace's, if those are more."""


class StateCost(NamedTuple):
    """What a model keeps, in bytes: a point, its window rows a token, range state a token; and
    tokens between its boundaries.

    `row` is 0 where a point is more than rows of windows: a turn end has no lead then. Recurrent
    state stands where a step ends, and nowhere inside it.
    """

    point: int
    row: int
    range: float
    block: int
    is_recurrent: bool


def state_cost(name: str) -> StateCost:
    """What the model of `examples/configs/NAME.json` keeps."""
    config = msgspec.json.decode((ROOT / "examples" / "configs" / f"{name}.json").read_bytes())
    spec = build_spec(config)
    geometry = Geometry.of(spec)
    points = [s for s in spec.states if s.coverage is Coverage.POINT and s.boundary_bytes]
    is_plain = all(state.role is Role.SWA for state in points)
    row = sum(state.entry.payload_bytes for state in points) if is_plain else 0
    is_recurrent = any(isinstance(state.kind, Recurrent) for state in points)
    return StateCost(
        geometry.point_bytes, row, geometry.bytes_per_token, MODELS[name], is_recurrent
    )


class Totals(msgspec.Struct):
    """What became of a trace's turns. Written bytes are of point state, `range_bytes` beside
    them."""

    turns: int = 0
    short: int = 0
    lost_tokens: int = 0
    new_tokens: int = 0
    points: int = 0
    lead_rows: int = 0

    @property
    def short_share(self) -> float:
        return self.short / max(1, self.turns)

    @property
    def lost_a_turn(self) -> float:
        return self.lost_tokens / max(1, self.turns)

    def written(self, cost: StateCost) -> float:
        """Bytes of point state written for each byte of range state."""
        point = self.points * cost.point + self.lead_rows * cost.row
        return point / max(1.0, self.new_tokens * cost.range)


class Walk:
    """A walk goes through one trace under one policy."""

    def __init__(self, trace: Trace, policy: CheckpointPolicy, cost: StateCost) -> None:
        self.totals = Totals()
        self._unit = trace.block_tokens
        self._block = -(-cost.block // self._unit) * self._unit
        self._policy = policy
        self._cost = cost
        self._scope = trace.ids
        self._seen: dict[int, IntervalSet] = {}
        self._kept: dict[int, list[int]] = {}

    def turn(self, session: int, request: TraceRequest) -> None:
        """Take the session's next turn."""
        scope = session if self._scope == "session" else 0
        seen = self._seen.setdefault(scope, IntervalSet())
        kept = self._kept.setdefault(scope, [])
        runs, unit, block, totals = request.runs, self._unit, self._block, self.totals
        prompt = min(request.input_tokens, blocks_of(runs) * unit)
        known = min(seen.prefix(runs) * unit, max(0, request.input_tokens - 1))
        common = known // block * block
        found = deepest(runs, common // unit, kept) * unit
        if common:
            totals.turns += 1
            totals.short += found < common
            totals.lost_tokens += common - found
        totals.new_tokens += max(0, prompt - known)
        seen.add(runs)
        junctions = (common,) if found < common else ()
        span = TurnSpan(found, request.input_tokens, request.input_tokens, block, junctions)
        for at in self._left(span):
            if at <= prompt:
                add(kept, id_at(runs, at // unit))

    def _left(self, span: TurnSpan) -> Iterator[int]:
        """The boundaries that the turn leaves state at."""
        block, totals, cost = span.block_tokens, self.totals, self._cost
        chunks, points = self._policy.chunk_ends(span), set(self._policy.checkpoints(span))
        points.update(self._step_ends(chunks, span) if cost.is_recurrent else chunks)
        totals.points += len(points)
        yield from points
        end = span.prompt_end // block * block
        if cost.row and self._policy.lead_tokens and end > span.start:
            last = (span.prompt_end - span.start - 1) // STEP_TOKENS * STEP_TOKENS + span.start
            first = max(end - self._policy.lead_tokens, last)
            totals.lead_rows += end - first
            yield from range(first // block * block + block, end, block)

    def _step_ends(self, chunks: Iterable[int], span: TurnSpan) -> set[int]:
        """For each chunk end the first step's end that is not before it; at turn ends and junctions
        vLLM ends a step by itself."""
        ends = range(span.start + STEP_TOKENS, span.prompt_end, STEP_TOKENS)
        return {next((end for end in ends if end >= at), 0) for at in chunks} - {0}


def deepest(runs: Runs, count: int, kept: list[int]) -> int:
    """How many of the first `count` blocks lie before the deepest id of `kept` among them."""
    base = best = 0
    for first, length in runs:
        take = min(length, count - base)
        if take <= 0:
            break
        index = bisect_left(kept, first + take)
        if index and kept[index - 1] >= first:
            best = base + kept[index - 1] - first + 1
        base += take
    return best


def id_at(runs: Runs, count: int) -> int:
    """The id of the block that ends the first `count`."""
    for first, length in runs:
        if count <= length:
            return first + count - 1
        count -= length
    raise AssertionError("fewer blocks than asked for")


def add(kept: list[int], block_id: int) -> None:
    """Put an id into a sorted list, once."""
    index = bisect_left(kept, block_id)
    if index == len(kept) or kept[index] != block_id:
        insort(kept, block_id)


def walk(
    trace: Trace,
    policy: CheckpointPolicy,
    cost: StateCost,
    *,
    takes: Callable[[int], bool] = lambda session: True,
) -> Totals:
    """Walk the sessions whose number `takes`."""
    one = Walk(trace, policy, cost)
    for session, request in by_arrival(trace):
        if takes(session) and request.runs:
            one.turn(session, request)
    return one.totals


def policy_for(cost: StateCost) -> Branches:
    """The policy as production makes it for the model."""
    return Branches(point_cost(cost))


def point_cost(cost: StateCost) -> PointCost:
    """What a point weighs, as the policy is told of it."""
    return PointCost(cost.point, cost.range, has_lead=bool(cost.row))


def rows_of(trace: Trace, name: str, **options: Callable[[int], bool]) -> Iterator[Row]:
    """The table of one trace: both numbers and what is written, by model."""
    for model in MODELS:
        cost = state_cost(model)
        old = walk(trace, TurnEnd(), cost, **options)
        new = walk(trace, policy_for(cost), cost, **options)
        label = f"{name}, {model}"
        pairs = (
            ("short", "%", 100 * new.short_share, 100 * old.short_share, "<= 2"),
            ("lost", "tokens/turn", new.lost_a_turn, old.lost_a_turn, "<= 100"),
            ("points/range", "byte/byte", new.written(cost), old.written(cost), ""),
        )
        for metric, unit, ours, other, goal in pairs:
            yield smaller_is_better(
                f"{label}: {metric}", unit, ours, other=other, other_name="turn-end", goal=goal
            )


def fit(trace: Trace) -> None:
    """Show what other constants give, on the sessions that they were chosen on."""

    def is_even(session: int) -> bool:
        return session % 2 == 0

    print(
        "even sessions: share, close share, nearest, lead, growth |"
        " short %, lost tokens, points/range"
    )
    for model in MODELS:
        cost = state_cost(model)
        for share, close, nearest, lead, growth in variants():
            branches.SHARE, branches.CLOSE_SHARE = share, close
            branches.NEAREST_TOKENS, branches.LEAD_TOKENS = nearest, lead
            branches.GROWTH = growth
            policy = policy_for(cost)
            policy.lead_tokens = lead  # type: ignore[misc]
            got = walk(trace, policy, cost, takes=is_even)
            first = point_cost(cost).first_chunk_end(cost.block)
            print(
                f"{model:16} {share:5} {close:6} {nearest:5} {lead:5} {growth:5} |"
                f" {100 * got.short_share:5.2f} {got.lost_a_turn:7.1f} {got.written(cost):6.3f}"
                f"  first {first}"
            )


def variants() -> Iterable[tuple[float, float, int, int, float]]:
    """The constants that `fit` looks at."""
    for share in (0.0, 0.25, 0.5, 1.0):
        yield share, 0.125, 2048, 256, 1.5
    for close in (0.0, 0.25, 0.5):
        yield 0.5, close, 2048, 256, 1.5
    for nearest in (1024, 4096):
        yield 0.5, 0.125, nearest, 256, 1.5
    for lead in (0, 128, 512, 1024):
        yield 0.5, 0.125, 2048, lead, 1.5
    for growth in (1.25, 2.0, 1000.0):
        yield 0.5, 0.125, 2048, 256, growth


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces")
    parser.add_argument("--fit", action="store_true", help="what other constants give")
    options = parser.parse_args()
    traces = {name: read_trace(options.traces / path) for name, path in TRACES.items()}
    if options.fit:
        fit(traces["claude-code"])
        return
    rows = list(rows_of(traces["claude-code"], "claude-code"))
    rows += rows_of(traces["claude-code"], "held out", takes=lambda session: session % 2 == 1)
    for name in list(TRACES)[1:]:
        rows += rows_of(traces[name], name)
    report("point_policy", rows)


if __name__ == "__main__":
    main()
