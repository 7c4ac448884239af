"""A snapshot is a dated copy of all that a cache has counted, with the levels of its pools."""

from __future__ import annotations

import msgspec

from ownerserve.cache.counters import Counters
from ownerserve.cache.hetero import HeteroCache, parts_of
from ownerserve.cache.ingest import HoldLevel
from ownerserve.cache.layout import Tail
from ownerserve.cache.parts import Parts
from ownerserve.cache.tree import prefix_tree
from ownerserve.kv.specs import Coverage


class PoolLevel(msgspec.Struct, frozen=True):
    """A pool's level says where its slots are: the last six sum to `capacity` (invariant 1).

    reserved   for an arrival from outside that is not committed yet
    private    a running turn's own: reserved or written, not sealed
    held       of an arrival that was given up, until its writer is proven quiet; of a turn that
               gave it back, until who reads it is done
    protected  in the tree, under a lock or a lend
    evictable  in the tree, free to go
    """

    capacity: int
    free: int
    reserved: int = 0
    private: int = 0
    held: int = 0
    protected: int = 0
    evictable: int = 0


class Fragmentation(msgspec.Struct, frozen=True):
    """Fragmentation is the bytes that hold nothing, by component.

    Internal: in used slots, alignment padding, the unfilled part of unsealed blocks, and by tail
    the rows of state blocks in which no token waits. External:
    in free point slots that no snapshot can use, because another point component has run out.
    Slots of one pool are equal, so there is no other.
    """

    internal_bytes: dict[str, int]
    external_bytes: dict[str, int]


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot is one dated copy of everything countable.

    `cached_tokens` are the tokens whose range state the tree holds, `restorable_points` the stops
    that lack nothing, `partial_points` those that lack a component. `tail_tokens` are those of all
    running turns that wait, by tail, for their window to close. `holds` are arrivals that were
    given up and whose slots wait for their writer, by its kind.
    """

    as_of_s: float
    counters: Counters
    pools: dict[str, PoolLevel]
    cached_tokens: dict[str, int]
    restorable_points: int
    partial_points: int
    sessions: int
    running: int
    fragmentation: Fragmentation
    tail_tokens: dict[str, int]
    holds: dict[str, HoldLevel]


def snapshot(cache: HeteroCache, now: float) -> Snapshot:
    """Count and copy; `now` is on the cache's clock. O(stops in the tree)."""
    parts = parts_of(cache)
    layout = parts.layout
    stops = [
        stop
        for node in prefix_tree.nodes(parts.tree.root)
        for stop in node.stops
        if stop.slots is not None
    ]
    complete = sum(stop.is_complete for stop in stops)
    protected = [0] * len(layout.point_names)
    for stop in stops:
        for index, slot in enumerate(stop.slots or ()):
            protected[index] += slot is not None and stop.holds > 0
    cached = parts.tree.blocks * layout.block_tokens
    return Snapshot(
        as_of_s=now,
        counters=msgspec.structs.replace(
            parts.counters,
            points_lost=dict(parts.counters.points_lost),
            evicted_points=dict(parts.counters.evicted_points),
        ),
        pools=_levels(parts, protected),
        cached_tokens=dict.fromkeys(layout.range_names, cached),
        restorable_points=complete,
        partial_points=len(stops) - complete,
        sessions=sum(bool(one.version or one.running) for one in parts.sessions),
        running=len(parts.running),
        fragmentation=_fragmentation(parts),
        tail_tokens={tail.name: sum(_waiting(parts, tail)) for tail in layout.tails},
        holds={kind.value: level for kind, level in parts.ingest.holds(now).items()},
    )


def _levels(parts: Parts, protected_points: list[int]) -> dict[str, PoolLevel]:
    pools, tree = parts.pools, parts.tree
    reserved, held = parts.ingest.counts()
    blocks = PoolLevel(
        capacity=pools.blocks.capacity,
        free=pools.blocks.free,
        reserved=reserved,
        private=sum(len(run.row) - run.sealed for run in parts.running.values()),
        held=held + len(parts.lends.withheld()),
        protected=tree.protected,
        evictable=pools.evictable_blocks(),
    )
    levels = dict.fromkeys(parts.layout.range_names, blocks)
    reserved, held = parts.ingest.point_counts()
    for pool, protected in zip(pools.points, protected_points, strict=True):
        levels[pool.name] = PoolLevel(
            capacity=pool.capacity,
            free=pool.free,
            reserved=reserved,
            held=held,
            protected=protected,
            evictable=pool.used - reserved - held - protected,
        )
    states = pools.states
    levels[states.name] = PoolLevel(states.capacity, states.free, private=states.used)
    return levels


def _waiting(parts: Parts, tail: Tail) -> list[int]:
    """List the tokens that wait in `tail`, by running turn."""
    return [run.table.tails.waiting[tail.name] for run in parts.running.values()]


def _fragmentation(parts: Parts) -> Fragmentation:
    pools, block = parts.pools, parts.layout.block_tokens
    used = {pool.name: pool.used for pool in pools.points}
    usable = min((pool.free for pool in pools.points), default=0)
    unfilled = sum(
        len(run.row) * block - max(run.position, run.sealed * block)
        for run in parts.running.values()
    )
    internal, external = {}, {}
    for component in parts.layout.components:
        padding = component.slot_bytes - component.payload_bytes
        slots = used.get(component.name, pools.blocks.used)
        internal[component.name] = slots * padding
        if component.coverage is Coverage.RANGE:
            internal[component.name] += unfilled * component.payload_bytes // block
    for tail in parts.layout.tails:
        internal[tail.name] = sum(
            tail.slot_bytes - tail.rows_held(waiting) * tail.row_bytes
            for waiting in _waiting(parts, tail)
        )
    for pool in pools.points:
        size = next(c.slot_bytes for c in parts.layout.components if c.name == pool.name)
        external[pool.name] = (pool.free - usable) * size
    return Fragmentation(internal, external)
