"""Keys in tiles, as vLLM's CPU kernels have them: (blocks, heads, 2, tokens * dim) for each layer;
values as [tokens, dim], keys as [tiles, dim, rows], a tile of `ROWS` tokens."""

from __future__ import annotations

import math

from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.arrays import Pool, PoolArray

ROWS = 32


def region(pool: Pool) -> Region:
    """Return the region of a pool whose keys are turned; a block of no whole tiles is one tile
    as long as divides it."""
    layers, _, heads, dim = pool.part.shape
    tokens = pool.block_tokens
    rows = math.gcd(tokens, ROWS)
    whole = pool.array(layer=layers, block=pool.blocks, head=heads, part=2, item=tokens * dim)
    outer, half = whole.steps()[:3], whole.steps()[3]
    item = pool.item_bytes
    keys = PoolArray(
        pool.address,
        ("layer", "block", "head", "tile", "dim", "row"),
        (layers, pool.blocks, heads, tokens // rows, dim, rows),
        item,
        (*outer, rows * dim * item, rows * item, item),
    )
    values = PoolArray(
        pool.address + half,
        ("layer", "block", "head", "token", "dim"),
        (layers, pool.blocks, heads, tokens, dim),
        item,
        (*outer, dim * item, item),
    )
    lanes = (
        *keys.lanes(("tile", "row", "head", "dim")),
        *values.lanes(("token", "head", "dim")),
    )
    return pool.region(lanes, whole.bytes)
