"""The host memory tier is the fastest place to come back from, and gone with the process.

A reservation's buffer becomes the record, without a copy; a read hands out a view of it, without
a copy either, after its digest was checked: host memory flips bits too. What is evicted under a
reader stays as it is until the reader lets go (see `buffers`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import RLock

import msgspec

from ownerserve.kv.clock import Clock
from ownerserve.kv.errors import CapacityExceeded, Corrupt
from ownerserve.store.format.header import CHUNK, RecordHeader, RecordPlace
from ownerserve.store.format.model import (
    AlreadyStored,
    ArtifactKind,
    Listed,
    Meta,
    MissReason,
    ReadHit,
    ReadMiss,
    ReadOutcome,
    ReadPart,
    RefusalReason,
    TierUsage,
    Want,
    WriteDone,
    WriteOutcome,
    WriteRefused,
    unit_ends,
)
from ownerserve.store.format.seal import SealKind, Xxh3Seal
from ownerserve.store.format.verify import BadRange, chunk_span, open_chunks, span_of
from ownerserve.store.tiers.backend import (
    EVERY_RECORD,
    OnEvict,
    OnRemoved,
    Reservation,
    nobody_listens,
)
from ownerserve.store.tiers.buffers import BufferPool, BufferSource
from ownerserve.store.tiers.ledger import Ledger
from ownerserve.store.tiers.policy import Order, TierLimits, by_age

_SEAL = Xxh3Seal()
_NOWHERE = RecordPlace(bytes(16), 0, 0, 0)
_NO_SALT = bytes(16)


class MemoryRecord(msgspec.Struct):
    """A memory record is a record in host memory: its header, its payload and what is known of its
    use.
    """

    header: RecordHeader
    payload: memoryview
    touched_s: float
    reuse_count: int = 0
    restore_cost_ms: float = 0.0

    def listed(self) -> Listed:
        """Return the record as the tier's catalogue shows it."""
        size = self.header.payload_bytes
        return Listed(
            self.header.meta, size, size, self.touched_s, self.reuse_count, self.restore_cost_ms
        )


