"""Combined keys and values: (blocks, tokens, 2, heads, dim), an array for each layer."""

from __future__ import annotations

from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.arrays import Pool


def region(pool: Pool) -> Region:
    """Return the region of a pool with a token's keys beside its values."""
    layers, _, heads, dim = pool.part.shape
    array = pool.array(
        layer=layers, block=pool.blocks, token=pool.block_tokens, part=2, head=heads, dim=dim
    )
    return pool.region(array.lanes(("token", "head", "dim")), array.bytes)
