"""The tree's parts: an interval of blocks, the depths inside it where a turn may resume, the
sessions that stand there, a lock receipt.

        keys    |t0 t1 ..|........|........|........|      tokens as bytes, one block a cell
        blocks  [   17   |   18   |    4   |    9   ]      one slot number in every range pool
                start                              end     depths, in blocks from the root
                     stops:   ^ depth 2        ^ depth 4   heat, sessions, point state
                     branches:  at depth 2 -> another interval

Depth d lies behind d blocks. A stop or branch at d belongs to the interval with start < d <= end.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import PrefixHash, SessionId


class Session(msgspec.Struct, eq=False):
    """A session is one agent's run on this worker: metadata, it owns no slot.

    tokens   committed by the last turn that moved the frontier, unsealed tail included
    sealed   its depth in the tree at that time, in blocks
    tip      the chain digest of those blocks, where who finished the turn told it
    node, depth   the resident part of it: the frontier in the tree
    row      slots of blocks 0..depth, None while a turn has them or nobody asked
    frontier_order     the begin order of that turn, 0 before any: an earlier one that ends later
                       is late
    next_check_s, queued_s   when the table looks at it next; the instant it waits under, no later,
                             None while it waits under none
    """

    session_id: SessionId
    generation: int
    version: int = 0
    tokens: int = 0
    sealed: int = 0
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
    pin: Receipt | None = None

    @property
    def node(self) -> Node | None:
        """The interval in which the frontier stands, if anything of the session is resident."""
        return self.stop.node if self.stop is not None else None

    @property
    def depth(self) -> int:
        """So many blocks of what the session committed are resident."""
        return self.stop.depth if self.stop is not None else 0


Key = tuple[float, ...]
"""An eviction policy's order: the lowest goes first."""


class ResumeDepth(msgspec.Struct, eq=False):
    """A resume depth is one at which somebody may go on: heat for eviction, sessions, point state.

    `refs` counts the sessions whose soft reference is alive; `anchors` holds all whose frontier is
    here. `slots` is None, or has an entry a point component: None for one that is not resident.
    `queued` is the key under which the evictor has each of them waiting. `holds` counts open
    spills, `trimmed` the blocks lost behind it.
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

    def absorb(self, other: ResumeDepth) -> None:
        """Take over heat and sessions of a stop that slid down to this depth."""
        self.last_s = max(self.last_s, other.last_s)
        self.uses = max(self.uses, other.uses)
        self.priority = max(self.priority, other.priority)
        self.inflation = max(self.inflation, other.inflation)
        self.trimmed = max(self.trimmed, other.trimmed)
        self.refs += other.refs
        if other.anchors:
            if self.anchors:
                self.anchors.update(other.anchors)  # in place: there may be thousands
            else:
                self.anchors = other.anchors
            for session in other.anchors.values():
                session.stop = self

    @property
    def is_complete(self) -> bool:
        """Whether all point components are resident."""
        return self.slots is not None and None not in self.slots

    def point_slots(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the slots of the point components `names` that are resident here, by name."""
        held = zip(names, self.slots or (), strict=self.slots is not None)
        return {name: slot for name, slot in held if slot is not None}

    @property
    def is_bare(self) -> bool:
        return self.slots is None and not self.anchors


class Node(msgspec.Struct, eq=False):
    """An interval of blocks under one parent, with branches hanging at depths inside it."""

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
        return self.start + len(self.blocks)

    @property
    def floor(self) -> int:
        """Below this depth nothing may be trimmed: a lock or a branch needs it."""
        return self.pinned if self.pinned > self.branch_top else self.branch_top


class Receipt(msgspec.Struct, eq=False):
    """A hard lock on the path from the root to `depth`. Single use (invariant 5)."""

    node: Node
    depth: int
    is_spent: bool = False

    def spend(self) -> None:
        """Mark as used; raises InvariantViolated the second time."""
        if self.is_spent:
            raise InvariantViolated("invariant 5: a lock receipt was released twice")
        self.is_spent = True
