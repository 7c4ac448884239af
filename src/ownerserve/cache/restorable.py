"""Where a prompt could go on: all restorable points of a path, and the choice of one.

Reads the tree only. The planner prices the points; without one, the deepest that lacks nothing is
taken.
"""

from __future__ import annotations

import msgspec

from ownerserve.cache import paths
from ownerserve.cache.node import Node, Stop
from ownerserve.cache.outcomes import Point, Replay, Restore, Resume


class Place(msgspec.Struct, frozen=True):
    """Where a turn opens: load `stop` (None: the empty state), compute from depth `start`, write
    from depth `floor` on."""

    stop: Stop | None
    start: int
    floor: int


def points(node: Node, cap: int, *, names: tuple[str, ...], block_tokens: int) -> tuple[Point, ...]:
    """Every depth up to `cap` that has point state, deepest first, and `cap` itself if it is not
    among them: its range state is resident and can be replayed."""
    found: list[Point] = []
    for stop in paths.stops_above(node, cap) if names else ():
        if stop.slots is not None:
            lacks = tuple(name for name, slot in zip(names, stop.slots, strict=True) if slot < 0)
            found.append(Point(stop.depth * block_tokens, lacks))
    if cap and not (found and found[0].position == cap * block_tokens):
        found.insert(0, Point(cap * block_tokens, names))
    return tuple(found)


def deepest(node: Node, depth: int, *, names: tuple[str, ...]) -> Place:
    """The deepest point at `depth` or before that lacks none of the point components `names`; a
    model without any can go on at every boundary."""
    if not names:
        return Place(None, depth, depth)
    stop = paths.complete_stop(node, depth)
    start = stop.depth if stop is not None else 0
    return Place(stop, start, start)


def chosen(
    node: Node, depth: int, resume: Resume, *, names: tuple[str, ...], block_tokens: int
) -> Place | None:
    """The place that `resume` names; None when it is no longer to be had."""
    match resume:
        case Restore(position=position):
            start = floor = position // block_tokens
        case Replay(start=position, floor=floor):
            start, floor = position // block_tokens, floor // block_tokens
    if not 0 <= start <= floor <= depth:
        return None
    stop = paths.complete_stop(node, start)
    if stop is not None and stop.depth != start:
        stop = None
    if stop is None and start and names and isinstance(resume, Restore):
        return None
    return Place(stop, start, floor)
