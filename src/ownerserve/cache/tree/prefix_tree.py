"""The prefix tree knows which blocks of which token sequences are resident, and where one may go
on.

Owns intervals, stops, branches and hard locks, and so the residency and recency of everything
sealed. It never allocates or frees a slot: what it drops it returns to the caller. Tokens are
compared as bytes, so nothing here hashes more than the first block of a branch.

Structure kept at all times: a child hangs at a depth inside its parent's interval or at its end;
two ways on from one depth differ in their first block; an interval that is no longer growing has
a stop at its end.

The functions behind the class read along a path of the tree (rows, tokens, the places where a
prompt could go on) and change nothing. The planner prices those places; without one, the deepest
that lacks nothing is taken.

        keys    |t0 t1 ..|........|........|........|      tokens as bytes, one block a cell
        blocks  [   17   |   18   |    4   |    9   ]      one slot number in every range pool
                start                              end     depths, in blocks from the root
                     stops:   ^ depth 2        ^ depth 4   heat, sessions, point state
                     branches:  at depth 2 -> another interval

Depth d lies behind d blocks. A stop or branch at d belongs to the interval with start < d <= end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

import msgspec

from ownerserve.cache.outcomes import Replay, RestorablePoint, Restore, Resume
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import PrefixHash, SessionId


class Session(msgspec.Struct, eq=False):
    """A session is one agent's run on this worker: metadata, it owns no slot.

    tokens   committed by the last turn that moved the frontier, unsealed tail included
    sealed   its depth in the tree at that time, in blocks
    tip      the chain digest of those blocks, where who finished the turn told it
    node, depth   the resident part of it: the frontier in the tree
    row      slots of blocks 0..depth, None while a turn has them or nobody asked
    stored   how many of its first blocks can be brought from below the device, as was told last
    frontier_order     the begin order of that turn, 0 before any: an earlier one that ends later
                       is late
    next_check_s, queued_s   when the table looks at it next; the instant it waits under, no later,
                             None while it waits under none
    more_refs  for how many more sessions it counts: where it stands for a turn that is here
    """

    session_id: SessionId
    generation: int
    version: int = 0
    tokens: int = 0
    sealed: int = 0
    stored: int = 0
    tail: bytes = b""
    tip: PrefixHash | None = None
    stop: ResumeDepth | None = None
    row: list[int] | None = None
    frontier_order: int = 0
    running: int = 0
    last_s: float = 0.0
    expires_s: float = 0.0
    next_check_s: float = 0.0
    queued_s: float | None = None
    is_referenced: bool = False
    more_refs: int = 0
    pin: Receipt | None = None

    @property
    def node(self) -> Node | None:
        """Return the interval in which the frontier stands, if anything of the session is
        resident.
        """
        return self.stop.node if self.stop is not None else None

    @property
    def depth(self) -> int:
        """Return how many blocks of what the session committed are resident."""
        return self.stop.depth if self.stop is not None else 0


LOOK_SESSIONS = 4

Key = tuple[float, ...]
"""An eviction policy's order: the lowest goes first."""


