"""Reading along a path of the tree: rows, tokens, and the places where a prompt could go on.

Changes nothing. The planner prices those places; without one, the deepest that lacks nothing is
taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ownerserve.cache.outcomes import Replay, RestorablePoint, Restore, Resume
from ownerserve.cache.tree.node import Node, ResumeDepth


class ResumePlace(msgspec.Struct, frozen=True):
    """A turn opens at a resume place: load `stop` (None: the empty state), compute from depth
    `start`, write from depth `floor` on."""

    stop: ResumeDepth | None
    start: int
    floor: int


def points(
    node: Node, cap: int, *, names: tuple[str, ...], block_tokens: int
) -> tuple[RestorablePoint, ...]:
    """List every depth up to `cap` that has point state, deepest first, and `cap` itself if it is
    not among them: its range state is resident and can be replayed."""
    found: list[RestorablePoint] = []
    for stop in stops_above(node, cap) if names else ():
        if stop.slots is not None:
            slots = zip(names, stop.slots, strict=True)
            lacks = tuple(name for name, slot in slots if slot is None)
            found.append(RestorablePoint(stop.depth * block_tokens, lacks))
    if cap and not (found and found[0].position == cap * block_tokens):
        found.insert(0, RestorablePoint(cap * block_tokens, names))
    return tuple(found)


def deepest(node: Node, depth: int, *, names: tuple[str, ...]) -> ResumePlace:
    """Return the deepest point at `depth` or before that lacks none of the point components
    `names`; a model without any can go on at every boundary."""
    if not names:
        return ResumePlace(None, depth, depth)
    stop = complete_stop(node, depth)
    start = stop.depth if stop is not None else 0
    return ResumePlace(stop, start, start)


def chosen(
    node: Node, depth: int, resume: Resume, *, names: tuple[str, ...], block_tokens: int
) -> ResumePlace | None:
    """Return the place that `resume` names; None when it is no longer to be had."""
    match resume:
        case Restore(position=position):
            start = floor = position // block_tokens
        case Replay(start=position, floor=floor):
            start, floor = position // block_tokens, floor // block_tokens
    if not 0 <= start <= floor <= depth:
        return None
    stop = complete_stop(node, start)
    if stop is not None and stop.depth != start:
        stop = None
    if stop is None and start and names and isinstance(resume, Restore):
        return None
    return ResumePlace(stop, start, floor)


def path(node: Node, depth: int) -> list[tuple[Node, int]]:
    """List (interval, depth reached in it) from the root's child down to `node`."""
    steps = []
    current = node
    while current.parent is not None:
        steps.append((current, depth))
        depth = current.start
        current = current.parent
    steps.reverse()
    return steps


def row(node: Node, depth: int) -> list[int]:
    """List the slots of blocks 0..depth on the path to `node`."""
    if not node.start:  # as for a session that shares nothing; the root has none
        return node.blocks[:depth]
    steps = path(node, depth)
    slots: list[int] = []
    for step, reached in steps:
        slots += step.blocks[: reached - step.start]
    return slots


def tokens(node: Node, first: int, depth: int, *, block_bytes: int) -> bytes:
    """Return the token bytes of blocks first..depth on the path to `node`."""
    parts = []
    for step, reached in path(node, depth):
        low, high = max(first - step.start, 0), max(reached - step.start, 0)
        parts.append(bytes(step.keys[low * block_bytes : high * block_bytes]))
    return b"".join(parts)


def locate(node: Node, depth: int) -> Node:
    """Return the interval on the path to `node` that holds the block before `depth`."""
    while depth <= node.start and node.parent is not None:
        node = node.parent
    return node


def stops_above(node: Node, depth: int) -> Iterator[ResumeDepth]:
    """Iterate over the stops on the path at `depth` or before, deepest first."""
    current: Node | None = node
    while current is not None:
        for stop in reversed(current.stops):
            if stop.depth <= depth:
                yield stop
        depth = current.start
        current = current.parent


def locked_depth(node: Node, depth: int) -> int:
    """Return how far the path to (node, depth) is locked: a lock holds all before it."""
    current = node
    while current.parent is not None:
        if current.pinned > current.start:
            return min(current.pinned, depth)
        depth, current = current.start, current.parent
    return 0


def complete_stop(node: Node, depth: int) -> ResumeDepth | None:
    """Return the deepest stop at `depth` or before whose point state lacks nothing."""
    for stop in stops_above(node, depth):
        if stop.is_complete:
            return stop
    return None


def nodes(root: Node) -> Iterator[Node]:
    """Iterate over all intervals but the root, parents first."""
    pending = [root]
    while pending:
        node = pending.pop()
        if node.parent is not None:
            yield node
        for hanging in node.branches.values():
            pending.extend(hanging.values())
