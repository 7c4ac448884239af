"""What a turn would go on from is foretold for a session of which is known how much lies in each
tier, before any prompt of it is there. Pure.

The planner is asked as for a turn (node.restore.restores), about one run of tokens in each tier:

    device   |=== resident ===|
    below    |=== stored ============|     can be brought at its end alone
"""

from __future__ import annotations

from collections.abc import Mapping

from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.prices import Prices
from ownerserve.plan.inputs import ModelState, Piece, Point, RangeSpan, RestoreQuery
from ownerserve.plan.residency import NEAREST_FIRST
from ownerserve.plan.restore import Planner


def planned_tokens(
    planner: Planner, prices: Prices, *, tokens: int, resident: int, stored: Mapping[Tier, int]
) -> int:
    """Return how many of the first tokens of a prompt of `tokens` tokens would not be computed now:
    `resident` ones are on the device, `stored` says what can be brought from each tier."""
    query = _query(planner.model, tokens=tokens, resident=resident, stored=stored)
    return max(resident, planner.plan(query, prices).chosen.computed_from)


def _query(
    model: ModelState, *, tokens: int, resident: int, stored: Mapping[Tier, int]
) -> RestoreQuery:
    """Return the question; of tiers that have as much the nearest is asked."""
    end = max(stored.values(), default=0)
    tier = next((at for at in NEAREST_FIRST if stored.get(at) == end), Tier.DISK)
    spans, points = [RangeSpan(0, resident)] if resident else [], [Point(resident)]
    if end > resident:
        brought = round(model.range_bytes_per_token * (end - resident))
        pieces = (Piece(tier, brought),) if brought else ()
        spans.append(RangeSpan(resident, end, pieces))
        state = (Piece(tier, model.point_bytes),) if model.point_bytes else ()
        points.insert(0, Point(end, state))
    if not model.range_bytes_per_token:
        spans = [RangeSpan(0, tokens)]  # a point alone is enough to go on from
    return RestoreQuery(
        tokens=tokens,
        spans=tuple(spans),
        points=tuple(point for point in points if point.position),
        known_tokens=end,
    )