class ResumeDepth(msgspec.Struct, eq=False):
    """A resume depth is one at which somebody may go on: heat for eviction, sessions, point state.

    `refs` counts the sessions whose soft reference is alive; `anchors` holds all whose frontier is
    here. `slots` is None, or has an entry a point component: None for one that is not resident.
    `queued` is the key under which the evictor has each of them waiting. `holds` counts the
    tickets that keep them, `trimmed` the blocks lost behind it. `is_let_go`: nobody will come back
    for it here.
    """

    node: Node
    depth: int
    last_s: float
    born_s: float
    uses: int = 1
    priority: int = 0
    refs: int = 0
    trimmed: int = 0
    inflation: float = 0.0
    anchors: dict[str, Session] | None = None
    slots: list[int | None] | None = None
    holds: int = 0
    queued: list[Key | None] | None = None
    backed: tuple[str, ...] = ()
    is_cooled: bool = False
    is_let_go: bool = False

    def absorb(self, other: ResumeDepth) -> None:
        """Take over heat and sessions of a stop that slid down to this depth."""
        self.last_s = max(self.last_s, other.last_s)
        self.uses = max(self.uses, other.uses)
        self.priority = max(self.priority, other.priority)
        self.inflation = max(self.inflation, other.inflation)
        self.trimmed = max(self.trimmed, other.trimmed)
        self.refs += other.refs
        self.is_let_go = self.is_let_go and other.is_let_go
        if other.anchors:
            if self.anchors:
                self.anchors.update(other.anchors)  # in place: there may be thousands
            else:
                self.anchors = other.anchors
            for session in other.anchors.values():
                session.stop = self

    @property
    def is_complete(self) -> bool:
        """Tell whether all point components are resident."""
        return self.slots is not None and None not in self.slots

    @property
    def is_stored(self) -> bool:
        """Tell whether a session that stands here can have all of it from below the device. Looks
        at LOOK_SESSIONS of them: who was forked from one stands where it does."""
        if not self.anchors:
            return False
        depth = self.depth
        for session in islice(self.anchors.values(), LOOK_SESSIONS):
            if session.stored >= depth:
                return True
        return False

    def point_slots(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the slots of the point components `names` that are resident here, by name."""
        held = zip(names, self.slots or (), strict=self.slots is not None)
        return {name: slot for name, slot in held if slot is not None}

    @property
    def is_bare(self) -> bool:
        """Tell whether neither point state nor a session's frontier is here."""
        return self.slots is None and not self.anchors


class Node(msgspec.Struct, eq=False):
    """A node is an interval of blocks under one parent, with branches hanging at depths inside
    it.
    """

    parent: Node | None
    start: int
    keys: bytearray
    blocks: list[int]
    stops: list[ResumeDepth] = []
    branches: dict[int, dict[bytes, Node]] = {}
    branch_top: int = 0
    pins: dict[int, int] = {}
    pinned: int = 0
    queued: Key | None = None
    is_exposed: bool = False
    is_live: bool = True

    @property
    def end(self) -> int:
        """Return the depth, in blocks, at which the interval ends."""
        return self.start + len(self.blocks)

    @property
    def floor(self) -> int:
        """Return the depth below which nothing may be trimmed: a lock or a branch needs it."""
        return self.pinned if self.pinned > self.branch_top else self.branch_top


class Receipt(msgspec.Struct, eq=False):
    """A receipt is a hard lock on the path from the root to `depth`. Single use (invariant 5)."""

    node: Node
    depth: int
    is_spent: bool = False

    def spend(self) -> None:
        """Mark as used; raises InvariantViolated the second time."""
        if self.is_spent:
            raise InvariantViolated("invariant 5: a lock receipt was released twice")
        self.is_spent = True


SHED_BLOCKS = 32
"""A dead tail up to this long moves out, so that the interval goes on growing in place. Agents
drop a little of each output from the next prompt; hanging a branch each time would leave a path
of as many nodes as turns."""


NEAR_BYTES = 1024
"""So much is compared as one number. Longer runs of tokens are compared as bytes."""

_depth = attrgetter("depth")


class Freed(msgspec.Struct):
    """Freed is what one eviction run freed: range slots, point slots (a list by component index for
    each stop), and how many of those stops could be restored at before.
    """

    blocks: list[int]
    points: list[list[int | None]]
    points_lost: int = 0


def _part(keys: memoryview, first: int, same: int, step: int, size: int) -> memoryview:
    """Return `step` blocks of `keys` behind the first `same` ones from byte `first` on."""
    return keys[first + same * size : first + (same + step) * size]


class PrefixTree:
    """A prefix tree is the tree of intervals of blocks, of `block_bytes` token bytes each."""

    __slots__ = (
        "block_bytes", "blocks", "cooled", "depths", "exposed", "left", "protected", "root", "slid",
    )  # fmt: skip

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.root = Node(parent=None, start=0, keys=bytearray(), blocks=[])
        self.blocks = 0
        self.depths = 0
        """The sum of the depths before all blocks: what computing them attends to."""
        self.protected = 0
        self.exposed: list[Node] = []
        """Intervals for the evictor to look at; see `expose`."""
        self.cooled: list[ResumeDepth] = []
        """Stops likewise, for their point state; see `cool`."""
        self.left: list[Session] = []
        """Sessions of which nothing is resident any more, for their table to look at."""
        self.slid: set[ResumeDepth] | None = None
        """Stops whose sessions lost something, for who tells others; None: nobody does."""

    # -- reading -------------------------------------------------------------------------------

    def walk(
        self, tokens: bytes, limit: int, *, node: Node | None = None, depth: int = 0, skip: int = 0
    ) -> tuple[Node, int]:
        """Follow `tokens` down to at most depth `limit`; returns where they part.

        Starts at (`node`, `depth`), the root by default; `tokens[0]` stands at depth `skip`.
        """
        node = node or self.root
        size = self.block_bytes
        most = skip + len(tokens) // size
        if most < limit:
            limit = most
        while depth < limit:
            start = node.start
            end = start + len(node.blocks)
            if depth < end:
                at = (depth - skip) * size
                if depth == start and end <= limit and tokens.startswith(node.keys, at):
                    depth = end  # all of it, as for a session that goes on: no view is needed
                else:
                    count = (limit if limit < end else end) - depth
                    depth += self._common(node, depth, tokens, at=at, count=count)
                if depth >= limit:
                    break
            hanging = node.branches.get(depth)
            if not hanging:
                break
            at = (depth - skip) * size
            child = hanging.get(tokens[at : at + size])
            if child is None:
                break
            node = child
        return node, depth

    def _common(self, node: Node, depth: int, tokens: bytes, *, at: int, count: int) -> int:
        """Count how many of `count` blocks of `node` from `depth` on equal `tokens` from byte `at`
        on.

        One memcmp when all do. Else from the front in steps that double to the one that differs,
        and halving that down to NEAR_BYTES: sequences part early, or at the end of what they share.
        There the first byte that differs is where the highest bit of the two's XOR is.
        """
        size = self.block_bytes
        first = (depth - node.start) * size
        near = max(1, NEAR_BYTES // size)
        with memoryview(node.keys) as keys:
            if tokens.startswith(keys[first : first + count * size], at):
                return count
            same, step = 0, near
            if count > near:
                while tokens.startswith(_part(keys, first, same, step, size), at + same * size):
                    same, step = same + step, 2 * step
                while step > near:
                    step //= 2
                    if tokens.startswith(_part(keys, first, same, step, size), at + same * size):
                        same += step
            left = min(near, count - same) * size
            low, high = first + same * size, at + same * size
            ours = int.from_bytes(keys[low : low + left], "big")
            differ = ours ^ int.from_bytes(tokens[high : high + left], "big")
        return same + (left - (differ.bit_length() + 7) // 8) // size

    # -- growing -------------------------------------------------------------------------------

    def extend(
        self, node: Node, depth: int, keys: bytes, blocks: list[int]
    ) -> tuple[Node, int, list[int]]:
        """Put `blocks` behind (`node`, `depth`), a locked place; returns the new place and spares.

        Where the tree has the same tokens already, its slot replaces the caller's in `blocks`, and
        the caller's is among the spares. O(new blocks).
        """
        size = self.block_bytes
        at, count = 0, len(blocks)
        spares: list[int] = []
        while at < count:
            inside = node.start + len(node.blocks) - depth
            if inside > 0:
                both = count - at if count - at < inside else inside
                same = self._common(node, depth, keys, at=at * size, count=both)
                if same:
                    spares += blocks[at : at + same]
                    first = depth - node.start
                    blocks[at : at + same] = node.blocks[first : first + same]
                    depth, at = depth + same, at + same
                    continue
            hanging = node.branches.get(depth)
            child = hanging.get(keys[at * size : (at + 1) * size]) if hanging else None
            if child is not None:
                node = child
                continue
            node = self._tip(node, depth, keys[at * size : (at + 1) * size])
            node.keys += keys[at * size :] if at else keys
            node.blocks += blocks[at:] if at else blocks
            grown = count - at
            self.blocks += grown
            self.depths += grown * depth + grown * (grown - 1) // 2
            depth, at = depth + grown, count
        return node, depth, spares

    def _tip(self, node: Node, depth: int, first_block: bytes) -> Node:
        """Return an interval that ends at `depth` and may grow by `first_block`."""
        if node.parent is not None:
            if depth < node.end and self._is_sheddable(node, depth):
                self._shed(node, depth)
            if depth == node.end:
                stops = node.stops
                if stops and stops[-1].depth == depth and stops[-1].is_bare:
                    stops.pop()
                return node
        return self._hang(Node(parent=node, start=depth, keys=bytearray(), blocks=[]), first_block)

    def _hang(self, child: Node, first_block: bytes) -> Node:
        parent = child.parent
        assert parent is not None
        child.branch_top = child.pinned = child.start
        parent.branches.setdefault(child.start, {})[first_block] = child
        parent.branch_top = max(parent.branch_top, child.start)
        return child

    def _is_sheddable(self, node: Node, depth: int) -> bool:
        return node.end - depth <= SHED_BLOCKS and depth >= node.floor and depth > node.start

    def _shed(self, node: Node, depth: int) -> None:
        """Move the dead tail behind `depth` out of `node` into a branch of its own.

        node  [======k~~~~)   ->   node [======k        sessions and points in ~~~~ go along
                                               `[~~~~)
        """
        size, first = self.block_bytes, depth - node.start
        dead = Node(
            parent=node, start=depth, keys=node.keys[first * size :], blocks=node.blocks[first:]
        )
        del node.keys[first * size :], node.blocks[first:]
        while node.stops and node.stops[-1].depth > depth:
            stop = node.stops.pop()
            stop.node = dead
            dead.stops.append(stop)
        dead.stops.reverse()
        self._hang(dead, bytes(dead.keys[:size]))
        self.expose(dead)

    # -- stops ---------------------------------------------------------------------------------

    def stop_at(self, node: Node, depth: int, now: float) -> ResumeDepth:
        """Return the stop at `depth` of `node`, made when missing."""
        stops = node.stops
        if not stops or stops[-1].depth < depth:  # as at the end of a turn that grew it
            index = len(stops)
        else:
            index = bisect_left(stops, depth, key=_depth)
        if index < len(stops) and stops[index].depth == depth:
            return stops[index]
        stop = ResumeDepth(node=node, depth=depth, last_s=now, born_s=now)
        stops.insert(index, stop)
        return stop

    def prune(self, stop: ResumeDepth) -> None:
        """Forget a stop that carries nothing; the one at an interval's end stays."""
        if stop.is_bare and stop.depth != stop.node.end:
            stop.node.stops.remove(stop)

    def anchor(self, session: Session, stop: ResumeDepth) -> None:
        """Make `stop` the session's frontier. Its old one must have been lifted."""
        if stop.anchors is None:
            stop.anchors = {}
        stop.anchors[session.session_id] = session
        stop.is_let_go = False
        stop.refs += session.is_referenced
        session.stop = stop

    def lift(self, session: Session) -> ResumeDepth | None:
        """Take the session's frontier off the tree; returns the stop it stood at, to prune."""
        stop = session.stop
        if stop is None:
            return None
        assert stop.anchors is not None
        del stop.anchors[session.session_id]
        stop.refs -= session.is_referenced
        session.stop = None
        self.cool(stop)
        return stop

    def cool(self, stop: ResumeDepth) -> None:
        """Have the evictor look at a stop: its point state is new, a session left it, or its soft
        reference ended."""
        self.expose(stop.node)
        if stop.slots is not None and not stop.is_cooled:
            stop.is_cooled = True
            self.cooled.append(stop)

    def expose(self, node: Node) -> None:
        """Have the evictor look at the tail of `node`: it may have become free, or worth less."""
        if not node.is_exposed:
            node.is_exposed = True
            self.exposed.append(node)

    # -- locks ---------------------------------------------------------------------------------

    def lock(self, node: Node, depth: int) -> Receipt:
        """Keep the path to `depth` from being trimmed until the receipt is released."""
        self._pin(node, depth)
        return Receipt(node=node, depth=depth)

    def unlock(self, receipt: Receipt) -> None:
        """Release a lock; raises InvariantViolated when it was released before."""
        receipt.spend()
        self._unpin(receipt.node, receipt.depth)
        self.expose(receipt.node)

    def relock(self, receipt: Receipt, node: Node, depth: int) -> None:
        """Move a lock to another place; what it kept before is free no earlier (invariant 5)."""
        before, former = receipt.node, receipt.depth
        pins = node.pins
        if node is before and pins.get(former) == 1 and former == node.pinned and depth > former:
            # As a turn that grows its interval does: above it nothing changes.
            del pins[former]
            pins[depth] = 1
            self.protected += depth - former
            node.pinned = receipt.depth = depth
        else:
            self._pin(node, depth)
            receipt.node = node
            self._unpin(before, former)
            receipt.depth = depth
        self.expose(before)

    def _pin(self, node: Node, depth: int) -> None:
        while node.parent is not None:
            pins = node.pins
            had = bool(pins)
            pins[depth] = pins.get(depth, 0) + 1
            if depth > node.pinned:
                self.protected += depth - node.pinned
                node.pinned = depth
            if had:
                return
            node, depth = node.parent, node.start

    def _unpin(self, node: Node, depth: int) -> None:
        while node.parent is not None:
            pins = node.pins
            left = pins.get(depth, 0) - 1
            if left < 0:
                raise InvariantViolated(f"invariant 5: no lock is left at depth {depth}")
            if left:
                pins[depth] = left
                return
            del pins[depth]
            if depth == node.pinned:
                node.pinned = max(pins, default=node.start)
                self.protected -= depth - node.pinned
            if pins:
                return
            node, depth = node.parent, node.start

    # -- shrinking -----------------------------------------------------------------------------

    def trim(self, node: Node, count: int, freed: Freed) -> None:
        """Drop the last `count` blocks of `node`, which lie above its floor, into `freed`.

        Stops behind the new end slide down to it: they lose their point state, keep their heat,
        and the sessions there stand at the new end.
        """
        blocks = node.blocks
        first = len(blocks) - count
        end = node.start + first
        if end < node.pinned or end < node.branch_top:
            raise InvariantViolated("invariant 7: a trim reached below a lock or a branch")
        freed.blocks += blocks[first:]
        del blocks[first:]
        self.blocks -= count
        self.depths -= count * end + count * (count - 1) // 2
        stops = node.stops
        if first and (len(stops) == 1 or stops[-2].depth < end):  # the usual: one slides, alone
            del node.keys[first * self.block_bytes :]
            place, carrier = node, stops[-1]
        else:
            place = node if first else self._remove(node)
            del node.keys[first * self.block_bytes :]
            carrier = stops.pop()
            while stops and stops[-1].depth > end:
                stop = stops.pop()
                self._drop_point(stop, freed)
                carrier.absorb(stop)
        carrier.trimmed += carrier.depth - end
        carrier.depth = end
        if carrier.slots is not None:
            self._drop_point(carrier, freed)
        if not (stops and stops[-1] is carrier):
            self._settle(carrier, place)
        if self.slid is not None and carrier.anchors:
            self.slid.add(carrier)

    def _settle(self, stop: ResumeDepth, place: Node) -> None:
        """Put a stop that slid down in its order among those of `place`. At the root nothing is
        left: its sessions start anew."""
        if place.parent is None:
            for session in (stop.anchors or {}).values():
                session.stop = session.row = None
                self.left.append(session)
            return
        stop.node = place
        at = bisect_left(place.stops, stop.depth, key=_depth)
        if at < len(place.stops) and place.stops[at].depth == stop.depth:
            place.stops[at].absorb(stop)
        else:
            place.stops.insert(at, stop)

    def _drop_point(self, stop: ResumeDepth, freed: Freed) -> None:
        if stop.slots is not None:
            freed.points_lost += stop.is_complete
            freed.points.append(stop.slots)
            stop.slots = None

    def _remove(self, node: Node) -> Node:
        """Take an empty interval off its parent; returns the parent."""
        parent = node.parent
        assert parent is not None
        node.is_live = False
        hanging = parent.branches[node.start]
        del hanging[bytes(node.keys[: self.block_bytes])]
        if not hanging:
            del parent.branches[node.start]
            parent.branch_top = max(parent.branches, default=parent.start)
        self.expose(parent)
        return parent


class ResumePlace(msgspec.Struct, frozen=True):
    """A resume place is where a turn opens: load `stop` (None: the empty state), compute from depth
    `start`, write from depth `floor` on.
    """

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


def let_go(tree: PrefixTree, stop: ResumeDepth, *, behind: int = 0) -> int:
    """Have what only led to `stop`, at an interval's end, go before all else, but for the first
    `behind` blocks: nobody will come back to it here. What others stand on, or branch off from,
    stays as it is. Returns the depth from which on it goes."""
    node, top = stop.node, stop.depth
    floor = max(node.branch_top, behind)
    if stop.depth != node.end or stop.depth <= floor:
        return top
    for above in reversed(node.stops):
        others = 1 if above is stop else 0
        if above.depth <= floor or len(above.anchors or ()) > others:
            return max(floor, above.depth)
        above.is_let_go = True
        tree.cool(above)
    return max(floor, node.start)


def nodes(root: Node) -> Iterator[Node]:
    """Iterate over all intervals but the root, parents first."""
    pending = [root]
    while pending:
        node = pending.pop()
        if node.parent is not None:
            yield node
        for hanging in node.branches.values():
            pending.extend(hanging.values())
