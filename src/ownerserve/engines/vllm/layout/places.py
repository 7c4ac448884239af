"""This module finds where what the node speaks of lies in vLLM's blocks. Pure: block tables in,
places out.

A node's slot is a unit's number in the prefix, or a point's position; a place is blocks and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ownerserve.engines.vllm.layout.shape import StateShape
from ownerserve.engines.vllm.worker_commands import BlockPlace, Tables
from ownerserve.kv.frame import LEAD, WINDOW, WINDOW_PAGES
from ownerserve.node.vocabulary.events import Filling, StoreCopy

NOT_OURS = -1


class BlockPlaces:
    """`BlockPlaces` finds the places of one model's state in vLLM's blocks; the object holds no
    state of its own."""

    def __init__(self, shape: StateShape) -> None:
        self._shape = shape
        self._block = shape.payload.block_tokens
        self._points = shape.layout().point_names

    def source(self, tables: Tables, copy: StoreCopy) -> BlockPlace:
        """Return the place that a copy of the node reads from."""
        name = copy.component
        if name == LEAD:
            window = self._shape.payload.window_tokens - 1
            end = (copy.slots[-1] + 1) * self._block - window
            start = end - len(copy.slots) * self._block
            return self._shape.place(name, tables, start, end)
        if name in self._points:
            return self._shape.place(name, tables, *self._shape.span(name, copy.slots[0]))
        return self._range(name, tables, copy.slots)

    def point(self, tables: Tables, position: int) -> dict[str, BlockPlace]:
        """Return the places of the point at `position`, by component; empty when some block of it
        is gone."""
        places = {
            name: self._shape.place(name, tables, *self._shape.span(name, position))
            for name in self._points
        }
        return places if all(map(self._shape.is_there, places.values())) else {}

    def goal(self, tables: Tables, filling: Filling, *, hit: int, window_hit: int) -> BlockPlace:
        """Return the place where state from outside goes. What the engine had itself, up to `hit`
        and of windows up to `window_hit`, is shared with others that may be reading it: its blocks
        are marked as not to be written.

        A point that comes by the lead of another one has two places: what of that one's window is
        in its own, and the rows before."""
        name = filling.component
        if name == LEAD:
            position, led_to = filling.slots
            start, end = self._shape.span(WINDOW, position)
            parts = led_to - self._shape.payload.window_tokens + 1
            return self._shared(self._shape.place(name, tables, start, min(end, parts)), window_hit)
        if name in self._points:
            start, end = self._shape.span(name, filling.slots[0])
            start = max(start, self._shape.span(name, filling.slots[-1])[0])
            start = max(start, window_hit) if name in (WINDOW, WINDOW_PAGES) else start
            return self._shape.place(name, tables, start, end)
        return self._shared(self._range(name, tables, filling.slots), hit)

    def _shared(self, place: BlockPlace, hit: int) -> BlockPlace:
        """Return the place with the blocks before `hit` marked as not to be written."""
        if hit <= place.start:
            return place
        sizes = self._shape.components[place.component].block_tokens
        shared = [max(0, hit // size - place.start // size) for size in sizes]
        blocks = tuple(
            (*[NOT_OURS] * min(count, len(ids)), *ids[count:])
            for ids, count in zip(place.blocks, shared, strict=True)
        )
        return msgspec.structs.replace(place, blocks=blocks)

    def in_part(self, place: BlockPlace) -> set[int]:
        """Return the blocks that a window begins inside of. What stands before it is not its
        tokens' state, so nobody may take such a block for a whole one."""
        if place.component not in (WINDOW, LEAD):
            return set()
        sizes = self._shape.components[WINDOW].block_tokens
        firsts = {
            ids[0] for ids, size in zip(place.blocks, sizes, strict=True) if place.start % size
        }
        return firsts - {NOT_OURS}

    def is_there(self, place: BlockPlace) -> bool:
        """Return whether no block of the place is the null block."""
        return self._shape.is_there(place)

    def _range(self, name: str, tables: Tables, units: Sequence[int]) -> BlockPlace:
        start, end = units[0] * self._block, (units[-1] + 1) * self._block
        return self._shape.place(name, tables, start, end)
