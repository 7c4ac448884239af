"""Whatever is held where: the chosen way is the cheapest one open, and only open ways are taken.

The oracle below enumerates and prices on its own, straight from the definitions in the docs: token
by token sums, no ledger, no pruning.
"""

from __future__ import annotations

import os
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.cost.prices import Coefficients, Medium, Prices, TierLoad
from ownerserve.plan.inputs import (
    Abilities,
    Backlog,
    Exactness,
    ModelState,
    Overlap,
    Piece,
    Point,
    RangeSpan,
    RestoreQuery,
)
from ownerserve.plan.restore import Planner
from tests.support.examples import examples

T = TypeVar("T")
BLOCK = 64
EXAMPLES = int(os.environ.get("OWNERSERVE_EXAMPLES", examples(100)))
LOADABLE = (Tier.HOST, Tier.DISK, Tier.REMOTE)


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(1.0, abs(a), abs(b))


class Case(NamedTuple):
    """One engine, one moment, one turn."""

    model: ModelState
    engine: Abilities
    query: RestoreQuery
    at: Prices


class Draw:
    """Cases in which loading and computing are of one size, so that every term can decide.

    A token weighs about 1 kB and takes 0.005 to 0.1 ms to compute; media load it in 0.5 to 50 times
    less or more. Drawn from a seed: hypothesis searches seeds, numpy draws worlds.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def log_uniform(self, low: float, high: float) -> float:
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def yes(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def one_of(self, *choices: T) -> T:
        return choices[int(self.rng.integers(len(choices)))]

    def pieces(self, size: float) -> tuple[Piece, ...]:
        count = self.one_of(0, 1, 1, 1, 2)
        tiers = self.rng.permutation(np.array([*LOADABLE, Tier.DEVICE], dtype=object))[:count]
        found = []
        for tier in tiers:
            late = tier is Tier.DEVICE or self.yes(0.1)
            ready_ms = self.log_uniform(0.5, 500.0) if late else 0.0
            found.append(Piece(tier, int(size * self.log_uniform(0.3, 3.0)) + 1, ready_ms))
        return tuple(found)

    def case(self) -> Case:
        replay, bounded = int(self.rng.integers(64, 6_000)), 64
        window = self.yes(0.7)
        model = ModelState(
            layers=self.one_of(1, 4, 60),
            block_tokens=BLOCK,
            range_bytes_per_token=1000.0,
            point_bytes=0 if self.yes(0.1) else 300_000,
            exact_replay_tokens=replay if window else None,
            bounded_replay_tokens=bounded if window and self.yes(0.7) else None,
        )
        engine = Abilities(
            can_replay=self.yes(0.8),
            can_reserve=self.yes(0.5),
            per_group_hit=self.yes(0.8),
            can_insert=True,
            landing_tier=self.one_of(Tier.DEVICE, Tier.DEVICE, Tier.HOST),
            overlap=self.one_of(Overlap.NONE, Overlap.LAYERWISE),
        )
        prefill = Coefficients(
            self.one_of(0.0, 5.0), self.log_uniform(0.005, 0.1), self.one_of(0.0, 1e-6, 1e-5)
        )
        again = self.one_of(0.5, 1.0, 1.0, 1.0, 2.0)
        media = {t: Medium(self.one_of(0.0, 1.0), self.log_uniform(2e3, 1e6)) for t in LOADABLE}
        tables = {t: TierLoad(medium).table() for t, medium in media.items()}
        prices = Prices(tables, prefill, prefill.scaled(again), self.one_of(0.5, 1.0), {})
        return Case(model, engine, self.query(), prices)

    def query(self) -> RestoreQuery:
        spans, edge = [], 0
        for _ in range(int(self.rng.integers(0, 6))):
            end = edge + int(self.rng.integers(1, 40)) * BLOCK
            spans.append(RangeSpan(edge, end, self.pieces(1000.0 * (end - edge))))
            edge = end
        places = max(edge // BLOCK, 1) + self.one_of(0, 3)
        chosen = self.rng.choice(places, size=min(places, self.one_of(1, 4, 12)), replace=False)
        points = tuple(
            Point(at * BLOCK, self.pieces(300_000.0), self.one_of((), (), ("swa",)))
            for at in sorted((int(i) + 1 for i in chosen), reverse=True)
        )
        tokens = max(1, edge + int(self.rng.integers(-500, 2_000)))
        backlog = Backlog(
            self.one_of(0, 0, 1_000, 10_000),
            self.one_of(0, 2),
            self.one_of(0, 5_000),
            {tier: self.one_of(0, 1_000_000) for tier in LOADABLE if self.yes(0.3)},
        )
        return RestoreQuery(
            tokens=tokens,
            spans=tuple(spans),
            points=points,
            known_tokens=int(self.rng.integers(0, tokens + 1)),
            backlog=backlog,
            hbm_ms_per_gib=self.one_of(0.0, 0.0, 300.0, 30_000.0),
            allowed=self.one_of(*Exactness),
        )


cases = st.integers(0, 2**32 - 1).map(lambda seed: Draw(seed).case())


class Oracle:
    """All open ways of one query with their prices, from the definitions alone."""

    def __init__(
        self, model: ModelState, engine: Abilities, *, query: RestoreQuery, at: Prices
    ) -> None:
        self.model, self.engine, self.query, self.at = model, engine, query, at

    def book(self, chunks: list[Piece]) -> float:
        late = [p for p in chunks if p.ready_ms > 0]
        now_ms = self.sum_ms([p for p in chunks if p.ready_ms <= 0])
        if not late:
            return now_ms
        return max(now_ms, max(p.ready_ms for p in late)) + self.sum_ms(late)

    def sum_ms(self, chunks: list[Piece]) -> float:
        total: dict[Tier, int] = {}
        for piece in chunks:
            if piece.tier is not Tier.DEVICE:
                total[piece.tier] = total.get(piece.tier, 0) + piece.bytes
        if self.engine.landing_tier is Tier.HOST and total:
            total[Tier.HOST] = sum(total.values())
        ahead = self.query.backlog.tier_bytes
        return sum(
            self.at.tiers[t].ms(n) + self.at.tiers[t].ms(ahead.get(t, 0)) for t, n in total.items()
        )

    def chunks(self, position: int) -> list[Piece]:
        found = []
        for span in self.query.spans:
            used = min(span.end, position) - span.start
            if used > 0:
                length = span.end - span.start
                found += [
                    Piece(p.tier, -(-p.bytes * used // length), p.ready_ms) for p in span.pieces
                ]
        return found

    def total(self, position: int, start: int, point: Point | None) -> float:
        n, q, p, r = self.query.tokens, self.query, self.at.prefill, self.at.replay
        queue = p.a_ms * q.backlog.requests + q.backlog.prefill_tokens * (
            p.b_ms + p.c_ms * q.backlog.context_tokens
        )
        load = self.book(self.chunks(position)) + (self.book(list(point.pieces)) if point else 0.0)
        queue *= self.at.queue_ratio
        # Sum over tokens of b + c * (tokens before it + 1/2).
        new, again = n - position, position - start
        compute = p.b_ms * new + p.c_ms * (n * n - position * position) / 2
        compute += r.b_ms * again + r.c_ms * (position * position - start * start) / 2
        compute += max(p.a_ms, r.a_ms) if again else p.a_ms
        stages = self.model.layers if self.engine.overlap is Overlap.LAYERWISE else 1
        loading_from = 0.0 if self.engine.can_reserve else queue
        # Stage by stage: compute i waits for compute i-1 and for load i.
        done = queue
        for i in range(1, stages + 1):
            done = max(done, loading_from + load * i / stages) + compute / stages
        moved = sum(c.bytes for c in self.chunks(position) if c.tier is not Tier.DEVICE)
        taken = self.model.range_bytes_per_token * new + self.model.point_bytes + moved
        return done + q.hbm_ms_per_gib * taken / 2**30

    def options(self) -> dict[tuple[int, int, int | None], float]:
        q, m, e = self.query, self.model, self.engine
        found: dict[tuple[int, int, int | None], float] = {(0, 0, None): self.total(0, 0, None)}
        covered = q.spans[-1].end if q.spans else 0
        reach = [p for p in q.points if p.position < q.tokens and p.position <= covered]
        for point in reach:
            at = point.position
            if not point.lacks and (e.per_group_hit or self.one_length(point)):
                found[at, at, at] = self.total(at, at, point)
            window = m.exact_replay_tokens
            if m.point_bytes == 0 or window is None or not e.can_replay or not e.per_group_hit:
                continue
            start = max(0, at - window)
            found[at, start, None] = self.total(at, start, None)
            for earlier in q.points:
                if start < earlier.position < at and not earlier.lacks:
                    key = (at, earlier.position, earlier.position)
                    found[key] = self.total(at, earlier.position, earlier)
            bounded = m.bounded_replay_tokens
            if bounded and q.allowed is Exactness.BOUNDED_REPLAY and at > bounded:
                found.setdefault((at, at - bounded, None), self.total(at, at - bounded, None))
        return found

    def one_length(self, point: Point) -> bool:
        q = self.query
        resident = 0
        for span in q.spans:
            if span.pieces:
                break
            resident = span.end
        own = [
            p.position
            for p in q.points
            if p.position <= resident and p.position < q.tokens and not p.pieces and not p.lacks
        ]
        hit = max(own, default=0)
        if point.position <= hit:
            return point.position == hit
        if sum(p.bytes for p in point.pieces) < self.model.point_bytes:
            return False
        for span in q.spans:
            if span.end > hit and span.start < point.position:
                named = sum(p.bytes for p in span.pieces if p.tier is not Tier.DEVICE)
                if named < self.model.range_bytes_per_token * (span.end - span.start - 0.5):
                    return False
        return True


@settings(max_examples=EXAMPLES, deadline=None)
@given(case=cases)
def test_the_chosen_way_is_the_cheapest_that_an_independent_search_finds(case: Case) -> None:
    model, engine, query, at = case
    planner = Planner(model, engine)
    plan = planner.plan(query, at)
    options = Oracle(model, engine, query=query, at=at).options()
    chosen = plan.chosen
    key = (chosen.position, chosen.computed_from, chosen.checkpoint)
    assert key in options, "only open ways are taken"
    assert close(chosen.terms.total_ms, options[key])
    cheapest = min(options.values())
    assert close(chosen.terms.total_ms, cheapest)
    # The explanation lists the same ways at the same prices, and its first is what was chosen.
    explained = planner.explain(query, at)
    listed = {(w.position, w.computed_from, w.checkpoint): w for w in explained.alternatives}
    assert listed.keys() == options.keys()
    assert all(close(option.terms.total_ms, options[k]) for k, option in listed.items())
    assert close(explained.alternatives[0].terms.total_ms, chosen.terms.total_ms)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(case=cases)
def test_terms_are_never_negative_and_steps_cover_the_prompt_once(case: Case) -> None:
    model, engine, query, at = case
    for option in Planner(model, engine).explain(query, at).alternatives:
        assert min(msgspec.structs.astuple(option.terms)) >= -1e-9
        computed = [s for s in option.steps if s.tier is None]
        assert computed[0].start == option.computed_from
        assert computed[-1].end == query.tokens
        assert all(a.end == b.start for a, b in pairwise(computed))
        replayed = sum(s.end - s.start for s in computed if s.action == "replay")
        assert replayed == option.position - option.computed_from
        if replayed:
            assert engine.can_replay
            assert model.exact_replay_tokens is not None


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(case=cases, factor=st.floats(1.0, 20.0))
def test_slower_media_never_make_a_plan_cheaper(case: Case, factor: float) -> None:
    model, engine, query, at = case
    planner = Planner(model, engine)
    slower = at.scaled(Tier.DISK, factor)
    now, then = planner.plan(query, at), planner.plan(query, slower)
    assert then.chosen.terms.total_ms >= now.chosen.terms.total_ms * (1 - 1e-9) - 1e-9


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(case=cases)
def test_one_more_point_never_makes_a_plan_dearer(case: Case) -> None:
    model, engine, query, at = case
    if not engine.per_group_hit:
        return  # there the device's own hit moves with its points
    planner = Planner(model, engine)
    fewer = msgspec.structs.replace(query, points=query.points[1:])
    with_it = planner.plan(query, at).chosen.terms.total_ms
    assert with_it <= planner.plan(fewer, at).chosen.terms.total_ms * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("points", [1, 64])
def test_explaining_and_planning_agree(
    world: SimpleNamespace, costs: CostModel, points: int
) -> None:
    at = tuple(Point(i * 1024, (Piece(Tier.DISK, 5_140_000),)) for i in range(points, 0, -1))
    spans = (
        RangeSpan(0, 512 * points),
        RangeSpan(512 * points, 1024 * points, (Piece(Tier.HOST, 512 * points * 5511),)),
    )
    query = RestoreQuery(tokens=1024 * points + 758, spans=spans, points=at)
    explained = Planner(world.v4_pro, world.full).explain(query, costs.prices())
    assert explained.alternatives[0] == explained.plan.chosen
