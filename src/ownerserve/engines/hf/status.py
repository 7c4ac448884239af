"""What a worker says about itself, dated. Read from the cache and the scheduler; owns nothing."""

from __future__ import annotations

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.engines.hf.step import Load


class PoolUse(msgspec.Struct, frozen=True):
    """Slots of one pool. `free` ones are unused now; more can be evicted."""

    capacity: int
    free: int


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One dated copy. `as_of_s` is wall-clock time; `incarnation` grows with every start."""

    as_of_s: float
    incarnation: int
    model: str
    block_tokens: int
    sequence_tokens: int
    waiting: int
    running: int
    pending_prefill_tokens: int
    sessions: int
    free_slots: dict[str, int]
    slots: dict[str, int]
    slot_bytes: dict[str, int]
    evictable_blocks: int
    kv_bytes_free: int
    """Of range blocks: free or evictable."""
    kv_bytes_total: int
    steps: int


class Identity(msgspec.Struct, frozen=True):
    """What of the status does not change in a worker's life."""

    model: str
    incarnation: int
    sequence_tokens: int


def pool_uses(cache: HeteroCache) -> dict[str, PoolUse]:
    """Every pool by component name, and the state blocks. O(components)."""
    rooms = cache.rooms
    blocks = PoolUse(rooms.blocks.capacity, rooms.blocks.free)
    uses = dict.fromkeys(cache.layout.range_names, blocks)
    for pool in (*rooms.points, rooms.states):
        uses[pool.name] = PoolUse(pool.capacity, pool.free)
    return uses


def slot_bytes(cache: HeteroCache) -> dict[str, int]:
    """What one slot of each pool occupies."""
    sizes = {component.name: component.slot_bytes for component in cache.layout.components}
    return {**sizes, cache.rooms.states.name: cache.layout.state_bytes}


def worker_status(
    identity: Identity, cache: HeteroCache, *, load: Load, steps: int, as_of_s: float
) -> WorkerStatus:
    uses, sizes = pool_uses(cache), slot_bytes(cache)
    block_bytes = sum(sizes[name] for name in cache.layout.range_names)
    evictable_blocks = cache.rooms.evictable_blocks()
    return WorkerStatus(
        as_of_s=as_of_s,
        incarnation=identity.incarnation,
        model=identity.model,
        block_tokens=cache.layout.block_tokens,
        sequence_tokens=identity.sequence_tokens,
        waiting=load.waiting,
        running=load.running,
        pending_prefill_tokens=load.pending_prefill_tokens,
        sessions=len(cache.sessions),
        free_slots={name: use.free for name, use in uses.items()},
        slots={name: use.capacity for name, use in uses.items()},
        slot_bytes=sizes,
        evictable_blocks=evictable_blocks,
        kv_bytes_free=(cache.rooms.blocks.free + evictable_blocks) * block_bytes,
        kv_bytes_total=cache.rooms.blocks.capacity * block_bytes,
        steps=steps,
    )
