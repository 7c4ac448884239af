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


Effect = LoadPoint | SavePoint | CopyBlock | CopyState | ResetState
