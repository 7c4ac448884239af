"""A restore is asked by hand here: what `ownerserve plan`, benchmarks and examples price.

A node makes its queries from what it holds (plan.residency); here the holdings are described in a
few numbers.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import Geometry, exact_replay_tokens
from ownerserve.kv.messages import Tier
from ownerserve.kv.specs import Window
from ownerserve.plan.inputs import Exactness, ModelState, Piece, Point, RangeSpan, RestoreQuery


class ReturningSession(msgspec.Struct, frozen=True, kw_only=True):
    """A returning session of `context_tokens` comes back with `new_tokens` more.

    `shared_tokens`: how much of the context the prompt repeats; None: all of it. Point state is in
    `point_tier` (None: nobody kept it), at the end of the context, or at every multiple of
    `checkpoint_every`.
    """

    context_tokens: int
    new_tokens: int
    shared_tokens: int | None = None
    range_tier: Tier = Tier.DISK
    point_tier: Tier | None = Tier.DISK
    checkpoint_every: int | None = None


def model_state(geometry: Geometry) -> ModelState:
    """Return what the planner needs of a geometry."""
    spec = geometry.spec
    windows = [s.kind.tokens for s in spec.states if isinstance(s.kind, Window)]
    replay = exact_replay_tokens(spec)
    return ModelState(
        layers=len(spec.layers),
        block_tokens=geometry.block_tokens,
        range_bytes_per_token=geometry.bytes_per_token,
        point_bytes=geometry.point_bytes,
        exact_replay_tokens=replay if windows else None,
        bounded_replay_tokens=max(windows) if windows and replay is not None else None,
    )


def ask(
    geometry: Geometry, held: ReturningSession, *, allowed: Exactness = Exactness.EXACT
) -> RestoreQuery:
    """Return the query of a session that comes back, or branches. Raises InvalidInput when it
    shares more than its context.
    """
    shared = held.context_tokens if held.shared_tokens is None else held.shared_tokens
    if shared > held.context_tokens:
        raise InvalidInput(
            "--shared", f"{shared} of {held.context_tokens} tokens", "share at most the context"
        )
    block = geometry.block_tokens
    tokens = shared + held.new_tokens
    boundary = shared // block * block
    spans: tuple[RangeSpan, ...] = ()
    if boundary:
        pieces = _pieces(held.range_tier, geometry.range_bytes(boundary))
        spans = (RangeSpan(0, boundary, pieces),)
    return RestoreQuery(
        tokens=tokens,
        spans=spans,
        points=_points(geometry, held, boundary=boundary),
        known_tokens=shared,
        allowed=allowed,
    )


def _points(geometry: Geometry, held: ReturningSession, *, boundary: int) -> tuple[Point, ...]:
    """List the points, deepest first: the deepest shared boundary, and the checkpoints at or before
    it.
    """
    if not boundary:
        return ()
    block = geometry.block_tokens
    kept: set[int] = set()
    if geometry.point_bytes and held.point_tier is not None:
        every = held.checkpoint_every
        if every is None:
            kept = {held.context_tokens // block * block}
        else:
            step = -(-every // block) * block
            kept = set(range(step, boundary + 1, step))
    kept = {at for at in kept if at <= boundary}
    pieces = () if held.point_tier is None else _pieces(held.point_tier, geometry.point_bytes)
    lacking = ("point",) if geometry.point_bytes else ()
    return tuple(
        Point(at, pieces if geometry.point_bytes else ()) if at in kept else Point(at, (), lacking)
        for at in sorted(kept | {boundary}, reverse=True)
    )


def _pieces(tier: Tier, count: int) -> tuple[Piece, ...]:
    return () if tier is Tier.DEVICE else (Piece(tier, count),)
