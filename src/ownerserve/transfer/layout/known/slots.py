"""Slots as rows: (slots, parts, layers, ...), each slot a whole unit as the frame has it; the
reference engine's pools, and whatever is kept for a whole point: windows, columns, recurrent
state."""

from __future__ import annotations

import math

from ownerserve.kv.frame import ITEM_BYTES, Lane
from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.arrays import Pool


def region(pool: Pool) -> Region:
    """Return the region of a pool of slots; a block is a slot, whatever `block_tokens` says."""
    size = pool.padded(pool.section.unit_bytes)
    lanes = []
    for part, offsets in zip(pool.section.parts, pool.section.offsets(), strict=True):
        item, counts = ITEM_BYTES[part.dtype], part.shape[1:]
        strides = tuple(math.prod(counts[at + 1 :]) * item for at in range(len(counts)))
        lanes.append(tuple(Lane(pool.address + at, size, counts, strides, item) for at in offsets))
    return pool.region(tuple(lanes), pool.blocks * size)
