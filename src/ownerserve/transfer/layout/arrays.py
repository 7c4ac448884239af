"""Arrays describe an engine's memory by the names of its axes; lanes follow from that.

    combined keys and values      layer block token part head dim
    the frame, of each part       token head dim                    of each layer and block

An axis that the frame has in one may be cut in two in memory, such as tokens in tiles and rows:
both parts then stand in the frame's order, the outer one first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ownerserve.kv.frame import ITEM_BYTES, Lane, PayloadPart, PayloadSection
from ownerserve.kv.regions import Region

LAYER, PART, BLOCK = "layer", "part", "block"
"""Axes that choose a lane, and the one from block to block; all others are inside a block."""


class PoolArray(msgspec.Struct, frozen=True):
    """A `PoolArray` is memory from `address` on with these `axes`, outermost first, so many of
    each, `item_bytes` the size of a scalar. `strides` in bytes; empty: C order, without gaps."""

    address: int
    axes: tuple[str, ...]
    counts: tuple[int, ...]
    item_bytes: int
    strides: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Return the bytes from the first item to the end of the last."""
        steps = zip(self.counts, self.steps(), strict=True)
        return self.item_bytes + sum((count - 1) * stride for count, stride in steps)

    def lanes(self, frame: Sequence[str]) -> tuple[tuple[Lane, ...], ...]:
        """Return lanes[part][layer]; `frame` names a block's axes in the frame's order."""
        step = dict(zip(self.axes, self.steps(), strict=True))
        count = dict(zip(self.axes, self.counts, strict=True))
        assert set(frame) | {LAYER, PART, BLOCK} >= set(self.axes), f"{self.axes} for {frame}"
        inside = tuple(count[axis] for axis in frame), tuple(step[axis] for axis in frame)
        return tuple(
            tuple(
                Lane(
                    self.address + part * step.get(PART, 0) + layer * step.get(LAYER, 0),
                    step[BLOCK],
                    *inside,
                    self.item_bytes,
                )
                for layer in range(count.get(LAYER, 1))
            )
            for part in range(count.get(PART, 1))
        )

    def steps(self) -> tuple[int, ...]:
        """Return the bytes from one to the next of each axis."""
        if self.strides:
            return self.strides
        behind = [math.prod(self.counts[at + 1 :]) for at in range(len(self.counts))]
        return tuple(self.item_bytes * items for items in behind)


class Pool(msgspec.Struct, frozen=True):
    """A `Pool` is what a layout is made for: `blocks` of `block_tokens` of a section's first axis,
    in memory from `address` on. `align_bytes`: what a kernel wants a layer's block (or a slot)
    rounded up to (kv.specs.StateSpec.align_bytes)."""

    section: PayloadSection
    blocks: int
    block_tokens: int
    address: int
    align_bytes: int = 1

    @property
    def part(self) -> PayloadPart:
        """Return the section's first part; in the layouts of attention all are like it."""
        return self.section.parts[0]

    @property
    def item_bytes(self) -> int:
        """Return the bytes of a scalar of the first part."""
        return ITEM_BYTES[self.part.dtype]

    def padded(self, size: int) -> int:
        """Return `size` rounded up to the kernel's alignment."""
        return -(-size // self.align_bytes) * self.align_bytes

    def array(self, **counts: int) -> PoolArray:
        """Return an array in C order from the pool's address on, given its axes in order."""
        return PoolArray(self.address, tuple(counts), tuple(counts.values()), self.item_bytes)

    def region(self, lanes: tuple[tuple[Lane, ...], ...], size: int) -> Region:
        """Return the pool's region: `size` bytes with these lanes."""
        return Region(self.section, lanes, self.blocks, self.address, size)
