"""Heads outside of tokens: (blocks, heads, tokens, keys | values), an array for each layer; vLLM's
LBHNC."""

from __future__ import annotations

from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.arrays import Pool


def region(pool: Pool) -> Region:
    """Return the region of a pool whose blocks have one head's tokens after another's."""
    layers, _, heads, dim = pool.part.shape
    array = pool.array(
        layer=layers, block=pool.blocks, head=heads, token=pool.block_tokens, part=2, dim=dim
    )
    return pool.region(array.lanes(("token", "head", "dim")), array.bytes)
