"""EnginePort: what a node needs of an engine. The only thing it knows about one.

`abilities` says what the engine can do; the planner offers nothing else, and nothing in the node
asks which engine it is. Slots are indices into a component's pool, as the cache hands them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ownerserve.plan.inputs import Abilities


class EnginePort(Protocol):
    """Called between two steps, on the thread that owns the cache."""

    @property
    def abilities(self) -> Abilities: ...

    def read_slots(self, component: str, slots: Sequence[int]) -> memoryview:
        """The bytes of `slots`, one after another: a copy that no later step changes."""
        ...

    def write_slots(self, component: str, slots: Sequence[int], data: memoryview) -> None:
        """The inverse. Raises SpecMismatch when `data` has another length."""
        ...
