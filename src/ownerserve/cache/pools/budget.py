"""A budget says how many slots each pool gets of the KV memory. Arithmetic only.

    |- state blocks -|---- point slots ----|------------ range blocks ------------|
     max_running     at most POINT_SHARE    what is left
                     of rest: the border moves (pools/border.py)

Each pool has one slot more than the cache knows: the zero slot that padding reads.
"""

from __future__ import annotations

import msgspec

from ownerserve.cache.layout import Layout
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.specs import Coverage
from ownerserve.kv.units import format_bytes

POINT_SHARE = 0.25
"""What point state may have of an arena, and has at first: an agent's turn adds a median of 758
tokens and leaves up to three snapshots; a snapshot is worth about 100 (tiny) to 1,000 (V4-Pro)
tokens of range state."""

LEAST_SHARE = 1 / 16
"""What point state keeps of that, however dear blocks are."""

ZERO_SLOTS = 1


class PoolSizes(msgspec.Struct, frozen=True):
    """PoolSizes holds the slots by component, and the state blocks. Of their point slots all but
    `least_points` may give way to range blocks; None: the pools are as they are.
    """

    slots: dict[str, int]
    state_slots: int
    least_points: int | None = None
    most_blocks: int = 0


def share_memory(layout: Layout, kv_bytes: int, *, max_running: int) -> PoolSizes:
    """Share `kv_bytes` among the pools. Raises InvalidInput when `kv_bytes` can't hold a few blocks
    beside the running states."""
    block_bytes = _slot_bytes(layout, Coverage.RANGE)
    point_bytes = _slot_bytes(layout, Coverage.POINT)
    states = (max_running + ZERO_SLOTS) * layout.state_bytes
    zeros = ZERO_SLOTS * (block_bytes + point_bytes)
    left = kv_bytes - states - zeros
    points = int(max(left, 0) * POINT_SHARE) // point_bytes if point_bytes else 0
    blocks = (left - points * point_bytes) // block_bytes
    wanted = max_running + ZERO_SLOTS
    if blocks < wanted or (point_bytes and points < 1):
        least = states + zeros + int(wanted * max(block_bytes, point_bytes) / POINT_SHARE)
        raise InvalidInput(
            "kv-memory",
            f"{format_bytes(kv_bytes)} is too small for {max_running} running sequences",
            f"give at least {format_bytes(least)} or lower --max-running",
        )
    count = {Coverage.RANGE: blocks, Coverage.POINT: points}
    least = max(1, int(points * LEAST_SHARE)) if points else 0
    most = (left - least * point_bytes) // block_bytes
    slots = {c.name: count[c.coverage] for c in layout.components}
    return PoolSizes(slots, max_running, least, most)


def _slot_bytes(layout: Layout, coverage: Coverage) -> int:
    return sum(c.slot_bytes for c in layout.components if c.coverage is coverage)
