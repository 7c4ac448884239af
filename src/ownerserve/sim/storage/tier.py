"""A simulated tier knows which records it holds, and who must go for more. No bytes, no clock.

What is kept and what goes is decided by the store's own classes (store.tiers.ledger and policy):
this is their catalogue, with a way for reads and one for writes: pipes, or links that several
share. Owns its records, and their room.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from struct import Struct

import msgspec

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.prices import Medium
from ownerserve.sim.storage.segments import Segments
from ownerserve.sim.timeline.links import Link, carry
from ownerserve.sim.timeline.media import Duplex, Pipe
from ownerserve.store.disk.superblock import DEFAULT_SEGMENT_BYTES
from ownerserve.store.format.model import (
    ID_BYTES,
    ArtifactKind,
    Listed,
    Meta,
    RefusalReason,
    TierUsage,
)
from ownerserve.store.format.seal import Blake3Seal
from ownerserve.store.format.verify import record_room
from ownerserve.store.tiers.ledger import Ledger
from ownerserve.store.tiers.policy import TierLimits, WriteBudget, by_utility

UPKEEP_S = 60.0
"""How often TTLs are looked at and a drive is tidied, as a worker's store does."""


class TierPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A tier plan says what a tier is made of. `tier` says which it is to the planner; `read` and
    `write` are the medium's two directions; `budget` is (bytes a day, burst bytes) of what may be
    written."""

    tier: Tier
    limits: TierLimits
    read: Medium
    write: Medium
    budget: tuple[float, float] | None = None
    segment_bytes: int = DEFAULT_SEGMENT_BYTES


class SimTier:
    """A tier holds its records and their room. One that many nodes are given is shared: a remote
    store."""

    def __init__(
        self, plan: TierPlan, name: str = "", *, shared: Duplex[Link] | None = None
    ) -> None:
        """`shared`: the links that writes go out over and reads come back by, which others use too;
        None: both queue, each by itself."""
        name = name or plan.tier.value
        self.tier = plan.tier
        self.is_volatile = plan.tier is Tier.HOST
        """A crash of its machine loses what it holds."""
        self.limits = plan.limits
        self.reads: Pipe | Link
        self.writes: Pipe | Link
        if shared is None:
            self.reads, self.writes = (
                Pipe(f"{name}/{way}", medium)
                for way, medium in (("read", plan.read), ("write", plan.write))
            )
        else:
            self.reads, self.writes = shared.back, shared.out
        self.counters: Counter[str] = Counter()
        self.segments = Segments(plan.segment_bytes) if plan.tier is Tier.DISK else None
        self.budget = None if plan.budget is None else WriteBudget(*plan.budget)
        self._held: dict[ArtifactKind, OrderedDict[bytes, Listed]] = {
            kind: OrderedDict() for kind in ArtifactKind
        }
        self._coming: dict[bytes, Listed] = {}
        self._coming_bytes = 0
        self._standing: dict[tuple[bytes, ArtifactKind], TierUsage] = {}
        self._ledger = Ledger(plan.limits, self._standing)
        self._ends: dict[int, list[bytes]] = {}
        self.lost: list[PrefixHash] | None = None
        """Prefix hashes of records that went, for who tells others; None: nobody does."""
        self._tidied_s = 0.0

    @property
    def used_bytes(self) -> int:
        """`used_bytes` counts the bytes of the records that are kept."""
        return sum(used.stored_bytes for used in self._standing.values())

    @property
    def records(self) -> int:
        """`records` counts the records that are kept."""
        return sum(len(held) for held in self._held.values())

    def get(self, id_: bytes) -> Listed | None:
        """Return the record, if it is here and whole; else None."""
        found = self._held[ArtifactKind.RANGE].get(id_)
        return found if found is not None else self._held[ArtifactKind.POINT].get(id_)

    def held(self, ids: Iterable[bytes]) -> list[bytes]:
        """Return those of `ids` that are here and whole, in order."""
        ranges, points = self._held[ArtifactKind.RANGE], self._held[ArtifactKind.POINT]
        return [id_ for id_ in ids if id_ in ranges or id_ in points]

    # -- writing -------------------------------------------------------------------------------

    def reserve(
        self, meta: Meta, payload_bytes: int, now_s: float
    ) -> tuple[Listed, Sequence[Listed]] | RefusalReason:
        """Reserve room for a record that is on its way; return it and what went for it, or why it
        may not come."""
        if meta.id in self._coming:
            return self._refuse(RefusalReason.BUSY)
        if now_s - self._tidied_s >= UPKEEP_S:
            self._upkeep(now_s)
        stored = payload_bytes
        if self.tier is not Tier.HOST:
            _, stored = record_room(meta, payload_bytes, _SEAL)
        if self.budget is not None and not self.budget.admit(stored + self._coming_bytes, now_s):
            return self._refuse(RefusalReason.WRITE_BUDGET)
        victims = self._ledger.make_room(meta, stored, oldest=self._oldest, order=by_utility)
        if isinstance(victims, RefusalReason):
            return self._refuse(victims)
        for victim in victims:
            self.remove(victim.meta.id)
            self.counters["evicted"] += 1
        coming = Listed(meta, payload_bytes, stored, now_s)
        self._coming[meta.id] = coming
        self._coming_bytes += stored
        self._count(coming, 1)
        return coming, victims

    def _refuse(self, reason: RefusalReason) -> RefusalReason:
        self.counters[f"refused_{reason}"] += 1
        return reason

    def commit(self, id_: bytes, cost_ms: float, now_s: float, *, reuse_count: int = 0) -> None:
        """Make readable what was reserved and is written."""
        coming = self._coming.pop(id_)
        self._coming_bytes -= coming.stored_bytes
        record = msgspec.structs.replace(
            coming, touched_s=now_s, reuse_count=reuse_count, restore_cost_ms=cost_ms
        )
        meta = record.meta
        self._held[meta.kind][id_] = record
        self._index(meta)
        self.counters["stored"] += 1
        self.counters["stored_bytes"] += record.stored_bytes
        if self.budget is not None:
            self.budget.spend(record.stored_bytes, now_s)
        if self.segments is not None:
            self.segments.append(id_, record.stored_bytes)

    # -- reading -------------------------------------------------------------------------------

    def touch(self, id_: bytes, now_s: float) -> None:
        """Make a record that was read the youngest."""
        record = self.get(id_)
        if record is not None:
            held = self._held[record.meta.kind]
            used = record.reuse_count + 1
            held[id_] = msgspec.structs.replace(record, touched_s=now_s, reuse_count=used)
            held.move_to_end(id_)

    def at_boundary(self, digest: bytes) -> list[tuple[Meta, int]]:
        """Return the range records of several blocks that have this digest at the end of their
        first n blocks, each with its n."""
        found = []
        for id_ in self._ends.get(_key(digest), ()):
            meta = self._held[ArtifactKind.RANGE][id_].meta
            ends = meta.boundaries + meta.prefix_hash
            at = ends.find(digest)
            while at % ID_BYTES:
                at = ends.find(digest, at + 1)
            if at >= 0:
                found.append((meta, at // ID_BYTES + 1))
        return found

    # -- losing --------------------------------------------------------------------------------

    def remove(self, id_: bytes) -> None:
        """Remove a record; one that is not here is no error."""
        record = self.get(id_)
        if record is None:
            return
        del self._held[record.meta.kind][id_]
        if self.lost is not None:
            self.lost.append(PrefixHash(record.meta.prefix_hash))
        self._count(record, -1)
        self._unindex(record.meta)
        if self.segments is not None:
            self.segments.remove(id_)

    def forget_coming(self, id_: bytes) -> None:
        """Give up the room of a record whose writer has died."""
        coming = self._coming.pop(id_, None)
        if coming is not None:
            self._coming_bytes -= coming.stored_bytes
            self._count(coming, -1)

    def lose_all(self) -> None:
        """Forget everything, as the machine's memory is gone. A drive keeps what it has: never
        called for one."""
        assert self.is_volatile
        for held in self._held.values():
            held.clear()
        self._coming.clear()
        self._coming_bytes = 0
        self._standing.clear()
        self._ends.clear()

    def _upkeep(self, now_s: float) -> None:
        """Apply TTLs and compact, as a worker's thread does by the clock."""
        self._tidied_s = now_s
        for kind, records in self._held.items():
            ttl_s = self.limits.of(kind).ttl_s
            while ttl_s is not None and records:
                record = next(iter(records.values()))
                if record.touched_s >= now_s - ttl_s:
                    break
                self.remove(record.meta.id)
                self.counters["expired"] += 1
        if self.segments is not None and (again := self.segments.compact()):
            for way in (self.reads, self.writes):
                carry(way, again, now_s)
            if self.budget is not None:
                self.budget.spend(again, now_s)

    # -- books ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantViolated unless the books agree with what is here."""
        total: Counter[tuple[bytes, ArtifactKind]] = Counter()
        every = (*self._coming.values(), *(r for h in self._held.values() for r in h.values()))
        for record in every:
            total[record.meta.tenant, record.meta.kind] += record.stored_bytes
        booked = {key: used.stored_bytes for key, used in self._standing.items() if used.records}
        if self._coming_bytes != sum(record.stored_bytes for record in self._coming.values()):
            raise InvariantViolated(f"invariant 1: {self.tier} waits for other bytes than it says")
        if booked != dict(total):
            raise InvariantViolated(f"invariant 1: {self.tier} has {dict(total)}, books {booked}")
        for kind in ArtifactKind:
            held = sum(count for (_, its_kind), count in total.items() if its_kind is kind)
            if held > self.limits.of(kind).capacity_bytes:
                raise InvariantViolated(
                    f"invariant 1: {self.tier} holds more {kind.name} than fits"
                )

    def _count(self, record: Listed, sign: int) -> None:
        key = (record.meta.tenant, record.meta.kind)
        used = self._standing.get(key, _NOTHING)
        size = used.stored_bytes + sign * record.stored_bytes
        self._standing[key] = TierUsage(size, used.records + sign)

    def _oldest(self, kind: ArtifactKind, limit: int, tenant: bytes | None) -> list[Listed]:
        held: Iterable[Listed] = self._held[kind].values()
        if tenant is not None:
            held = (record for record in held if record.meta.tenant == tenant)
        return list(islice(held, limit))

    def _index(self, meta: Meta) -> None:
        """Index a record by each boundary inside it and at its end, as a drive's index has them."""
        if self.segments is None or not meta.boundaries:
            return
        for key in _keys(meta):
            there = self._ends.get(key)
            if there is None:
                self._ends[key] = [meta.id]
            else:
                there.append(meta.id)

    def _unindex(self, meta: Meta) -> None:
        if self.segments is None or not meta.boundaries:
            return
        for key in _keys(meta):
            there = self._ends[key]
            there.remove(meta.id)
            if not there:
                del self._ends[key]


def _key(digest: bytes) -> int:
    """Return eight bytes of a digest as a small key; what is found by it is compared whole."""
    return int.from_bytes(digest[:8], "little")


_BOUNDARY = Struct(f"<Q{ID_BYTES - 8}x")
"""`_key` of one of many in a row."""


def _keys(meta: Meta) -> list[int]:
    ends = meta.boundaries + meta.prefix_hash
    return [key for (key,) in _BOUNDARY.iter_unpack(ends)]


_NOTHING = TierUsage()
_SEAL = Blake3Seal(bytes(32))
