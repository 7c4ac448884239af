"""What the cache counted. `Counters` only rise; `Snapshot` is a dated copy with the levels."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from ownerserve.cache.tails import Tail
from ownerserve.cache.tree import paths
from ownerserve.kv.specs import Coverage

if TYPE_CHECKING:
    from ownerserve.cache.hetero import HeteroCache


class Lost(StrEnum):
    """Why a restorable point is one no more."""

    RANGE_EVICTED = "range_evicted"
    POINT_EVICTED = "point_evicted"
    SUPERSEDED = "superseded"
    NO_ROOM = "no_room"


class Counters(msgspec.Struct):
    """Sums since the start. Evicted tokens and bytes are those of range blocks."""

    turns_begun: int = 0
    turns_refused: int = 0
    turns_finished: int = 0
    turns_aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reprefilled_tokens: int = 0
    """Tokens a known session had computed before and must compute again."""
    evictions: int = 0
    evicted_tokens: int = 0
    evicted_bytes: int = 0
    wanted_tokens: int = 0
    """What those evictions were asked for; evicted minus wanted is waste, here always none."""
    largest_eviction_tokens: int = 0
    duplicate_blocks: int = 0
    no_room: int = 0
    quarantined: int = 0
    points_lost: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Lost, 0))
    evicted_points: dict[str, int] = msgspec.field(default_factory=dict)
    """Slots of each point component that were evicted; superseded ones are not among them."""
    relief_runs: int = 0
    """Times that a watermark was crossed and the pressure engine freed or spilled something."""
    spilled_points: int = 0
    """Boundaries whose point state was copied below for the room it takes."""
    failed_spills: int = 0
    """Spills, each of several boundaries, that came to nothing."""


class PoolLevel(msgspec.Struct, frozen=True):
    """Where a pool's slots are: the last six sum to `capacity` (invariant 1).

    reserved   for an arrival from outside that is not committed yet
    private    a running turn's own: reserved or written, not sealed
    held       of an arrival that was given up, until its writer is proven quiet
    protected  in the tree, under a lock or an open spill
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
    """Bytes that hold nothing, by component.

    Internal: in used slots, alignment padding, the unfilled part of unsealed blocks, and by tail
    the rows of state blocks in which no token waits. External:
    in free point slots that no snapshot can use, because another point component has run out.
    Slots of one pool are equal, so there is no other.
    """

    internal_bytes: dict[str, int]
    external_bytes: dict[str, int]


class Snapshot(msgspec.Struct, frozen=True):
    """One dated copy of everything countable.

    `cached_tokens` are the tokens whose range state the tree holds, `restorable_points` the stops
    that lack nothing, `partial_points` those that lack a component. `tail_tokens` are those of all
    running turns that wait, by tail, for their window to close.
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


def snapshot(cache: HeteroCache, now: float) -> Snapshot:
    """Count and copy. O(stops in the tree)."""
    layout = cache.layout
    stops = [
        stop
        for node in paths.nodes(cache.tree.root)
        for stop in node.stops
        if stop.slots is not None
    ]
    complete = sum(stop.is_complete for stop in stops)
    protected = [0] * len(layout.point_names)
    for stop in stops:
        for index, slot in enumerate(stop.slots or ()):
            protected[index] += slot >= 0 and stop.holds > 0
    cached = cache.tree.blocks * layout.block_tokens
    return Snapshot(
        as_of_s=now,
        counters=msgspec.structs.replace(
            cache.counters,
            points_lost=dict(cache.counters.points_lost),
            evicted_points=dict(cache.counters.evicted_points),
        ),
        pools=_levels(cache, protected),
        cached_tokens=dict.fromkeys(layout.range_names, cached),
        restorable_points=complete,
        partial_points=len(stops) - complete,
        sessions=len(cache.sessions),
        running=len(cache.running),
        fragmentation=_fragmentation(cache),
        tail_tokens={tail.name: sum(_waiting(cache, tail)) for tail in layout.tails},
    )


def _levels(cache: HeteroCache, protected_points: list[int]) -> dict[str, PoolLevel]:
    rooms, tree = cache.rooms, cache.tree
    reserved, held = cache.ingest.counts()
    blocks = PoolLevel(
        capacity=rooms.blocks.capacity,
        free=rooms.blocks.free,
        reserved=reserved,
        private=sum(len(run.row) - run.sealed for run in cache.running.values()),
        held=held,
        protected=tree.protected,
        evictable=rooms.evictable_blocks(),
    )
    levels = dict.fromkeys(cache.layout.range_names, blocks)
    reserved, held = cache.ingest.point_counts()
    for pool, protected in zip(rooms.points, protected_points, strict=True):
        levels[pool.name] = PoolLevel(
            capacity=pool.capacity,
            free=pool.free,
            reserved=reserved,
            held=held,
            protected=protected,
            evictable=pool.used - reserved - held - protected,
        )
    states = rooms.states
    levels[states.name] = PoolLevel(states.capacity, states.free, private=states.used)
    return levels


def _waiting(cache: HeteroCache, tail: Tail) -> list[int]:
    """Tokens that wait in `tail`, by running turn."""
    return [run.table.tails.waiting[tail.name] for run in cache.running.values()]


def _fragmentation(cache: HeteroCache) -> Fragmentation:
    rooms, block = cache.rooms, cache.layout.block_tokens
    used = {pool.name: pool.used for pool in rooms.points}
    usable = min((pool.free for pool in rooms.points), default=0)
    unfilled = sum(
        len(run.row) * block - max(run.position, run.sealed * block)
        for run in cache.running.values()
    )
    internal, external = {}, {}
    for component in cache.layout.components:
        padding = component.slot_bytes - component.payload_bytes
        slots = used.get(component.name, rooms.blocks.used)
        internal[component.name] = slots * padding
        if component.coverage is Coverage.RANGE:
            internal[component.name] += unfilled * component.payload_bytes // block
    for tail in cache.layout.tails:
        internal[tail.name] = sum(
            tail.slot_bytes - tail.rows_held(waiting) * tail.row_bytes
            for waiting in _waiting(cache, tail)
        )
    for pool in rooms.points:
        size = next(c.slot_bytes for c in cache.layout.components if c.name == pool.name)
        external[pool.name] = (pool.free - usable) * size
    return Fragmentation(internal, external)
