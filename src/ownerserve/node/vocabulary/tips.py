"""A session's tip as it stands in the store: what to look for to know whether it is still there.

A record's id follows from the tokens before it; a tip keeps the digests at the ends of its records
instead of the tokens, so that a later life of the worker can look for them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.node.vocabulary.records import Digests, RecordNames


class Tip(msgspec.Struct, frozen=True):
    """[0, depth) blocks of a session, as it was last copied; depth 0: the session is forgotten.

    `ends` maps a block to the chain digest at its end: of each range record's last block, and of
    the last block before each of `points`, the depths whose point state was copied too. `tenant` is
    the salt in its records' names; empty: what all share.
    """

    session_id: SessionId
    depth: int
    ends: dict[int, PrefixHash] = {}
    points: tuple[int, ...] = ()
    tenant: bytes = b""


class Standing(msgspec.Struct, frozen=True):
    """How much of a tip can be had from a tier: `depth` blocks, up to `digest`. `has_point`: with
    the point state there, else up to it by a replay."""

    depth: int
    digest: PrefixHash | None = None
    has_point: bool = False


NOTHING = Standing(0)


def tip_of(
    names: RecordNames,
    session_id: SessionId,
    depth: int,
    *,
    digests: Digests,
    points: Iterable[int],
    tenant: bytes = b"",
) -> Tip:
    """The tip of a session of which blocks [0, depth) were copied."""
    kept = tuple(sorted(at for at in points if 0 < at <= depth))
    at = {cell.end - 1 for cell in names.cells(depth)} | {point - 1 for point in kept}
    return Tip(session_id, depth, {block: digests[block] for block in sorted(at)}, kept, tenant)


def ids_of(names: RecordNames, tip: Tip) -> tuple[bytes, ...]:
    """The ids of all its records."""
    names = names.of(tip.tenant)
    return tuple(id_ for ids in (*_cells(names, tip), *_points(names, tip).values()) for id_ in ids)


def standing(names: RecordNames, tip: Tip, held: frozenset[bytes], *, can_replay: bool) -> Standing:
    """How much of the tip can be brought back from what is `held`.

    Range state counts as far as no record lacks; a model with point state goes on at the deepest
    point that is there too, or, by a replay, where range state ends.
    """
    depth, has_point, names = 0, False, names.of(tip.tenant)
    for cell, ids in zip(names.cells(tip.depth), _cells(names, tip), strict=True):
        if not held.issuperset(ids):
            break
        depth = cell.end
    if names.point_names and depth:
        points = _points(names, tip)
        whole = [at for at, ids in points.items() if at <= depth and held.issuperset(ids)]
        if whole or not can_replay:
            depth, has_point = max(whole, default=0), True
    return Standing(depth, tip.ends.get(depth - 1), has_point) if depth else NOTHING


def _cells(names: RecordNames, tip: Tip) -> Iterator[tuple[bytes, ...]]:
    """The ids of each range record's components, from the front."""
    for cell in names.cells(tip.depth):
        yield tuple(names.range_id(name, cell, tip.ends) for name in names.range_names)


def _points(names: RecordNames, tip: Tip) -> Mapping[int, tuple[bytes, ...]]:
    return {
        depth: tuple(names.point_id(name, depth, tip.ends) for name in names.point_names)
        for depth in tip.points
    }


def is_sound(names: RecordNames, tip: Tip) -> bool:
    """Whether a tip that was read from a file names what its records need."""
    needed = {cell.end - 1 for cell in names.cells(tip.depth)} | {at - 1 for at in tip.points}
    return needed <= tip.ends.keys() and all(0 < at <= tip.depth for at in tip.points)
