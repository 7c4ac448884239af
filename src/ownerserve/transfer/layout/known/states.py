"""State that every token overwrites, in pages: (blocks, state) for each layer, a block padded to
what its kernel wants. A convolution's columns as the frame has them; recurrent state with its last
two axes turned, as kernels of gated delta nets have it.

Only a state that was sealed as a point moves: what a running sequence has is another one at its
next token. Columns and state that share a page are two pools, each from its own address on.
"""

from __future__ import annotations

import math

from ownerserve.kv.frame import RECURRENT
from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.arrays import Pool, PoolArray


def region(pool: Pool) -> Region:
    """Return the region of a pool whose components' pages stand apart."""
    size = math.prod(pool.part.shape[1:]) * pool.item_bytes
    return in_page(pool, pool.padded(size))


def in_page(pool: Pool, stride: int) -> Region:
    """Return the region of a pool whose blocks are `stride` bytes apart."""
    layers, *shape = pool.part.shape
    axes = [f"axis{number}" for number in range(len(shape))]
    order = [*axes[:-2], axes[-1], axes[-2]] if pool.section.name == RECURRENT else axes
    inside, behind = dict[str, int](), pool.item_bytes
    for axis in reversed(order):
        inside[axis] = behind
        behind *= shape[axes.index(axis)]
    array = PoolArray(
        pool.address,
        ("layer", "block", *axes),
        (layers, pool.blocks, *shape),
        pool.item_bytes,
        (pool.blocks * stride, stride, *(inside[axis] for axis in axes)),
    )
    return pool.region(array.lanes(axes), (layers * pool.blocks - 1) * stride + behind)
