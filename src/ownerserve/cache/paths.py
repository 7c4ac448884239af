"""Reading along a path of the tree: rows, tokens, stops. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from ownerserve.cache.node import Node, Stop


def path(node: Node, depth: int) -> list[tuple[Node, int]]:
    """(interval, depth reached in it) from the root's child down to `node`."""
    steps = []
    current = node
    while current.parent is not None:
        steps.append((current, depth))
        depth = current.start
        current = current.parent
    steps.reverse()
    return steps


def row(node: Node, depth: int) -> list[int]:
    """Slots of blocks 0..depth."""
    if not node.start:  # as for a session that shares nothing; the root has none
        return node.blocks[:depth]
    steps = path(node, depth)
    slots: list[int] = []
    for step, reached in steps:
        slots += step.blocks[: reached - step.start]
    return slots


def tokens(node: Node, first: int, depth: int, *, block_bytes: int) -> bytes:
    """Token bytes of blocks first..depth on the path to `node`."""
    parts = []
    for step, reached in path(node, depth):
        low, high = max(first - step.start, 0), max(reached - step.start, 0)
        parts.append(bytes(step.keys[low * block_bytes : high * block_bytes]))
    return b"".join(parts)


def locate(node: Node, depth: int) -> Node:
    """The interval on the path to `node` that holds the block before `depth`."""
    while depth <= node.start and node.parent is not None:
        node = node.parent
    return node


def stops_above(node: Node, depth: int) -> Iterator[Stop]:
    """Stops on the path at `depth` or before, deepest first."""
    current: Node | None = node
    while current is not None:
        for stop in reversed(current.stops):
            if stop.depth <= depth:
                yield stop
        depth = current.start
        current = current.parent


def locked_depth(node: Node, depth: int) -> int:
    """How far the path to (node, depth) is locked: a lock holds all before it."""
    current = node
    while current.parent is not None:
        if current.pinned > current.start:
            return min(current.pinned, depth)
        depth, current = current.start, current.parent
    return 0


def complete_stop(node: Node, depth: int) -> Stop | None:
    """The deepest stop at `depth` or before whose point state lacks nothing."""
    for stop in stops_above(node, depth):
        if stop.is_complete:
            return stop
    return None


def nodes(root: Node) -> Iterator[Node]:
    """Every interval but the root, parents first."""
    pending = [root]
    while pending:
        node = pending.pop()
        if node.parent is not None:
            yield node
        for hanging in node.branches.values():
            pending.extend(hanging.values())
