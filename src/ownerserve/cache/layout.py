"""What a cache holds: components, their slot sizes, and the block length B.

    range component   one slot = the entries of one block of B tokens, in all layers that keep it
    point component   one slot = what is needed to go on at one boundary, in all layers that keep it
    state block       one slot = the live form of every point component of one running sequence,
                      and its tails: tokens that wait for their window of m to close

Made from a model's geometry by the engine; read by pools, tree and reports.
"""

from __future__ import annotations

import msgspec

from ownerserve.cache.tails import Tail
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.prefix import TOKEN_BYTES
from ownerserve.kv.specs import Coverage


class Component(msgspec.Struct, frozen=True):
    """A component is one kind of state over all layers that keep it.

    `slot_bytes` is what a slot occupies, alignment padding included; `payload_bytes` what of it
    is information. Their ratio is the component's internal fragmentation.
    """

    name: str
    coverage: Coverage
    slot_bytes: int
    payload_bytes: int


class Layout(msgspec.Struct, frozen=True):
    """A layout is all components of a model at one block length; `state_bytes` is one live state
    block.

    Every tail's window divides the block, so at a boundary no tail holds anything.
    """

    block_tokens: int
    components: tuple[Component, ...]
    state_bytes: int = 0
    tails: tuple[Tail, ...] = ()

    def __post_init__(self) -> None:
        names = [component.name for component in self.components]
        names += [tail.name for tail in self.tails]
        if len(set(names)) != len(names):
            raise InvalidInput("components", f"repeated name in {names}", "name each one once")
        if self.block_tokens < 1:
            raise InvalidInput("block_tokens", f"{self.block_tokens}", "use 1 or more")
        for tail in self.tails:
            if self.block_tokens % tail.period:
                raise InvalidInput(
                    "block_tokens",
                    f"{self.block_tokens} cuts a window of {tail.name}",
                    f"use a multiple of {tail.period}",
                )

    @property
    def packed_block_bytes(self) -> int:
        """One block's tokens take so many bytes when packed (kv.prefix)."""
        return self.block_tokens * TOKEN_BYTES

    @property
    def range_names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.components if c.coverage is Coverage.RANGE)

    @property
    def point_names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.components if c.coverage is Coverage.POINT)

    def needed_at(self, position: int) -> tuple[str, ...]:
        """Parts of a state block without which nothing can go on at `position`: the point
        components, which include overlap rows, and each tail whose window is open there.
        """
        if not position:
            return ()
        open_tails = (tail.name for tail in self.tails if position % tail.period)
        return (*self.point_names, *open_tails)

    def boundary_at_or_before(self, position: int) -> int:
        """Return the last multiple of B that is <= `position`."""
        return position - position % self.block_tokens
