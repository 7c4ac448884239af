"""The store under a simulated node joins tiers behind one face, as store.tiers.tiered does.

    write   reserve ── room, or why not ── the home's pipe ── commit: readable, copies above it
    read    is all of it there? ── pipes of the tiers that have it ── in host memory
    moves   what an eviction or a read asks for goes between tiers in the background

Where a record goes and what is worth a move is the store's own Placement, who must go its Ledger.
Owns what is under way, and no record. Must never know a turn, or schedule anything: who calls is
given what is coming.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

import msgspec

from ownerserve.kv.messages import Tier
from ownerserve.node.vocabulary.records import Inside
from ownerserve.sim.storage.tier import SimTier
from ownerserve.sim.timeline.links import Delivery, Link, stream
from ownerserve.sim.timeline.media import Duplex, Pipe
from ownerserve.store.format.model import Listed, Meta, MissReason, RefusalReason, Want
from ownerserve.store.tiers.placement import HAS_NO_ROOM, Placement, WriteThrough

LOOKUP_S = 0.2e-3
"""What the catalogue takes to answer: some thousand ids of an index in memory, and a hand-over."""


class Room(msgspec.Struct, frozen=True, gc=False):
    """A room is a record that has space at `level` and is not written yet."""

    level: int
    record: Listed
    cost_ms: float


class AlreadyKept(msgspec.Struct, frozen=True):
    """The store has an equal id already: the first copy stays."""


class PendingRead(msgspec.Struct, frozen=True):
    """A pending read is bytes on their way to host memory. `service_s` is what they take that wait
    for and share with nobody; `tier` is None where they come from several."""

    coming: Delivery
    bytes: int
    began_s: float
    service_s: float
    tier: Tier | None


class Wear(msgspec.Struct, frozen=True):
    """The wear is the bytes written to drives, compaction included, and those of the records
    alone."""

    written_bytes: int
    record_bytes: int

    @property
    def amplification(self) -> float:
        """The bytes written for each byte of a record; 1 before the first."""
        return self.written_bytes / self.record_bytes if self.record_bytes else 1.0


class TierCopy(msgspec.Struct, frozen=True, gc=False):
    """A tier copy is one to be made, whole: of which record, and to which level."""

    record: Listed
    level: int


class SimStore:
    """The store has the tiers of one node, fastest first. A tier that several stores are given is
    shared by them."""

    def __init__(
        self,
        tiers: Sequence[SimTier],
        *,
        placement: Placement | None = None,
        nic: Duplex[Link] | None = None,
        lookup_s: float = LOOKUP_S,
    ) -> None:
        """`placement` None: written through to the lowest tier, as a worker's store is, so that
        "kept" means durable, with copies in all above. `nic`: what carries the bytes of a remote
        tier to this node."""
        self.tiers = tuple(tiers)
        home = len(self.tiers) - 1
        self.placement = placement or Placement(write=WriteThrough(home))
        self.lookup_s = lookup_s
        self.counters: Counter[str] = Counter()
        self.network_bytes = 0
        self._plan = self.placement.write.plan(len(self.tiers))
        self.home = self._plan.home
        """The level whose write is the answer."""
        if placement is None:
            self._plan = self._plan._replace(with_it=tuple(range(home)))
        self._nic = nic
        self._open: dict[bytes, int] = {}  # id -> level of its room
        self._moves: dict[tuple[bytes, int], TierCopy] = {}

    # -- the catalogue -------------------------------------------------------------------------

    def find(self, ids: Iterable[bytes]) -> dict[bytes, Tier]:
        """Return where each of `ids` is nearest; those that are nowhere are left out."""
        ids = tuple(ids)
        nearest: dict[bytes, Tier] = {}
        for tier in reversed(self.tiers):
            nearest.update(dict.fromkeys(tier.held(ids), tier.tier))
        if len(self.tiers) == 1:
            return nearest
        return {id_: nearest[id_] for id_ in ids if id_ in nearest}

    def inside(self, boundaries: Iterable[bytes]) -> tuple[Inside, ...]:
        """Return the range records on disk that hold the first of `boundaries` that any of them
        holds."""
        drives = [tier for tier in self.tiers if tier.segments is not None]
        for tier in drives:
            for digest in boundaries:
                if found := tier.at_boundary(digest):
                    return tuple(Inside(meta, units, digest) for meta, units in found)
        return ()

    # -- reading -------------------------------------------------------------------------------

    def read(
        self, wants: Sequence[Want], now_s: float, *, deadline_s: float = inf
    ) -> PendingRead | tuple[MissReason, bytes]:
        """Begin to read all `wants`, each from the nearest tier; return a miss when one is gone, or
        the queues are so long that it would only begin after `deadline_s`."""
        sizes = [0] * len(self.tiers)
        found: list[tuple[int, Listed, Want]] = []
        for want in wants:
            at = self._nearest(want.id)
            if at is None:
                self.counters["miss"] += 1
                return MissReason.ABSENT, want.id
            level, record = at
            found.append((level, record, want))
            sizes[level] += _bytes_of(want, record)
        queues = [tier.reads for tier, count in zip(self.tiers, sizes, strict=True) if count]
        if any(pipe.starts_s(now_s) >= deadline_s for pipe in queues):
            self.counters["late"] += 1
            return MissReason.DEADLINE, b""
        for level, record, want in found:
            self._took(level, record, want, now_s)
        loads = [(tier, count) for tier, count in zip(self.tiers, sizes, strict=True) if count]
        nic = None if self._nic is None else self._nic.back
        coming = self._carry([(t.tier, t.reads, count) for t, count in loads], nic, now_s)
        service_s = sum(tier.reads.service_s(count) for tier, count in loads)
        origin = loads[0][0].tier if len(loads) == 1 else None
        return PendingRead(coming, sum(sizes), now_s, service_s, origin)

    def _nearest(self, id_: bytes) -> tuple[int, Listed] | None:
        for level, tier in enumerate(self.tiers):
            record = tier.get(id_)
            if record is not None:
                return level, record
        return None

    def _took(self, level: int, record: Listed, want: Want, now_s: float) -> None:
        """Count a use, and have what was read whole copied up."""
        tier = self.tiers[level]
        tier.touch(want.id, now_s)
        self.counters[f"hit_{tier.tier}"] += 1
        whole = _bytes_of(want, record) == record.payload_bytes
        if level and whole and self.placement.goes_up(record):
            self._moves[want.id, 0] = TierCopy(record, 0)

    def _carry(
        self, loads: Iterable[tuple[Tier, Pipe | Link, int]], nic: Link | None, now_s: float
    ) -> Delivery:
        """Begin to move so many bytes each way; those of a remote tier the NIC carries too."""
        done_s, streams = now_s, []
        for tier, way, count in loads:
            if isinstance(way, Pipe):
                done_s = max(done_s, way.take(count, now_s))
            elif count:
                is_remote = tier is Tier.REMOTE
                over = (way, nic) if is_remote and nic is not None else (way,)
                streams.append(stream(over, count, now_s))
                self.network_bytes += count if is_remote else 0
        return Delivery(done_s, tuple(streams))

    # -- writing -------------------------------------------------------------------------------

    def reserve(
        self, meta: Meta, payload_bytes: int, *, cost_ms: float, now_s: float
    ) -> Room | AlreadyKept | RefusalReason:
        """Reserve room for a record at the level whose write will be the answer; return why not
        where there is none."""
        outcome = RefusalReason.NO_SPACE
        for level in (self._plan.home, *self._plan.overflow):
            if self.tiers[level].get(meta.id) is not None:
                return AlreadyKept()
            record = self._reserve_at(level, meta, payload_bytes, now_s)
            if isinstance(record, Listed):
                self._open[meta.id] = level
                return Room(level, record, cost_ms)
            outcome = record
            if outcome not in HAS_NO_ROOM:
                break
        return outcome

    def _reserve_at(
        self, level: int, meta: Meta, payload_bytes: int, now_s: float
    ) -> Listed | RefusalReason:
        got = self.tiers[level].reserve(meta, payload_bytes, now_s)
        if isinstance(got, RefusalReason):
            return got
        record, victims = got
        for victim in victims:
            self._evicted(level, victim)
        return record

    def _evicted(self, level: int, victim: Listed) -> None:
        """Send what leaves a level down, if it is worth that and is not there anyway."""
        if level < self._plan.home:
            self.counters["covered"] += 1  # written through: it was durable before it was here
        elif level + 1 < len(self.tiers) and self.placement.goes_down(victim):
            self._moves[victim.meta.id, level + 1] = TierCopy(victim, level + 1)
        else:
            self.counters["dropped"] += 1

    def write(self, rooms: Sequence[Room], now_s: float) -> Delivery:
        """Send what has room to its level. When all of it is there, `commit` it."""
        return self._send([(room.level, room.record) for room in rooms], now_s)

    def _send(self, records: Iterable[tuple[int, Listed]], now_s: float) -> Delivery:
        sizes = Counter[int]()
        for level, record in records:
            sizes[level] += record.stored_bytes
        nic = None if self._nic is None else self._nic.out
        tiers = self.tiers
        loads = [(tiers[at].tier, tiers[at].writes, count) for at, count in sizes.items()]
        return self._carry(loads, nic, now_s)

    def commit(self, rooms: Sequence[Room], now_s: float) -> None:
        """Make readable what was sent and is there, with copies of it above where they find
        room."""
        plan = self._plan
        for room in rooms:
            meta, size = room.record.meta, room.record.payload_bytes
            del self._open[meta.id]
            self.tiers[room.level].commit(meta.id, room.cost_ms, now_s)
            for level in plan.with_it:
                if self._copy(TierCopy(self._priced(room), level), now_s) and level:
                    self._send([(level, room.record)], now_s)
            if plan.later is not None and room.level < plan.later:
                self._moves[meta.id, plan.later] = TierCopy(self._priced(room), plan.later)
            self.counters["kept_bytes"] += size

    @staticmethod
    def _priced(room: Room) -> Listed:
        return msgspec.structs.replace(room.record, restore_cost_ms=room.cost_ms)

    # -- moving --------------------------------------------------------------------------------

    def start_moves(self, now_s: float) -> tuple[Delivery, tuple[TierCopy, ...]] | None:
        """Send what waits to where it goes.

        Return what is on its way, and the copies that `moved` is called with when it is there; None
        when nothing waits.
        """
        if not self._moves:
            return None
        moves, self._moves = tuple(self._moves.values()), {}
        down = [(move.level, move.record) for move in moves if move.level]
        return self._send(down, now_s), moves  # what goes up was read into host memory already

    def moved(self, moves: Iterable[TierCopy], now_s: float) -> None:
        """Take in the copies that are there: those that find room, and are not there by another
        way."""
        for move in moves:
            if move.level and not self.placement.goes_down(move.record):
                self.counters["low_utility"] += 1
                continue
            done = self._copy(move, now_s)
            self.counters[
                ("promoted" if move.level == 0 else "demoted") if done else "not_moved"
            ] += 1

    def _copy(self, move: TierCopy, now_s: float) -> bool:
        tier, record = self.tiers[move.level], move.record
        if tier.get(record.meta.id) is not None:
            return False
        got = self._reserve_at(move.level, record.meta, record.payload_bytes, now_s)
        if isinstance(got, RefusalReason):
            return False
        tier.commit(record.meta.id, record.restore_cost_ms, now_s, reuse_count=record.reuse_count)
        return True

    # -- faults and books ----------------------------------------------------------------------

    def lose_volatile(self) -> None:
        """Lose host memory and what was under way, as the process died; drives keep the rest."""
        for id_, level in self._open.items():
            self.tiers[level].forget_coming(id_)
        self._open.clear()
        self._moves.clear()
        for tier in self.tiers:
            if tier.is_volatile:
                tier.lose_all()

    @property
    def wear(self) -> Wear:
        """What the store's drives have been written."""
        logs = [tier.segments for tier in self.tiers if tier.segments is not None]
        written, appended = (
            (log.written_bytes for log in logs),
            (log.appended_bytes for log in logs),
        )
        return Wear(sum(written), sum(appended))

    def waiting_bytes(self, now_s: float) -> dict[Tier, int]:
        """Return the bytes asked of each tier and not delivered: the planner's backlog."""
        waiting = {tier.tier: tier.reads.waiting_bytes(now_s) for tier in self.tiers}
        return {tier: count for tier, count in waiting.items() if count}

    def check(self) -> None:
        """Raise InvariantViolated unless every tier's books agree."""
        for tier in self.tiers:
            tier.check()


def _bytes_of(want: Want, record: Listed) -> int:
    """Return how many bytes of a record a want reads."""
    units = record.meta.units
    end = units if want.end_unit is None else want.end_unit
    return record.payload_bytes * (end - want.first_unit) // units
