"""Effects are what the cache asks the engine to do. They are performed in order, before the next
forward.

Each effect is one run over all layers of a component; the engine turns it into gathers and
scatters on its tensors. Slots are indices into the component's pool.
"""

from __future__ import annotations

import msgspec


class LoadPoint(msgspec.Struct, frozen=True, tag=True):
    """Copy a snapshot's point slots (component -> slot) into a live state block."""

    slots: dict[str, int]
    state: int


class SavePoint(msgspec.Struct, frozen=True, tag=True):
    """Copy a live state block into a snapshot's point slots (component -> slot)."""

    state: int
    slots: dict[str, int]


class CopyBlock(msgspec.Struct, frozen=True, tag=True):
    """Copy one range block, every range component: component -> (source, target) slot."""

    slots: dict[str, tuple[int, int]]


class CopyState(msgspec.Struct, frozen=True, tag=True):
    """Copy one live state block to another (a fork)."""

    source: int
    target: int


class ResetState(msgspec.Struct, frozen=True, tag=True):
    """Make a state block that of an empty sequence."""

    state: int


class MoveBorder(msgspec.Struct, frozen=True, tag=True):
    """The range components have slots 0 to `blocks` - 1 from now on, the point components 0 to
    `points` - 1. First the bytes of every range component, and of each point component, move from
    slot to slot; what changes sides is zero then."""

    blocks: int
    points: int
    block_moves: tuple[tuple[int, int], ...] = ()
    point_moves: dict[str, tuple[tuple[int, int], ...]] = {}


Effect = LoadPoint | SavePoint | CopyBlock | CopyState | ResetState | MoveBorder
