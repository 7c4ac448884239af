"""Rows in pages: (blocks, rows, dim) for each layer, a block padded to what its kernel wants: an
MLA latent, compressed entries, an indexer's keys.

Compressed entries and those of their indexer are two components, each in blocks of its own, or, in
one page, each from its own address on: a block is `stride` bytes then.
"""

from __future__ import annotations

import math

from ownerserve.kv.frame import ITEM_BYTES, Lane
from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.arrays import Pool, PoolArray


def region(pool: Pool) -> Region:
    """Return the region of a pool whose components' pages stand apart."""
    return in_page(pool, pool.padded(page_bytes(pool)))


def page_bytes(pool: Pool) -> int:
    """Return the bytes of one layer's block, without padding, whose parts follow one another."""
    return sum(
        pool.block_tokens * math.prod(part.shape[2:]) * ITEM_BYTES[part.dtype]
        for part in pool.section.parts
    )


def in_page(pool: Pool, stride: int) -> Region:
    """Return the region of a pool whose blocks are `stride` bytes apart, and hold more than
    this component where that is more than it needs."""
    lanes, offset = list[tuple[Lane, ...]](), 0
    for part in pool.section.parts:
        layers, item = part.shape[0], ITEM_BYTES[part.dtype]
        row = math.prod(part.shape[2:]) * item
        array = PoolArray(
            pool.address + offset,
            ("layer", "block", "token", "dim"),
            (layers, pool.blocks, pool.block_tokens, row // item),
            item,
            (pool.blocks * stride, stride, row, item),
        )
        lanes += array.lanes(("token", "dim"))
        offset += pool.block_tokens * row
    size = (pool.section.layers * pool.blocks - 1) * stride + page_bytes(pool)
    return pool.region(tuple(lanes), size)
