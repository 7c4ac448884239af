"""This module goes from flat rows (who holds which component of which tokens) to the planner's
spans and points.

A position can be used only where *all* range components can be had; of several copies of one piece
the nearest is taken. A load under way counts from the tier it lands in: starting the same bytes a
second time can't end sooner (single flight).

    csa_main   │─────── device ───────│── host ──│
    csa_index  │── device ──│────── disk ────────────│
    spans      │            │         │          │         (covered ends where one component ends)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from ownerserve.kv.messages import Tier
from ownerserve.plan.inputs import Piece, Point, RangeSpan

NEAREST_FIRST = (Tier.DEVICE, Tier.HOST, Tier.PEER, Tier.DISK, Tier.REMOTE)


class RangeRow(msgspec.Struct, frozen=True, gc=False):
    """A range row says that `component` of tokens [start, end) is in `tier`: one record, or one run
    of device blocks.
    """

    component: str
    start: int
    end: int
    tier: Tier
    bytes: int
    ready_ms: float = 0.0


class PointRow(msgspec.Struct, frozen=True, gc=False):
    """A point row says that `component` at boundary `position` is in `tier`."""

    component: str
    position: int
    tier: Tier
    bytes: int
    ready_ms: float = 0.0


def spans_of(rows: Iterable[RangeRow], components: Sequence[str]) -> tuple[RangeSpan, ...]:
    """Return the spans from 0 up to where some component ends, neighbours of equal origin
    joined.
    """
    by_component: dict[str, list[RangeRow]] = {name: [] for name in components}
    edges = {0}
    for row in rows:
        if row.component in by_component:
            by_component[row.component].append(row)
            edges |= {row.start, row.end}
    cuts = sorted(edges)
    spans: list[RangeSpan] = []
    for start, end in pairwise(cuts):
        nearest = [_nearest(held, start, end) for held in by_component.values()]
        found = [row for row in nearest if row is not None]
        if len(found) < len(nearest) or not found:
            break
        pieces = tuple(p for row in found if (p := _piece(row, start, end)) is not None)
        _append(spans, RangeSpan(start, end, _merged(pieces)))
    return tuple(spans)


def points_of(
    rows: Iterable[PointRow], components: Sequence[str], *, positions: Iterable[int] = ()
) -> tuple[Point, ...]:
    """Return the points, deepest first: every position in `rows` or `positions` (with range state
    only).
    """
    held: dict[int, dict[str, PointRow]] = {position: {} for position in positions}
    for row in rows:
        at = held.setdefault(row.position, {})
        before = at.get(row.component)
        if before is None or NEAREST_FIRST.index(row.tier) < NEAREST_FIRST.index(before.tier):
            at[row.component] = row
    points = []
    for position in sorted(held, reverse=True):
        at = held[position]
        lacks = tuple(name for name in components if name not in at)
        rows_here = [at[name] for name in components if name in at]
        pieces = tuple(
            Piece(row.tier, row.bytes, row.ready_ms)
            for row in rows_here
            if row.tier is not Tier.DEVICE or row.ready_ms > 0.0
        )
        points.append(Point(position, _merged(pieces), lacks))
    return tuple(points)


def _nearest(rows: Iterable[RangeRow], start: int, end: int) -> RangeRow | None:
    covering = [row for row in rows if row.start <= start and row.end >= end]
    return min(covering, key=lambda r: (NEAREST_FIRST.index(r.tier), r.ready_ms), default=None)


def _piece(row: RangeRow, start: int, end: int) -> Piece | None:
    """Return the part of a row that a span uses; None when it is in place already."""
    if row.tier is Tier.DEVICE and row.ready_ms <= 0.0:
        return None
    count = -(-row.bytes * (end - start) // (row.end - row.start))
    return Piece(row.tier, count, row.ready_ms)


def _merged(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Return one piece for each tier and readiness: components of one tier travel together."""
    merged: dict[tuple[Tier, float], int] = {}
    for piece in pieces:
        key = (piece.tier, piece.ready_ms)
        merged[key] = merged.get(key, 0) + piece.bytes
    return tuple(Piece(tier, count, ready) for (tier, ready), count in merged.items())


def _append(spans: list[RangeSpan], span: RangeSpan) -> None:
    """Add `span`, joined to the one before it where both come from the same place evenly."""
    if spans and _origin(spans[-1]) == _origin(span):
        last = spans[-1]
        pieces = tuple(
            Piece(a.tier, a.bytes + b.bytes, a.ready_ms)
            for a, b in zip(last.pieces, span.pieces, strict=True)
        )
        spans[-1] = RangeSpan(last.start, span.end, pieces)
    else:
        spans.append(span)


def _origin(span: RangeSpan) -> list[tuple[Tier, float, int]]:
    """Return where a span comes from, and its bytes a token: equal ones can be joined."""
    length = span.end - span.start
    return [(piece.tier, piece.ready_ms, round(piece.bytes / length)) for piece in span.pieces]
