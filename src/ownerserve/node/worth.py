"""What stored records save, by measured costs. Pure.

    cell [a, b) of a session of N tokens: without it [a, N) is computed again, less the load
    point at p:                           what the next best way costs more (a replay, or from c)

The store keeps by it: `restore_cost_ms` of a record, shared over its components by bytes, since
losing one of them is losing all.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ownerserve.node.records import Cell, RecordNames
from ownerserve.plan.benefit import DROP_BELOW_MS, point_benefit, range_benefit
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.inputs import Piece, Point, RestoreQuery, Span, Tier
from ownerserve.plan.restore import Planner

KEPT_IN = Tier.DISK
"""Records are priced as loads from there: it is where they are when it matters."""


class Worth:
    """Prices records. Holds no state but where prices come from."""

    def __init__(self, names: RecordNames, planner: Planner, costs: CostModel) -> None:
        self._names = names
        self._planner = planner
        self._costs = costs
        layout, sizes = names.layout, names.slot_bytes
        self._range_bytes = sum(sizes(name) for name in layout.range_names)
        self._point_bytes = sum(sizes(name) for name in layout.point_names)

    def session(self, depth: int, points: Iterable[int]) -> RestoreQuery:
        """The session's next turn, as it would ask if all of [0, depth) were in the store."""
        block = self._names.layout.block_tokens
        span = Span(0, depth * block, (Piece(KEPT_IN, depth * self._range_bytes),))
        stored = (Piece(KEPT_IN, self._point_bytes),) if self._point_bytes else ()
        kept = {at: Point(at * block, stored) for at in points if 0 < at <= depth}
        lacking = ("point",) if self._point_bytes else ()
        kept.setdefault(depth, Point(depth * block, lacks=lacking))
        held = tuple(kept[at] for at in sorted(kept, reverse=True))
        tokens = depth * block + 1
        return RestoreQuery(tokens=tokens, spans=(span,), points=held, known_tokens=tokens - 1)

    def load_ms(self, depth: int) -> float:
        """What bringing back [0, depth) and one point takes."""
        count = depth * self._range_bytes + self._point_bytes
        return self._costs.load(KEPT_IN, count).ms

    def is_low(self, query: RestoreQuery) -> bool:
        """Whether nothing of the session is worth a record: computing it anew is as good."""
        plan = self._planner.plan(query, self._costs.prices())
        return plan.reuse_benefit_ms < DROP_BELOW_MS

    def cost_ms(self, query: RestoreQuery, piece: Cell, component: str) -> float:
        """What a hit costs more without this record of the session; a piece without blocks is the
        point state at its end."""
        block, prices = self._names.layout.block_tokens, self._costs.prices()
        if piece.first == piece.end:
            position = piece.end * block
            benefit = point_benefit(self._planner, query, prices, position=position)
            whole = self._point_bytes
        else:
            start = piece.first * block
            query = self._with_boundary(query, start)
            benefit = range_benefit(self._planner, query, prices, start=start)
            whole = self._range_bytes
        return max(0.0, benefit.ms) * self._names.slot_bytes(component) / max(whole, 1)

    def _with_boundary(self, query: RestoreQuery, position: int) -> RestoreQuery:
        """The query with `position` among its points: up to there range state would be left."""
        if not position or any(point.position == position for point in query.points):
            return query
        lacking = ("point",) if self._point_bytes else ()
        points = sorted((*query.points, Point(position, lacks=lacking)), key=lambda p: -p.position)
        return msgspec.structs.replace(query, points=tuple(points))
