"""The tree's parts: an interval of blocks, the stops inside it, a lock receipt.

        keys    |t0 t1 ..|........|........|........|      tokens as bytes, one block a cell
        blocks  [   17   |   18   |    4   |    9   ]      one slot number in every range pool
                start                              end     depths, in blocks from the root
                     stops:   ^ depth 2        ^ depth 4   heat, sessions, point state
                     branches:  at depth 2 -> another interval

Depth d lies behind d blocks. A stop or branch at d belongs to the interval with start < d <= end.
"""

from __future__ import annotations

import msgspec

from ownerserve.cache.session import Session
from ownerserve.kv.errors import InvariantViolated

Key = tuple[float, ...]
"""An eviction policy's order: the lowest goes first."""

ABSENT = -1
"""In `Stop.slots`: this point component is not resident here."""


class Stop(msgspec.Struct, eq=False):
    """A depth at which somebody may go on: heat for eviction, sessions, point state.

    `refs` counts the sessions whose soft reference is alive; `anchors` holds all whose frontier is
    here. `slots` has one entry a point component, or is None; `queued` the key under which the
    evictor has it waiting, alike. `holds` counts open spills, `trimmed` the blocks lost behind it.
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
    slots: list[int] | None = None
    holds: int = 0
    queued: list[Key | None] | None = None
    backed: tuple[str, ...] = ()
    is_cooled: bool = False

    def absorb(self, other: Stop) -> None:
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
        """All point components are resident."""
        return self.slots is not None and ABSENT not in self.slots

    @property
    def is_bare(self) -> bool:
        return self.slots is None and not self.anchors


class Node(msgspec.Struct, eq=False):
    """An interval of blocks under one parent, with branches hanging at depths inside it."""

    parent: Node | None
    start: int
    keys: bytearray
    blocks: list[int]
    stops: list[Stop] = []
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
