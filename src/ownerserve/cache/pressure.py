"""The policy engine says what to do before memory is short, in one aggregated directive a run.

Decides with watermarks whether to evict, spill, checkpoint or drop; the pools evict by themselves
when a turn needs slots at once. Owns the open spills, whose point state is lent until it is copied:
a slot that is re-used while it is being copied out would be stored as wrong bytes. A turn that
needs the room takes it from a spill too, whose ticket is over then: `reads` says so.

    free slots below `low`  ->  drop   superseded point state: no session stands there
                                spill  idle sessions' point state, when there is a tier for it
                                evict  range blocks and point state until `high` are free
    evictable too few       ->  checkpoint  the youngest turns, so that preempting them is cheap

What is being spilled counts as room to come: it is not evicted twice over. Whoever runs the cache
asks `is_due` after every step (O(pools)) and calls `relieve` when it says so. A run looks at the
`LOOK` entries of point state that would go next and at nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ownerserve.cache.counters import Counters, LossCause
from ownerserve.cache.lends import Lends
from ownerserve.cache.pools.evictor import Evictor
from ownerserve.cache.pools.slot_pools import SlotPool, SlotPools
from ownerserve.cache.sessions import Running
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import ResumeDepth
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import Packed

READ_S = 30.0
"""A spill of which nothing was read for so long is lent no more."""
LOOK = 256
"""Entries of point state, of each component, that one run looks at: those that would go next."""


class Watermarks(msgspec.Struct, frozen=True):
    """Watermarks are shares of a pool. Below `low` free, act until `high` are; `low` 0: only on
    demand.

    Point state of a session that was idle for `idle_s` is spilled first, at most `spills` stops a
    run, when `tier` names a place.
    """

    low: float = 0.02
    high: float = 0.05
    idle_s: float = 10.0
    spills: int = 32
    tier: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise InvalidInput(
                "watermarks", f"{self.low}, {self.high}", "use 0 <= low <= high <= 1"
            )


class SpilledPoint(msgspec.Struct, frozen=True):
    """A spilled point's slots are to be copied out: the state after the tokens `prefix`, for the
    sessions that stand there."""

    prefix: Packed
    slots: dict[str, int]
    sessions: tuple[SessionId, ...]


class Spill(msgspec.Struct, frozen=True, tag=True):
    """A spill is to be copied to `tier`; then call `spilled(ticket)` or `spill_failed(ticket)`."""

    ticket: int
    tier: str
    points: tuple[SpilledPoint, ...]


class EvictedState(msgspec.Struct, frozen=True, tag="Dropped"):
    """A run that evicted says how many range blocks and point slots that freed; nothing is asked
    for.
    """

    blocks: int
    points: int


class Checkpoint(msgspec.Struct, frozen=True, tag=True):
    """These turns are to be snapshotted at their next boundary: they are preempted first."""

    turns: tuple[TurnId, ...]


Directive = Spill | EvictedState | Checkpoint


class Pressure:
    """The policy engine watches the pools of one cache."""

    def __init__(
        self,
        pools: SlotPools,
        evictor: Evictor,
        running: Mapping[TurnId, Running],
        *,
        lends: Lends,
        counters: Counters,
    ) -> None:
        self._watermarks = Watermarks()
        self._pools = pools
        self._blocks, self._points = pools.blocks, pools.points
        self._evictor = evictor
        self._block_tokens = pools.layout.block_tokens
        self._running = running
        self._counters = counters
        self._lends = lends
        self.open_spills: dict[int, tuple[Packed, ...]] = {}
        """The prefixes of spills that wait for a report, by ticket."""
        # The levels at which the last run found nothing to free: until they change none will.
        self._stuck: tuple[int, ...] = ()
        self._spill_again = True

    @property
    def watermarks(self) -> Watermarks:
        """Return the watermarks in force; setting them has the next run look anew."""
        return self._watermarks

    @watermarks.setter
    def watermarks(self, marks: Watermarks) -> None:
        self._watermarks, self._stuck = marks, ()

    # -- whether -------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Tell whether `relieve` would find a pool short, and anything new to do about it."""
        low, blocks = self._watermarks.low, self._blocks
        is_short = blocks.free < low * blocks.capacity
        if self._points and not is_short:
            is_short = any(pool.free < low * pool.capacity for pool in self._points)
        return is_short and self._levels() != self._stuck

    @property
    def are_blocks_short(self) -> bool:
        """Tell whether the next run is to evict range blocks."""
        return self._is_short(self._pools.blocks)

    def _is_short(self, pool: SlotPool) -> bool:
        return pool.free < self.watermarks.low * pool.capacity

    def _levels(self) -> tuple[int, ...]:
        pools = self._pools
        free = [pool.free for pool in (pools.blocks, *pools.points)]
        return (*free, pools.evictable_blocks(), len(self.open_spills), len(self._running))

    # -- what ----------------------------------------------------------------------------------

    def relieve(self, now: float) -> tuple[Directive, ...]:
        """Act once: give at most one directive of each kind."""
        self._lends.expire(now)
        if not self.is_due:
            return ()
        directives: list[Directive] = []
        spill, points = self._relieve_points(now)
        if spill is not None:
            directives.append(spill)
        blocks = 0
        if self.are_blocks_short:
            short = self._missing(self._pools.blocks)
            blocks = min(short, self._pools.evictable_blocks())
            if blocks:
                self._pools.evict_blocks(blocks)
            if blocks < short and self._running:
                directives.append(self._checkpoint())
        if blocks or points:
            directives.append(EvictedState(blocks, points))
        has_acted = bool(blocks or points or spill)
        self._counters.relief_runs += has_acted
        self._stuck = () if has_acted else self._levels()
        return tuple(directives)

    def _missing(self, pool: SlotPool) -> int:
        """Count the slots to free, so that `high` of them are free."""
        return max(0, int(self.watermarks.high * pool.capacity) - pool.free)

    def _checkpoint(self) -> Checkpoint:
        youngest = sorted(self._running.values(), key=lambda run: -run.order)
        return Checkpoint(tuple(run.turn_id for run in youngest[: max(1, len(youngest) // 4)]))

    def _relieve_points(self, now: float) -> tuple[Spill | None, int]:
        """Make room in the point pools: return a spill, and how many stops or slots went at
        once."""
        pools = self._pools
        short_pools = [pool for pool in pools.points if self._is_short(pool)]
        if not short_pools:
            return None, 0
        near = self._evictor.next_points(LOOK)
        gone = self._drop_superseded(near)
        spill = None
        if self.watermarks.tier and self._spill_again:
            kept = [stop for stop in near if stop.is_complete and not stop.holds]
            ready = sum(self.watermarks.tier in stop.backed for stop in kept)
            wanted = max(map(self._missing, short_pools)) - ready - self._coming
            spill = self._spill(kept, min(wanted, self.watermarks.spills), now)
        self._spill_again = True
        for index, pool in enumerate(pools.points):
            if pool in short_pools:
                short = self._missing(pool) - self._coming
                gone += pools.evict_points(index, short) if short > 0 else 0
        return spill, gone

    @property
    def _coming(self) -> int:
        """Count the slots of each point pool that open spills will make easy to free."""
        return sum(map(len, self.open_spills.values()))

    def _drop_superseded(self, near: Iterable[ResumeDepth]) -> int:
        """Drop point state that can restore nothing, or that no session stands at while a later
        stop of the same interval has all of it. Returns how many stops lost theirs.
        """
        superseded = []
        for stop in near:
            newest = stop.node.stops[-1]
            passed = newest is not stop and newest.is_complete
            lonely = not stop.anchors and stop.uses <= 1 and passed
            branch = stop.depth in stop.node.branches or stop.depth in stop.node.pins
            if not stop.holds and not branch and (lonely or not stop.is_complete):
                superseded.append(stop)
        for stop in superseded:
            self._pools.drop_point(stop, LossCause.SUPERSEDED)
        return len(superseded)

    def evict_blocks(self, count: int, *, wanted: int | None = None) -> list[int]:
        """Evict so many blocks now, whatever the watermarks say; they must be evictable. `wanted`:
        how many of them somebody asked for, where that is fewer. Returns the slots."""
        freed = self._pools.evict_blocks(count)
        if wanted is not None:
            self._counters.wanted_tokens -= (count - wanted) * self._block_tokens
        return freed.blocks

    def evict_points(self, index: int, count: int) -> int:
        """Evict up to `count` slots of point component `index` now; returns how many went."""
        return self._pools.evict_points(index, count)

    # -- spills --------------------------------------------------------------------------------

    def _spill(self, near: Iterable[ResumeDepth], wanted: int, now: float) -> Spill | None:
        marks = self.watermarks
        idle = [
            stop
            for stop in near
            if stop.refs and marks.tier not in stop.backed and now - stop.last_s >= marks.idle_s
        ]
        idle.sort(key=lambda stop: (stop.last_s, stop.depth))
        chosen = idle[: max(0, wanted)]
        if not chosen:
            return None
        points = tuple(map(self._describe, chosen))
        prefixes = tuple(point.prefix for point in points)
        ticket = self._lends.lend(prefixes, now, idle_s=READ_S)
        self.open_spills[ticket] = prefixes
        return Spill(ticket, marks.tier, points)

    def _describe(self, stop: ResumeDepth) -> SpilledPoint:
        size = self._evictor.tree.block_bytes
        prefix = prefix_tree.tokens(stop.node, 0, stop.depth, block_bytes=size)
        slots = stop.point_slots(self._pools.layout.point_names)
        return SpilledPoint(prefix, slots, tuple(SessionId(name) for name in stop.anchors or ()))

    def reads(self, ticket: int, now: float) -> bool:
        """Tell whether the slots of an open spill may be read now: its ticket stands, and READ_S
        longer. False: they may be somebody else's."""
        return self._lends.read(ticket, now)

    def copied(self, ticket: int) -> None:
        """Note that the bytes are off the device: nothing is locked for them any more, whenever the
        medium answers. Saying so twice is harmless.
        """
        self._require_open(ticket)
        self._lends.end(ticket)

    def spilled(self, ticket: int) -> None:
        """Note that the copies are safe: this state is cheap to bring back now, and may go
        early."""
        for prefix in self._close(ticket):
            stop = self._standing(prefix)
            if stop is not None:
                self._counters.spilled_points += 1
                self._back(stop)

    def spill_failed(self, ticket: int) -> None:
        """Note that no copy was made. The next run evicts without: the same spill would fail the
        same way."""
        self._close(ticket)
        self._counters.failed_spills += 1
        self._spill_again = False

    def backed(self, prefix: Packed) -> None:
        """Note that the point state behind `prefix` has a copy below, whoever made it."""
        stop = self._standing(prefix)
        if stop is not None:
            self._back(stop)

    def _standing(self, prefix: Packed) -> ResumeDepth | None:
        """Return the stop with the complete point state behind `prefix`, if the device has it
        still."""
        depth = len(prefix) // self._evictor.tree.block_bytes
        node, reached = self._evictor.tree.walk(prefix, depth)
        stop = prefix_tree.complete_stop(node, depth) if reached == depth else None
        return stop if stop is not None and stop.depth == depth else None

    def _back(self, stop: ResumeDepth) -> None:
        if self.watermarks.tier not in stop.backed:
            stop.backed = (*stop.backed, self.watermarks.tier)
        self._evictor.offer(stop)

    def _require_open(self, ticket: int) -> None:
        if ticket not in self.open_spills:
            raise InvalidInput("ticket", f"{ticket} is no open spill", "report each one once")

    def _close(self, ticket: int) -> tuple[Packed, ...]:
        self._require_open(ticket)
        self._lends.end(ticket)
        return self.open_spills.pop(ticket)
