"""A benefit is what having an artifact is worth: the price of doing without it, less the price of
using it.

    reuse_benefit(p) = C_prefill(p) - C_load(p) - C_recompute(p) - C_stall(p)      (seed 000 A2)

The store admits and keeps by it (`restore_cost_ms` of a record), the cache's eviction order takes
its slope (`eviction_weights`), and the best benefit per GiB among what would have to go is the
price of memory, lambda (`hbm_price`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ownerserve.kv.messages import Tier
from ownerserve.kv.units import GIB
from ownerserve.plan.cost.prices import Prices
from ownerserve.plan.inputs import Point, RangeSpan, RestoreQuery
from ownerserve.plan.restore import Planner

DROP_BELOW_MS = 1.0
"""A restore that saves less than this is not worth the record that makes it possible."""


class Benefit(msgspec.Struct, frozen=True):
    """A benefit is the `ms` saved by each use of `bytes` bytes. `uses` is how many uses are
    expected.
    """

    ms: float
    bytes: int
    uses: float = 1.0

    @property
    def ms_per_gib(self) -> float:
        """Return the expected saving for each GiB it occupies: what eviction order and lambda
        compare.
        """
        return self.uses * self.ms * GIB / max(self.bytes, 1)

    @property
    def is_low(self) -> bool:
        """Tell whether it should be dropped (seed 000's DROP_LOW_UTILITY_ARTIFACT) whatever the
        room.
        """
        return self.uses * self.ms < DROP_BELOW_MS


def point_benefit(
    planner: Planner,
    query: RestoreQuery,
    prices: Prices,
    *,
    position: int,
    having_ms: float | None = None,
) -> Benefit:
    """Return what the point state at `position` saves the turn `query`, against its next best way.

    `having_ms`: what `query` takes, where that was planned before.
    """
    kept = next((point for point in query.points if point.position == position), None)
    if kept is None:
        return Benefit(0.0, 0)
    lacking = Point(position, lacks=("point",))
    points = tuple(lacking if point is kept else point for point in query.points)
    without = msgspec.structs.replace(query, points=points)
    size = sum(piece.bytes for piece in kept.pieces) or planner.model.point_bytes
    having_ms = total_ms(planner, query, prices) if having_ms is None else having_ms
    return Benefit(total_ms(planner, without, prices) - having_ms, size)


def range_benefit(
    planner: Planner,
    query: RestoreQuery,
    prices: Prices,
    *,
    start: int,
    having_ms: float | None = None,
) -> Benefit:
    """Return what the range state from `start` on saves the turn `query`, against its next best
    way.
    """
    spans = _cut(query.spans, start)
    without = msgspec.structs.replace(query, spans=spans)
    end = query.spans[-1].end if query.spans else start
    size = round(planner.model.range_bytes_per_token * max(0, end - start))
    having_ms = total_ms(planner, query, prices) if having_ms is None else having_ms
    return Benefit(total_ms(planner, without, prices) - having_ms, size)


def total_ms(planner: Planner, query: RestoreQuery, prices: Prices) -> float:
    """Return the ms that the best way of `query` takes."""
    return planner.plan(query, prices).chosen.terms.total_ms


def _cut(spans: Sequence[RangeSpan], at: int) -> tuple[RangeSpan, ...]:
    """Return the spans before `at`; the one that holds it is kept up to there."""
    kept = [span for span in spans if span.end <= at]
    for span in spans:
        if span.start < at < span.end:
            part = (at - span.start) / (span.end - span.start)
            pieces = tuple(
                msgspec.structs.replace(piece, bytes=round(piece.bytes * part))
                for piece in span.pieces
            )
            kept.append(RangeSpan(span.start, at, pieces))
    return tuple(kept)


class EvictionWeights(msgspec.Struct, frozen=True):
    """Eviction weights say what a token is worth to a cache's eviction order.

    Computing a token again takes `ms_per_token` * (1 + position / `context_tokens`); bringing a
    byte back from the nearest tier that keeps a copy takes `reload_ms_per_byte`, None without one.
    """

    ms_per_token: float
    context_tokens: float
    reload_ms_per_byte: float | None

    def lost_ms(self, tokens: int, position: int, *, copy_bytes: int = 0) -> float:
        """Return the ms that losing `tokens` tokens that end at `position` costs; `copy_bytes` 0:
        no copy.
        """
        computed = tokens * self.ms_per_token * (1.0 + position / self.context_tokens)
        if copy_bytes <= 0 or self.reload_ms_per_byte is None:
            return computed
        return min(computed, copy_bytes * self.reload_ms_per_byte)


def eviction_weights(prices: Prices, *, copies: Tier | None = None) -> EvictionWeights:
    """Return the prices as the cache's eviction order takes them; `copies`: the tier that holds
    them.
    """
    b, c = prices.prefill.b_ms, prices.prefill.c_ms
    table = prices.tiers.get(copies) if copies is not None else None
    per_byte = table.ms(GIB) / GIB if table is not None else None
    return EvictionWeights(max(b, 1e-9), max(b, 1e-9) / max(c, 1e-15), per_byte)


def hbm_price(candidates: Iterable[Benefit], needed_bytes: int, *, free_bytes: int) -> float:
    """Return lambda in ms per GiB: the mean saving lost by making room for `needed_bytes`.

    Nothing while there is free memory; then the cheapest candidates go first.
    """
    missing = needed_bytes - free_bytes
    if missing <= 0:
        return 0.0
    lost_ms, freed = 0.0, 0
    for benefit in sorted(candidates, key=lambda b: b.ms_per_gib):
        if freed >= missing:
            break
        lost_ms += benefit.uses * benefit.ms
        freed += benefit.bytes
    return lost_ms * GIB / freed if freed else 0.0
