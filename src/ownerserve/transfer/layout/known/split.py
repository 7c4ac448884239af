"""Split keys and values: (2, blocks, tokens, heads, dim), an array for each layer."""

from __future__ import annotations

from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.arrays import Pool


def region(pool: Pool) -> Region:
    """Return the region of a pool with all keys of a layer before all its values."""
    layers, _, heads, dim = pool.part.shape
    array = pool.array(
        layer=layers, part=2, block=pool.blocks, token=pool.block_tokens, head=heads, dim=dim
    )
    return pool.region(array.lanes(("token", "head", "dim")), array.bytes)
