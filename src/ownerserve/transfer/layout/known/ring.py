"""A window in paged blocks: (blocks, tokens, heads, keys | values) for each layer, of which a point
holds the last W - 1 tokens, wherever in a block they begin.

    frame    a ring: the token of position p in row p mod (W - 1)
    block    of the region: one token's row, number block * tokens + place in the block
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.arrays import Pool


def region(pool: Pool) -> Region:
    """Return the region of a pool of `blocks` rows of one token each."""
    layers, _, heads, dim = pool.part.shape
    rows = pool.array(layer=layers, block=pool.blocks, token=1, head=heads, part=2, dim=dim)
    return pool.region(rows.lanes(("token", "head", "dim")), rows.bytes)


def rows_of(
    blocks: NDArray[np.int64], *, block_tokens: int, position: int, window_rows: int
) -> NDArray[np.int64]:
    """Return a point's rows, in the ring's order, as ids of the region's blocks: `blocks` are those
    of all tokens of the prefix that the point at `position` ends. Raises InvalidInput where it is
    shorter than the window: the frame has zeros there, which no memory holds."""
    if position < window_rows:
        problem = f"{position} tokens of {window_rows}"
        raise InvalidInput("position", problem, "let a shorter window be computed")
    tokens = np.arange(position - window_rows, position)
    tokens = tokens[np.argsort(tokens % window_rows)]
    found: NDArray[np.int64] = blocks[tokens // block_tokens] * block_tokens + (
        tokens % block_tokens
    )
    return found
