"""Rules say what may be offered where: an engine's abilities and a model's nature, with reasons.

The only place that asks what an engine can do. A rule answers None (offer it) or why not.
"""

from __future__ import annotations

from ownerserve.kv.messages import Tier
from ownerserve.plan.inputs import Abilities, Exactness, ModelState, Point, RangeSpan, RestoreQuery
from ownerserve.plan.outcome import Why


def why_no_replay(model: ModelState, abilities: Abilities) -> Why | None:
    """Return why no exact replay exists for this model on this engine; None when one does."""
    if model.exact_replay_tokens is None:
        return Why.RECURRENT_HAS_NO_REPLAY
    if not abilities.can_replay:
        return Why.ENGINE_CANNOT_REPLAY
    if not abilities.per_group_hit:
        # A replay goes on with range state up to B and point state before it: two hit lengths.
        return Why.ONE_HIT_LENGTH
    return None


def why_no_bounded_replay(
    model: ModelState, abilities: Abilities, query: RestoreQuery
) -> Why | None:
    """Return why the approximate replay of one window may not be offered; None when it may."""
    if model.bounded_replay_tokens is not None and query.allowed is Exactness.EXACT:
        return Why.APPROXIMATE_NOT_ASKED
    if model.bounded_replay_tokens is None:
        return Why.RECURRENT_HAS_NO_REPLAY
    return why_no_replay(model, abilities)


def why_out_of_reach(position: int, query: RestoreQuery, covered: int) -> Why | None:
    """Return why a boundary can't be gone on from at all; None when it can."""
    if position >= query.tokens:
        # A hit is capped at N - 1: the last token is computed, its logits are what was asked for.
        return Why.LAST_TOKEN_IS_COMPUTED
    if position > covered:
        return Why.RANGE_STATE_MISSING
    return None


def device_hit(query: RestoreQuery) -> int:
    """Return how far, in tokens, the device alone can go on: its own hit, the same length for all
    groups.
    """
    resident = 0
    for span in query.spans:
        if span.pieces:
            break
        resident = span.end
    for point in query.points:
        if point.position <= resident and point.position < query.tokens and is_resident(point):
            return point.position
    return 0


def is_resident(point: Point) -> bool:
    """Tell whether everything of a point is on the device now."""
    return not point.pieces and not point.lacks


def why_not_one_length(
    model: ModelState, query: RestoreQuery, point: Point, *, hit: int
) -> Why | None:
    """Return why an engine with one hit length can't go on at `point`; None when it can: all state
    beyond the device's own `hit` must be movable.

    What is only on the device beyond `hit` can't be combined with what is loaded.
    """
    if point.position == hit:
        return None
    if point.position < hit:
        return Why.ONE_HIT_LENGTH
    whole = sum(piece.bytes for piece in point.pieces) >= model.point_bytes
    spans = [span for span in query.spans if span.end > hit and span.start < point.position]
    whole = whole and all(_is_movable(span, model) for span in spans)
    return None if whole else Why.ONE_HIT_LENGTH


def _is_movable(span: RangeSpan, model: ModelState) -> bool:
    named = sum(piece.bytes for piece in span.pieces if piece.tier is not Tier.DEVICE)
    # Half a token of slack: bytes a token need not be whole for compressed state.
    return named >= model.range_bytes_per_token * (span.end - span.start - 0.5)
