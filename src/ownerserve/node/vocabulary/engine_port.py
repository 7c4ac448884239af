"""The engine port is what a node needs of an engine, and the only thing that it knows about one.

abilities                    what the planner may offer
read_slots, write_slots      slots as bytes, between two steps
apply                        room for range blocks that points have given up
regions                      where slots lie, for movers
watch_layers, layers_done    how far the forward under way is, layer by layer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from ownerserve.cache.effects import MoveBorder
from ownerserve.kv.ids import TurnId
from ownerserve.kv.regions import Region
from ownerserve.plan.inputs import Abilities


class LayerProgress(msgspec.Struct, frozen=True, gc=False):
    """A layer progress is how far a turn's last forward is: of its tokens [start, end) the state in
    the first `layers[component]` layers of each range component lies in their slots, and stays as
    it is for as long as somebody keeps those (cache.lends)."""

    start: int
    end: int
    layers: Mapping[str, int]


LayersTold = Callable[[LayerProgress], None]
"""Called on the engine's thread within a forward: it must neither block nor raise."""


class EnginePort(Protocol):
    """An `EnginePort` is what a node needs of an engine, and the only thing it knows about one.

    Called between two steps, on the thread that owns the cache, but for `layers_done`. `abilities`
    says what the engine can do; the planner offers nothing else, and nothing in the node asks which
    engine it is. Slots are indices into a component's pool, as the cache hands them out.
    """

    @property
    def abilities(self) -> Abilities:
        """`abilities` are what the engine can do for a restore."""
        ...

    def read_slots(self, component: str, slots: Sequence[int]) -> memoryview:
        """Return the bytes of `slots`, one after another: a copy that no later step changes."""
        ...

    def write_slots(self, component: str, slots: Sequence[int], data: memoryview) -> None:
        """Write `data`, as `read_slots` gives it, into `slots`. Raises SpecMismatch when `data` has
        another length."""
        ...

    def apply(self, effects: Sequence[MoveBorder]) -> None:
        """Move the border between range blocks and point slots, and what lies beyond it."""
        ...

    def regions(self) -> tuple[Region, ...]:
        """Return where the slots of each component lie, a slot a block, in memory that this host's
        processes can read; none where the engine's memory is no such.

        The same tuple until something of it changes. Addresses stay for the engine's life; what a
        slot holds is somebody's only under a ticket (cache.lends) or a reservation (cache.ingest).
        """
        ...

    def watch_layers(self, turn_id: TurnId, told: LayersTold) -> None:
        """Have `told` called whenever layers of a forward of the turn are done, from its next
        forward on; in place of who was told before."""
        ...

    def unwatch_layers(self, turn_id: TurnId) -> None:
        """End that, and forget the turn's progress; no error where nobody watches."""
        ...

    def layers_done(self, turn_id: TurnId) -> LayerProgress | None:
        """Return how far the last forward of a turn that is watched is; None before its first. Any
        thread may ask."""
        ...
