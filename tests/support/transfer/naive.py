"""Where layouts have one item, written from their descriptions item by item; shares nothing with
what is tested."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from ownerserve.kv.frame import ITEM_BYTES, RECURRENT
from ownerserve.transfer.layout.arrays import Pool

Item = tuple[int, ...]
Where = Callable[[Pool, int, int, int, Item], int]
"""The byte at which an item lies, from the pool's address: of a part, layer and block, by its place
in the block along the frame's axes."""


def combined(pool: Pool, part: int, layer: int, block: int, item: Item) -> int:
    (_, _, heads, dim), (token, head, at) = pool.part.shape, item
    line = ((layer * pool.blocks + block) * pool.block_tokens + token) * 2 + part
    return ((line * heads + head) * dim + at) * pool.item_bytes


def split(pool: Pool, part: int, layer: int, block: int, item: Item) -> int:
    (_, _, heads, dim), (token, head, at) = pool.part.shape, item
    line = ((layer * 2 + part) * pool.blocks + block) * pool.block_tokens + token
    return ((line * heads + head) * dim + at) * pool.item_bytes


def interleaved(pool: Pool, part: int, layer: int, block: int, item: Item) -> int:
    (_, _, heads, dim), (token, head, at) = pool.part.shape, item
    line = ((layer * pool.blocks + block) * pool.block_tokens + token) * heads + head
    return (line * 2 * dim + part * dim + at) * pool.item_bytes


def headwise(pool: Pool, part: int, layer: int, block: int, item: Item) -> int:
    (_, _, heads, dim), (token, head, at) = pool.part.shape, item
    line = ((layer * pool.blocks + block) * heads + head) * pool.block_tokens + token
    return (line * 2 * dim + part * dim + at) * pool.item_bytes


def tiled(pool: Pool, part: int, layer: int, block: int, item: Item) -> int:
    (_, _, heads, dim), (token, head, at) = pool.part.shape, item
    tokens = pool.block_tokens
    half = (((layer * pool.blocks + block) * heads + head) * 2 + part) * tokens * dim
    rows = math.gcd(tokens, 32)
    turned = token // rows * rows * dim + at * rows + token % rows
    return (half + (token * dim + at if part else turned)) * pool.item_bytes


def paged_rows(pool: Pool, part: int, layer: int, block: int, item: Item) -> int:
    sizes = [
        pool.block_tokens * math.prod(one.shape[2:]) * ITEM_BYTES[one.dtype]
        for one in pool.section.parts
    ]
    page = -(-sum(sizes) // pool.align_bytes) * pool.align_bytes
    own = pool.section.parts[part]
    inside = 0
    for place, count in zip(item, (pool.block_tokens, *own.shape[2:]), strict=True):
        inside = inside * count + place
    at = (layer * pool.blocks + block) * page + sum(sizes[:part])
    return at + inside * ITEM_BYTES[own.dtype]


def slots(pool: Pool, part: int, layer: int, block: int, item: Item) -> int:
    slot = -(-pool.section.unit_bytes // pool.align_bytes) * pool.align_bytes
    own, at = pool.section.parts[part], block * slot
    for before in pool.section.parts[:part]:
        at += -(-before.payload_bytes // 16) * 16
    inside = layer
    for place, count in zip(item, own.shape[1:], strict=True):
        inside = inside * count + place
    return at + inside * ITEM_BYTES[own.dtype]


def ring(pool: Pool, part: int, layer: int, block: int, item: Item) -> int:
    (_, _, heads, dim), (_, head, at) = pool.part.shape, item
    return (
        (((layer * pool.blocks + block) * heads + head) * 2 + part) * dim + at
    ) * pool.item_bytes


def states(pool: Pool, part: int, layer: int, block: int, item: Item) -> int:
    shape, size = pool.part.shape[1:], pool.part.payload_bytes // pool.part.shape[0]
    page = -(-size // pool.align_bytes) * pool.align_bytes
    if pool.section.name == RECURRENT:
        *first, key, value = item
        *counts, keys, values = shape
        item, shape = (*first, value, key), (*counts, values, keys)
    inside = 0
    for place, count in zip(item, shape, strict=True):
        inside = inside * count + place
    return (layer * pool.blocks + block) * page + inside * pool.item_bytes


WHERE: dict[str, Where] = {
    "combined": combined,
    "headwise": headwise,
    "interleaved": interleaved,
    "paged_rows": paged_rows,
    "ring": ring,
    "slots": slots,
    "split": split,
    "states": states,
    "tiled": tiled,
}


def items(
    layout: str, pool: Pool, ids: Sequence[int], unit: int, part: int, layer: int
) -> Iterator[int]:
    """Yield where each item of a part of a layer of a unit begins, from the pool's address, in the
    frame's order. `ids`: the artifact's blocks."""
    rows, *inner = pool.section.parts[part].shape[1:]
    is_slot = layout in ("slots", "states")
    step = rows if is_slot else 1 if layout == "ring" else pool.block_tokens
    for row in range(rows):
        block = ids[unit * (rows // step) + row // step]
        for rest in itertools.product(*map(range, inner)):
            yield WHERE[layout](pool, part, layer, block, (row % step, *rest))
