"""Interleaved keys and values: (blocks, tokens, heads, keys | values), an array for each layer;
vLLM's LBNHC, its default on a GPU."""

from __future__ import annotations

from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.arrays import Pool


def region(pool: Pool) -> Region:
    """Return the region of a pool with a head's keys beside its values, token by token."""
    layers, _, heads, dim = pool.part.shape
    array = pool.array(
        layer=layers, block=pool.blocks, token=pool.block_tokens, head=heads, part=2, dim=dim
    )
    return pool.region(array.lanes(("token", "head", "dim")), array.bytes)
