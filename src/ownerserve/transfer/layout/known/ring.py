"""A window in paged blocks: (blocks, tokens, heads, keys | values) for each layer, of which a point
holds the last W - 1 tokens, wherever in a block they begin.

    frame    a ring: the token of position p in row p mod (W - 1)
    block    of the region: one token's row, number block * tokens + place in the block
"""

from __future__ import annotations

from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.arrays import Pool


def region(pool: Pool) -> Region:
    """Return the region of a pool of `blocks` rows of one token each."""
    layers, _, heads, dim = pool.part.shape
    rows = pool.array(layer=layers, block=pool.blocks, token=1, head=heads, part=2, dim=dim)
    return pool.region(rows.lanes(("token", "head", "dim")), rows.bytes)