class HeldPart:
    """A held part is what a want asks for, as it lies in host memory: `data`, of which a range may
    be used once `check` has verified it. It stays as it is while somebody has it, also evicted."""

    __slots__ = ("_at", "_header", "_on_corrupt", "_payload", "data")

    def __init__(
        self, held: MemoryRecord, low: int, high: int, *, on_corrupt: Callable[[], None]
    ) -> None:
        self._header, self._payload, self._at = held.header, held.payload, low
        self._on_corrupt = on_corrupt
        self.data = held.payload[low:high]

    def check(self, low: int, high: int) -> None:
        """Verify `data[low:high]`, widened to whole chunks. Raises Corrupt; then the tier has the
        record no more."""
        first, end = chunk_span(self._at + low, self._at + high, self._header.payload_bytes)
        try:
            open_chunks(self._payload[first:end], self._header, _SEAL, first // CHUNK)
        except Corrupt:
            self._on_corrupt()
            raise


class MemoryTier:
    """A memory tier keeps artifacts in host memory. Implements `backend.TierBackend`."""

    name = "memory"

    def __init__(
        self,
        clock: Clock,
        limits: TierLimits,
        *,
        landing: BufferSource | None = None,
        order: Order = by_age,
    ) -> None:
        self.limits = limits
        self._clock = clock
        # Reservations and evicted records that a reader still sees come on top of the limits.
        self._landing = landing or BufferPool(2 * limits.capacity_bytes + 2 * CHUNK)
        self._order = order
        self.on_evict: OnEvict | None = None
        self.on_removed: OnRemoved = nobody_listens
        self._held: dict[ArtifactKind, OrderedDict[bytes, MemoryRecord]] = {
            kind: OrderedDict() for kind in ArtifactKind
        }
        self._boundaries: dict[bytes, dict[bytes, int]] = {}  # hash -> id -> units up to there
        self._standing: dict[tuple[bytes, ArtifactKind], TierUsage] = {}
        self._ledger = Ledger(limits, self._standing)
        self._lock = RLock()
        self.counters: Counter[str] = Counter()

    def _get(self, id_: bytes) -> MemoryRecord | None:
        return next((held[id_] for held in self._held.values() if id_ in held), None)

    def find(self, ids: Sequence[bytes]) -> Mapping[bytes, Listed]:
        """Return what is here of `ids`."""
        with self._lock:
            found = {id_: self._get(id_) for id_ in ids}
            return {id_: held.listed() for id_, held in found.items() if held is not None}

    def at_boundary(self, prefix_hash: bytes) -> list[tuple[Listed, int]]:
        """List the records that have `prefix_hash` at a unit's end: (record, units up to there)."""
        with self._lock:
            units_of = self._boundaries.get(prefix_hash, {})
            found = [(self._get(id_), units) for id_, units in units_of.items()]
            return [(held.listed(), units) for held, units in found if held is not None]

    def read(self, wants: Sequence[Want], landing: BufferSource | None = None) -> ReadOutcome:
        """Read and verify all wants, or give a miss. `landing` is not used: the bytes are in memory
        already.
        """
        with self._lock:
            found = [(want, self._get(want.id)) for want in wants]
        parts = []
        for want, held in found:
            outcome = (
                ReadMiss(MissReason.ABSENT, want.id) if held is None else self._part(want, held)
            )
            if isinstance(outcome, ReadMiss):
                self.counters[f"miss_{outcome.reason}"] += 1
                return outcome
            parts.append(outcome)
        self._touch([want.id for want in wants])
        self.counters["hit"] += 1
        return ReadHit(tuple(parts), self.name)

    def hold(self, wants: Sequence[Want]) -> tuple[HeldPart, ...] | None:
        """Return all wants as they lie here, which their taker verifies range by range as it uses
        them; None when one isn't here as it is wanted."""
        with self._lock:
            found = [(want, self._get(want.id)) for want in wants]
        parts = [None if held is None else self._hold_one(want, held) for want, held in found]
        held_parts = tuple(part for part in parts if isinstance(part, HeldPart))
        if len(held_parts) < len(wants):
            return None
        self._touch([want.id for want in wants])
        self.counters["hit"] += 1
        return held_parts

    def _hold_one(self, want: Want, held: MemoryRecord) -> HeldPart | ReadMiss:
        header = held.header
        if want.descriptor is not None and want.descriptor != header.meta.descriptor:
            return ReadMiss(MissReason.FOREIGN_LAYOUT, want.id)
        try:
            low, high = span_of(want, header.meta.units, header.payload_bytes)
        except BadRange:
            return ReadMiss(MissReason.BAD_RANGE, want.id)
        return HeldPart(held, low, high, on_corrupt=partial(self._found_corrupt, want.id))

    def _part(self, want: Want, held: MemoryRecord) -> ReadPart | ReadMiss:
        part = self._hold_one(want, held)
        if isinstance(part, ReadMiss):
            return part
        try:
            part.check(0, len(part.data))
        except Corrupt:
            return ReadMiss(MissReason.CORRUPT, want.id)
        return ReadPart(held.header.meta, part.data)

    def _found_corrupt(self, id_: bytes) -> None:
        self.counters["quarantined"] += 1
        self._drop(id_)  # there is no medium to inspect

    def _touch(self, ids: Sequence[bytes]) -> None:
        now_s = self._clock.now()
        with self._lock:
            for id_ in ids:
                for held in self._held.values():
                    if id_ in held:
                        held.move_to_end(id_)
                        held[id_].touched_s = now_s
                        held[id_].reuse_count += 1

    def reserve(self, meta: Meta, payload_bytes: int) -> Reservation | AlreadyStored | WriteRefused:
        """Reserve room and the very buffer that will be the record. Raises InvalidInput for an
        impossible meta.
        """
        meta.check()
        with self._lock:
            if self._get(meta.id) is not None:
                return AlreadyStored(meta.id)
            if payload_bytes < 1 or payload_bytes % meta.units:
                return self._refuse(RefusalReason.TOO_LARGE, meta)
            if self._ledger.is_held(meta.id):
                return self._refuse(RefusalReason.BUSY, meta)
            victims = self._ledger.make_room(
                meta, payload_bytes, oldest=self._oldest, order=self._order
            )
            if isinstance(victims, RefusalReason):
                return self._refuse(victims, meta)
            try:
                record = self._landing.take(payload_bytes)
            except CapacityExceeded:
                return self._refuse(RefusalReason.BUSY, meta)
            for victim in victims:
                self._evict(victim)
            reservation = Reservation(meta, record, (0, payload_bytes))
            self._ledger.hold(reservation)
            return reservation

    def _refuse(self, reason: RefusalReason, meta: Meta) -> WriteRefused:
        self.counters[f"refused_{reason}"] += 1
        return WriteRefused(reason, meta.id)

    def _evict(self, victim: Listed) -> None:
        held = self._get(victim.meta.id)
        if held is not None and self.on_evict is not None:
            self.on_evict(victim, partial(self._sound, held))
        self._drop(victim.meta.id)
        self.counters["evicted"] += 1

    def _sound(self, held: MemoryRecord) -> memoryview | None:
        """Verify a record's bytes before they go elsewhere, where they would get a new digest; None
        when they are bad.
        """
        try:
            open_chunks(held.payload, held.header, _SEAL)
        except Corrupt:
            self.counters["quarantined"] += 1
            return None
        return held.payload

    def commit(self, reservations: Sequence[Reservation]) -> tuple[WriteOutcome, ...]:
        """Digest the records and make them visible."""
        outcomes: list[WriteOutcome] = []
        now_s = self._clock.now()
        for reserved in reservations:
            payload = reserved.take().toreadonly()
            tags = _SEAL.close(payload, _NO_SALT)
            meta = reserved.meta
            header = RecordHeader(
                meta, _NOWHERE, SealKind.XXH3, len(payload), int(now_s * 1000), tags
            )
            with self._lock:
                self._ledger.release(reserved)
                self._held[meta.kind][meta.id] = MemoryRecord(header, payload, now_s)
                for digest, units in unit_ends(meta):
                    self._boundaries.setdefault(digest, {})[meta.id] = units
                self._count(meta, len(payload), 1)
            self.counters["stored"] += 1
            outcomes.append(WriteDone(meta.id, len(payload)))
        return tuple(outcomes)

    def _count(self, meta: Meta, stored_bytes: int, records: int) -> None:
        key = (meta.tenant, meta.kind)
        used = self._standing.get(key, TierUsage())
        self._standing[key] = TierUsage(used.stored_bytes + stored_bytes, used.records + records)

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation's room back."""
        with self._lock:
            reservation.take()
            self._ledger.release(reservation)

    def _drop(self, id_: bytes) -> int:
        with self._lock:
            for held in self._held.values():
                gone = held.pop(id_, None)
                if gone is not None:
                    self._count(gone.header.meta, -len(gone.payload), -1)
                    self._forget_boundaries(gone.header.meta)
                    self.on_removed((gone.header.meta,))
                    return 1
        return 0

    def _forget_boundaries(self, meta: Meta) -> None:
        for digest, _ in unit_ends(meta):
            del self._boundaries[digest][meta.id]
            if not self._boundaries[digest]:
                del self._boundaries[digest]

    def remove(self, ids: Sequence[bytes]) -> int:
        """Remove records; returns how many there were."""
        return sum(self._drop(id_) for id_ in ids)

    def _oldest(self, kind: ArtifactKind, limit: int, tenant: bytes | None) -> list[Listed]:
        found: list[Listed] = []
        with self._lock:
            for held in self._held[kind].values():
                if len(found) >= limit:
                    break
                if tenant in (None, held.header.meta.tenant):
                    found.append(held.listed())
        return found

    def expire(self, most: int = EVERY_RECORD) -> int:
        """Remove what has not been touched for its kind's TTL, at most so many records."""
        now_s, late = self._clock.now(), list[bytes]()
        with self._lock:
            for kind, records in self._held.items():
                ttl_s = self._ledger.limits.of(kind).ttl_s
                for id_, held in records.items():
                    if ttl_s is None or held.touched_s >= now_s - ttl_s or len(late) == most:
                        break
                    late.append(id_)
        return self.remove(late)

    def purge(self, tenant: bytes) -> int:
        """Remove every record of a tenant; returns how many."""
        with self._lock:
            own = [
                id_
                for records in self._held.values()
                for id_, held in records.items()
                if held.header.meta.tenant == tenant
            ]
        return self.remove(own)

    def price(self, costs_ms: Mapping[bytes, float]) -> None:
        """Note what it costs to make these artifacts again, if they are here."""
        with self._lock:
            for id_, cost_ms in costs_ms.items():
                held = self._get(id_)
                if held is not None:
                    held.restore_cost_ms = cost_ms

    def usage(self) -> Mapping[tuple[bytes, ArtifactKind], TierUsage]:
        """Return the bytes and records that stand, by tenant and kind."""
        with self._lock:
            return {key: used for key, used in self._standing.items() if used.records}

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            for held in self._held.values():
                held.clear()
            self._boundaries.clear()
            self._standing.clear()
