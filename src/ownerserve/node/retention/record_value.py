"""A record's value is what it saves, by measured costs. Pure.

    cell [a, b) of a session of N tokens: without it [a, N) is computed again, less the load
    point at p:                           what the next best way costs more (a replay, or from c)

The store keeps by it: `restore_cost_ms` of a record, shared over its components by bytes, since
losing one of them is losing all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import ceil

import msgspec

from ownerserve.cache.outcomes import Shortage, Victim
from ownerserve.cache.policies.cost_aware import REUSE_OF_REFERENCED
from ownerserve.kv.messages import Tier
from ownerserve.node.vocabulary.records import Cell, RecordNames
from ownerserve.plan.benefit import (
    DROP_BELOW_MS,
    Benefit,
    EvictionWeights,
    eviction_weights,
    hbm_price,
    point_benefit,
    range_benefit,
)
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.cost.prices import Prices
from ownerserve.plan.inputs import Piece, Point, RangeSpan, RestoreQuery
from ownerserve.plan.restore import Planner

KEPT_IN = Tier.DISK
"""Records are priced as loads from there: it is where they are when it matters."""


KNOTS = 8
"""A session's cells are priced at so many depths, and between them by a straight line: the price
of a long session's cells is smooth, and a plan for each of them costs more than it tells."""


def memory_price(short: Shortage, prices: Prices) -> float:
    """Return lambda, in ms per GiB of device memory: what those lose who would be evicted for a
    turn, by what computing or loading it again takes; 0 while there is room.

    What no session is expected back for counts as much less as the cache's order has it.
    """
    if short.wanted <= short.free:
        return 0.0
    weights = eviction_weights(prices, copies=KEPT_IN)
    return hbm_price(
        [_benefit(victim, weights, short.block_bytes) for victim in short.victims],
        short.wanted * short.block_bytes,
        free_bytes=short.free * short.block_bytes,
    )


def _benefit(victim: Victim, weights: EvictionWeights, block_bytes: int) -> Benefit:
    held = victim.blocks * block_bytes
    copied = held if victim.is_backed else 0
    lost_ms = weights.lost_ms(victim.tokens, victim.position, copy_bytes=copied)
    return Benefit(lost_ms, held, 1.0 if victim.is_expected else 1.0 / REUSE_OF_REFERENCED)


class SessionValue(msgspec.Struct, eq=False):
    """A `SessionValue` prices a session of `depth` blocks, as its next turn would ask if all of it
    were in the store.

    `having_ms` is what that turn takes; the dicts hold what was priced so far, in ms by depth.
    """

    query: RestoreQuery
    depth: int
    having_ms: float
    benefit_ms: float
    ranges: dict[int, float] = msgspec.field(default_factory=dict)
    points: dict[int, float] = msgspec.field(default_factory=dict)

    @property
    def is_low(self) -> bool:
        """`is_low` tells whether nothing of the session is worth a record: computing it anew is as
        good."""
        return self.benefit_ms < DROP_BELOW_MS


class RecordValue:
    """A `RecordValue` prices what stored records save; it holds no state but where prices come
    from."""

    def __init__(self, names: RecordNames, planner: Planner, costs: CostModel) -> None:
        self._names = names
        self._planner = planner
        self._costs = costs
        layout, sizes = names.layout, names.slot_bytes
        self._range_bytes = sum(sizes(name) for name in layout.range_names)
        self._point_bytes = sum(sizes(name) for name in layout.point_names)

    def session(self, depth: int, points: Iterable[int]) -> SessionValue:
        """Price a session of `depth` blocks with point state at the depths `points`, at the present
        prices."""
        block = self._names.layout.block_tokens
        span = RangeSpan(0, depth * block, (Piece(KEPT_IN, depth * self._range_bytes),))
        stored = (Piece(KEPT_IN, self._point_bytes),) if self._point_bytes else ()
        kept = {at: Point(at * block, stored) for at in points if 0 < at <= depth}
        lacking = ("point",) if self._point_bytes else ()
        kept.setdefault(depth, Point(depth * block, lacks=lacking))
        held = tuple(kept[at] for at in sorted(kept, reverse=True))
        tokens = depth * block + 1
        query = RestoreQuery(tokens=tokens, spans=(span,), points=held, known_tokens=tokens - 1)
        plan = self._planner.plan(query, self._costs.prices())
        return SessionValue(query, depth, plan.chosen.terms.total_ms, plan.reuse_benefit_ms)

    def load_ms(self, depth: int) -> float:
        """Return the ms that bringing back blocks [0, depth) and one point takes."""
        count = depth * self._range_bytes + self._point_bytes
        return self._costs.load(KEPT_IN, count).ms

    def cost_ms(self, session: SessionValue, piece: Cell, component: str) -> float:
        """Return the ms that a hit costs more without this record of the session; a piece without
        blocks is the point state at its end."""
        if piece.first == piece.end:
            lost_ms, whole = self._point_ms(session, piece.end), self._point_bytes
        else:
            lost_ms, whole = self._range_ms(session, piece.first), self._range_bytes
        return lost_ms * self._names.slot_bytes(component) / max(whole, 1)

    def _point_ms(self, session: SessionValue, depth: int) -> float:
        known = session.points.get(depth)
        if known is None:
            known = session.points[depth] = max(
                0.0,
                point_benefit(
                    self._planner,
                    session.query,
                    self._costs.prices(),
                    position=depth * self._names.layout.block_tokens,
                    having_ms=session.having_ms,
                ).ms,
            )
        return known

    def _range_ms(self, session: SessionValue, first: int) -> float:
        """Return the ms that losing the cell at `first` costs: a straight line between the knots
        around it, which ends at 0 behind the last cell."""
        grid = self._names.blocks
        step = ceil(session.depth / (KNOTS * grid)) * grid
        low = first // step * step
        at_low = self._knot_ms(session, low)
        if first == low:
            return at_low
        high = min(low + step, session.depth)
        at_high = self._knot_ms(session, high) if high < session.depth else 0.0
        return at_low + (at_high - at_low) * (first - low) / (high - low)

    def _knot_ms(self, session: SessionValue, first: int) -> float:
        known = session.ranges.get(first)
        if known is None:
            start = first * self._names.layout.block_tokens
            known = session.ranges[first] = max(
                0.0,
                range_benefit(
                    self._planner,
                    self._with_boundary(session.query, start),
                    self._costs.prices(),
                    start=start,
                    having_ms=session.having_ms,
                ).ms,
            )
        return known

    def _with_boundary(self, query: RestoreQuery, position: int) -> RestoreQuery:
        """Return the query with `position` among its points: up to there range state would be
        left."""
        points = query.points
        at = bisect_left(points, -position, key=lambda point: -point.position)  # the deepest first
        if not position or (at < len(points) and points[at].position == position):
            return query
        lacking = ("point",) if self._point_bytes else ()
        left = (*points[:at], Point(position, lacks=lacking), *points[at:])
        return msgspec.structs.replace(query, points=left)
