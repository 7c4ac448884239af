"""The policy engine: what to do before memory is short, in one aggregated directive a run.

Decides with watermarks whether to evict, spill, checkpoint or drop; `rooms` evicts by itself when
a turn needs slots at once. Owns the open spills, whose point state is held until the copy is done:
a slot that is re-used while it is being copied out would be stored as wrong bytes.

    free slots below `low`  ->  drop   superseded point state: no session stands there
                                spill  idle sessions' point state, when there is a tier for it
                                evict  range blocks and point state until `high` are free
    evictable too few       ->  checkpoint  the youngest turns, so that preempting them is cheap
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ownerserve.cache import paths
from ownerserve.cache.evictor import Evictor
from ownerserve.cache.metrics import Lost
from ownerserve.cache.node import ABSENT, Receipt, Stop
from ownerserve.cache.pool import SlotPool
from ownerserve.cache.rooms import Rooms
from ownerserve.cache.running import Running
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import Packed


class Watermarks(msgspec.Struct, frozen=True):
    """Shares of a pool. Below `low` free, act until `high` are. Point state of a session that was
    idle for `idle_s` is spilled first, at most `spills` stops a run, when `tier` names a place."""

    low: float = 0.02
    high: float = 0.05
    idle_s: float = 10.0
    spills: int = 32
    tier: str = ""


class SpilledPoint(msgspec.Struct, frozen=True):
    """Copy these slots out: the state after the tokens `prefix`, for the sessions that stand
    there."""

    prefix: Packed
    slots: dict[str, int]
    sessions: tuple[SessionId, ...]


class Spill(msgspec.Struct, frozen=True, tag=True):
    """Copy to `tier`, then call `spilled(ticket)` or `spill_failed(ticket)`."""

    ticket: int
    tier: str
    points: tuple[SpilledPoint, ...]


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """Told, not asked: what one run freed."""

    blocks: int
    points: int


class Checkpoint(msgspec.Struct, frozen=True, tag=True):
    """Snapshot these turns at their next boundary: they are the first to be preempted."""

    turns: tuple[TurnId, ...]


Directive = Spill | Dropped | Checkpoint


class Pressure:
    """Watches the pools of one cache."""

    def __init__(self, rooms: Rooms, evictor: Evictor, running: Mapping[TurnId, Running]) -> None:
        self.watermarks = Watermarks()
        self._rooms = rooms
        self._evictor = evictor
        self._running = running
        self._spills: dict[int, list[tuple[Stop, Receipt]]] = {}
        self._tickets = 0

    def relieve(self, now: float) -> tuple[Directive, ...]:
        """One run: at most one directive of each kind."""
        directives: list[Directive] = []
        rooms, marks = self._rooms, self.watermarks
        points = [pool for pool in rooms.points if pool.free < marks.low * pool.capacity]
        dropped = self._drop_superseded() if points else 0
        if points and marks.tier:
            spill = self._spill(now)
            directives += [spill] if spill is not None else []
        for index, pool in enumerate(rooms.points):
            if pool in points:
                dropped += rooms.evict_points(index, self._short(pool))
        blocks = 0
        if rooms.blocks.free < marks.low * rooms.blocks.capacity:
            short = self._short(rooms.blocks)
            blocks = min(short, rooms.evictable_blocks())
            if blocks:
                rooms.evict_blocks(blocks)
            if blocks < short and self._running:
                directives.append(self._checkpoint())
        if blocks or dropped:
            directives.append(Dropped(blocks, dropped))
        return tuple(directives)

    def _short(self, pool: SlotPool) -> int:
        return max(0, int(self.watermarks.high * pool.capacity) - pool.free)

    def _checkpoint(self) -> Checkpoint:
        youngest = sorted(self._running.values(), key=lambda run: -run.order)
        return Checkpoint(tuple(run.turn_id for run in youngest[: max(1, len(youngest) // 4)]))

    def _point_stops(self) -> list[Stop]:
        nodes = paths.nodes(self._evictor.tree.root)
        return [stop for node in nodes for stop in node.stops if stop.slots is not None]

    def _drop_superseded(self) -> int:
        """Point state that can restore nothing, or that no session stands at while a later stop
        of the same interval has all of it. Returns how many stops lost theirs."""
        superseded = []
        for stop in self._point_stops():
            newest = stop.node.stops[-1]
            passed = newest is not stop and newest.is_complete
            lonely = not stop.anchors and stop.uses <= 1 and passed
            branch = stop.depth in stop.node.branches or stop.depth in stop.node.pins
            if not stop.holds and not branch and (lonely or not stop.is_complete):
                superseded.append(stop)
        for stop in superseded:
            self._rooms.drop_point(stop, Lost.SUPERSEDED)
        return len(superseded)

    # -- spills --------------------------------------------------------------------------------

    def _spill(self, now: float) -> Spill | None:
        marks, tree = self.watermarks, self._evictor.tree
        idle = [
            stop
            for stop in self._point_stops()
            if stop.refs
            and stop.is_complete
            and not stop.holds
            and marks.tier not in stop.backed
            and now - stop.last_s >= marks.idle_s
        ]
        idle.sort(key=lambda stop: (stop.last_s, stop.depth))
        chosen = idle[: marks.spills]
        if not chosen:
            return None
        points, held = [], []
        for stop in chosen:
            stop.holds += 1
            held.append((stop, tree.lock(stop.node, stop.depth)))
            points.append(self._describe(stop))
        self._tickets += 1
        self._spills[self._tickets] = held
        return Spill(self._tickets, marks.tier, tuple(points))

    def _describe(self, stop: Stop) -> SpilledPoint:
        size = self._evictor.tree.block_bytes
        prefix = paths.tokens(stop.node, 0, stop.depth, block_bytes=size)
        slots = dict(zip((p.name for p in self._rooms.points), stop.slots or (), strict=True))
        return SpilledPoint(prefix, slots, tuple(SessionId(name) for name in stop.anchors or ()))

    def spilled(self, ticket: int) -> None:
        """The copies are safe: this state is cheap to bring back now, and may go early."""
        for stop in self._release(ticket):
            if self.watermarks.tier not in stop.backed:
                stop.backed = (*stop.backed, self.watermarks.tier)
            self._evictor.offer(stop)

    def spill_failed(self, ticket: int) -> None:
        """No copy was made."""
        self._release(ticket)

    def _release(self, ticket: int) -> list[Stop]:
        held = self._spills.pop(ticket, None)
        if held is None:
            raise InvalidInput("ticket", f"{ticket} is no open spill", "report each one once")
        for stop, lock in held:
            stop.holds -= 1
            self._evictor.tree.unlock(lock)
        return [stop for stop, _ in held if stop.slots is not None and ABSENT not in stop.slots]

    def locks(self) -> list[Receipt]:
        """Locks of open spills."""
        return [lock for held in self._spills.values() for _, lock in held]
