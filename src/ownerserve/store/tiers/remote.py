"""The remote tier keeps one blob a record, in the very format that disk records have.

    records/ab/abcd...               header and payload; store id, segment and offset are zero
    catalogue/TENANT/KIND/ID-BYTES   what there is and what it is worth (see `catalogue`)
    quarantine/ID                    what two machines found bad (see `suspects`)

Many nodes share it and none owns it: what is found is a hint and the read verifies. It may lose
everything at any time (Mooncake Store does at a restart of its master): a miss. With `limits`, the
least useful records make room: restore cost x expected uses, for each byte. Several nodes that
write at once may go over them by what they write between two listings. Without, a full medium
refuses.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ownerserve.kv.clock import Clock
from ownerserve.kv.errors import CapacityExceeded, Corrupt, InvalidInput
from ownerserve.store.format.header import (
    BLOCK,
    CHUNK,
    MAX_PAYLOAD,
    OtherFormat,
    decode,
    peek_bytes,
)
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
)
from ownerserve.store.format.seal import Keys
from ownerserve.store.format.verify import (
    BadRange,
    Forged,
    NoKey,
    check_place,
    chunk_span,
    draft,
    open_chunks,
    open_header,
    record_room,
    span_of,
)
from ownerserve.store.tiers.agreement import agree
from ownerserve.store.tiers.backend import EVERY_RECORD, Reservation
from ownerserve.store.tiers.blobs import Backpressure, Blobs
from ownerserve.store.tiers.buffers import BufferPool, BufferSource
from ownerserve.store.tiers.catalogue import (
    Catalogue,
    CatalogueRow,
    catalogue_key,
    parse,
    under_tenant,
)
from ownerserve.store.tiers.health import Health
from ownerserve.store.tiers.policy import ExpectedUse, TierLimits
from ownerserve.store.tiers.suspects import Suspects, this_machine

log = logging.getLogger("ownerserve.store")

NOWHERE = bytes(16)
VERDICTS = ("forged", "reread", "accused", "quarantined", "self_suspected", "key_refused")
"""These counters of a tier tell of records, or of a key, that are not as they should be."""
UNFINISHED_S = 24 * 3600.0
"""No writer needs longer for one record."""


def record_key(id_: bytes) -> str:
    """Return the name of the blob that holds record `id_`."""
    name = id_.hex()
    return f"records/{name[:2]}/{name}"


class RemoteTier:
    """A remote tier keeps artifacts in a shared medium. Implements `backend.TierBackend`."""

    def __init__(
        self,
        name: str,
        blobs: Blobs,
        *,
        clock: Clock,
        keys: Keys,
        limits: TierLimits | None = None,
        machine: bytes | None = None,
    ) -> None:
        """Make the tier over `blobs`. `limits` None: TTLs as everywhere, room as the medium has
        it. `machine` names who reads here (None: this machine); two must agree that a blob is bad.
        """
        self.name = name
        self._blobs = blobs
        self._clock = clock
        self._keys = keys.for_medium()
        self._has_agreed = False
        self._ttls = limits or TierLimits()
        self._catalogue = Catalogue(blobs, clock, limits, ExpectedUse())
        self._landing = BufferPool()
        self.health = Health(f"remote store {name}")
        self.counters: Counter[str] = Counter()
        self.suspects = Suspects(
            blobs,
            clock,
            name=self.health.name,
            machine=machine or this_machine(),
            counters=self.counters,
        )

    def agree(self) -> None:
        """Compare this tier's key with the medium's. Raises InvalidInput for another one, OSError
        or Backpressure where the medium does not say.
        """
        if self._has_agreed:
            return
        try:
            agree(self._blobs, self._keys.fingerprint(), self.health.name)
        except InvalidInput as error:
            if not self.counters["key_refused"]:
                log.warning("%s", error)
            self.counters["key_refused"] += 1
            raise
        self._has_agreed = True

    def find(self, ids: Sequence[bytes]) -> Mapping[bytes, Listed]:
        """Return what the medium has of `ids`, from the records' headers: one round trip for each
        id. What read badly here a short while ago is left out.
        """
        return self._listed([id_ for id_ in ids if not self.suspects.hides(id_)])

    def _listed(self, ids: Sequence[bytes]) -> dict[bytes, Listed]:
        found = {}
        for id_ in ids:
            with suppress(OSError, Corrupt, CapacityExceeded):
                header = decode(self._header(record_key(id_), self._landing))
                meta, size = header.meta, header.payload_bytes
                if meta.id != id_:
                    continue  # another artifact's record under this name
                stored = header.header_bytes + size  # a blob is not padded
                found[id_] = Listed(meta, size, stored, header.created_ms / 1000)
        return found

    def _header(self, key: str, heads: BufferSource) -> memoryview:
        first = heads.take(BLOCK)
        first = first[: self._blobs.get_into(key, 0, first)]
        length = peek_bytes(first)
        if length == BLOCK:
            return first
        whole = heads.take(length)
        return whole[: self._blobs.get_into(key, 0, whole)]

    def read(self, wants: Sequence[Want], landing: BufferSource | None = None) -> ReadOutcome:
        """Read and verify all wants, or give a miss."""
        parts = []
        for want in wants:
            outcome = self._read_twice(want, landing or self._landing)
            if isinstance(outcome, MissReason):
                self.counters[f"miss_{outcome}"] += 1
                return ReadMiss(outcome, want.id)
            parts.append(outcome)
        for want in wants:
            self._catalogue.used(want.id)
        self.counters["hit"] += 1
        return ReadHit(tuple(parts), self.name)

    def _read_twice(self, want: Want, landing: BufferSource) -> ReadPart | MissReason:
        """Read, and what fails verification once more into memory of its own: only what fails twice
        is held against the blob. What is whole and sealed otherwise is a miss and no more: it may
        be good by another key, and nobody's to move.
        """
        try:
            outcome = self._read_shielded(want, landing, self._landing)
            if outcome is not MissReason.CORRUPT:
                if isinstance(outcome, ReadPart):
                    self.suspects.verified()
                return outcome
            fresh = BufferPool(idle_limit_bytes=0)
            outcome = self._read_shielded(want, fresh, fresh)
        except Forged:
            self.counters["forged"] += 1
            self.suspects.hide(want.id)
            return MissReason.CORRUPT
        if outcome is MissReason.CORRUPT:
            self.suspects.accuse(want.id, record_key(want.id))
        elif isinstance(outcome, ReadPart):
            self.suspects.slipped(want.id)
        return outcome

    def _read_shielded(
        self, want: Want, landing: BufferSource, heads: BufferSource
    ) -> ReadPart | MissReason:
        try:
            self.agree()
            return self._read(want, landing, heads)
        except InvalidInput:
            return MissReason.NO_KEY
        except FileNotFoundError:
            return MissReason.ABSENT
        except OSError:
            return MissReason.IO_ERROR
        except CapacityExceeded:
            return MissReason.BUSY
        except BadRange:
            return MissReason.BAD_RANGE
        except NoKey:
            return MissReason.NO_KEY
        except OtherFormat:
            return MissReason.OTHER_FORMAT
        except Forged:
            raise
        except Corrupt:
            return MissReason.CORRUPT

    def _read(
        self, want: Want, landing: BufferSource, heads: BufferSource
    ) -> ReadPart | MissReason:
        key = record_key(want.id)
        header, seal = open_header(self._header(key, heads), self._keys)
        check_place(header, NOWHERE, 0, 0)
        if header.meta.id != want.id:
            raise Corrupt("another artifact's record")
        if want.descriptor is not None and want.descriptor != header.meta.descriptor:
            return MissReason.FOREIGN_LAYOUT
        low, high = span_of(want, header.meta.units, header.payload_bytes)
        first, end = chunk_span(low, high, header.payload_bytes)
        chunks = landing.take(end - first)
        if self._blobs.get_into(key, header.header_bytes + first, chunks) < len(chunks):
            raise Corrupt("the blob ends within the record")
        open_chunks(chunks, header, seal, first // CHUNK)
        return ReadPart(header.meta, chunks[low - first : high - first])

    def reserve(self, meta: Meta, payload_bytes: int) -> Reservation | AlreadyStored | WriteRefused:
        """Reserve a buffer; what the medium has no room for is refused at commit. Raises
        InvalidInput for an impossible meta.
        """
        meta.check()
        reason = self._why_not(meta, payload_bytes)
        if reason is not None:
            return self._refuse(reason, meta.id)
        if self.find([meta.id]):
            return self._stands(meta.id)
        seal = self._keys.for_write(meta.tenant)
        assert seal is not None
        head, total = record_room(meta, payload_bytes, seal)
        refused = self._make_room(meta, head + payload_bytes)
        if refused is not None:
            return self._refuse(refused, meta.id)
        try:
            return Reservation(meta, self._landing.take(total), (head, payload_bytes))
        except CapacityExceeded:
            return self._refuse(RefusalReason.BUSY, meta.id)

    def _make_room(self, meta: Meta, stored_bytes: int) -> RefusalReason | None:
        try:
            victims = self._catalogue.make_room(meta, stored_bytes)
        except (OSError, Backpressure):
            self.counters["io_errors"] += 1
            return RefusalReason.IO_ERROR
        if isinstance(victims, RefusalReason):
            return victims
        gone = sum(self._delete(row) for row in victims)
        self.counters["evicted"] += gone
        return None if gone == len(victims) else RefusalReason.IO_ERROR

    def _why_not(self, meta: Meta, payload_bytes: int) -> RefusalReason | None:
        if not 0 < payload_bytes <= MAX_PAYLOAD or payload_bytes % meta.units:
            return RefusalReason.TOO_LARGE
        if not self.health.writable(self._clock.now()):
            return RefusalReason.IO_ERROR
        try:
            self.agree()
        except InvalidInput:
            return RefusalReason.NO_KEY
        except Backpressure:
            return RefusalReason.BUSY
        except OSError as error:
            self.counters["io_errors"] += 1
            self.health.failed(error, self._clock.now())
            return RefusalReason.IO_ERROR
        return RefusalReason.NO_KEY if self._keys.for_write(meta.tenant) is None else None

    def _refuse(self, reason: RefusalReason, id_: bytes) -> WriteRefused:
        self.counters[f"refused_{reason}"] += 1
        return WriteRefused(reason, id_)

    def commit(self, reservations: Sequence[Reservation]) -> tuple[WriteOutcome, ...]:
        """Write each record on its own: the medium has no group commit."""
        return tuple(self._commit(reserved) for reserved in reservations)

    def _commit(self, reserved: Reservation) -> WriteOutcome:
        meta, seal = reserved.meta, self._keys.for_write(reserved.meta.tenant)
        assert seal is not None
        record = reserved.take()
        now_ms = int(self._clock.now() * 1000)
        header = draft(record, meta, reserved.payload_bytes, seal=seal, now_ms=now_ms)
        record = record[: header.header_bytes + header.payload_bytes]
        try:
            # The entry first: a record that nobody lists could not be purged. After a failure both
            # are left: another node may have written them, and an entry without a record expires.
            self._catalogue.write(meta, len(record))
            self._blobs.put_new(record_key(meta.id), record)
        except FileExistsError:
            return self._stands(meta.id)  # another node was first; its catalogue entry is as long
        except Backpressure:
            return self._refuse(RefusalReason.BUSY, meta.id)
        except OSError as error:
            self.counters["io_errors"] += 1
            self.health.failed(error, self._clock.now())
            return self._refuse(RefusalReason.IO_ERROR, meta.id)
        self.health.worked()
        self.suspects.clear(meta.id)
        self.counters["stored"] += 1
        return WriteDone(meta.id, len(record))

    def _stands(self, id_: bytes) -> AlreadyStored | WriteRefused:
        """Answer for a record that another node wrote, once it is durable."""
        try:
            self._blobs.settle(record_key(id_))
        except Backpressure:
            return self._refuse(RefusalReason.BUSY, id_)
        except OSError as error:
            self.counters["io_errors"] += 1
            self.health.failed(error, self._clock.now())
            return self._refuse(RefusalReason.IO_ERROR, id_)
        return AlreadyStored(id_)

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation up; nothing of it was written."""
        reservation.take()

    def remove(self, ids: Sequence[bytes]) -> int:
        """Remove records; returns how many there were. Of one whose header can't be read the
        catalogue's entry stays, until it expires.
        """
        found = self._listed(ids)
        for record in found.values():
            self._delete(parse(catalogue_key(record.meta, record.stored_bytes), 0.0))
        for id_ in ids:
            if id_ not in found:
                with suppress(OSError, Backpressure):
                    self._blobs.delete(record_key(id_))
            self.suspects.clear(id_)
        return len(found)

    def _delete(self, row: CatalogueRow) -> int:
        try:
            self._blobs.delete(record_key(row.record.meta.id))
            self._catalogue.delete(row)
        except (OSError, Backpressure):
            self.counters["io_errors"] += 1
            return 0
        return 1

    def _rows(self, under: str = "catalogue/") -> list[CatalogueRow]:
        try:
            return list(self._catalogue.rows(under))
        except (OSError, Backpressure):
            self.counters["io_errors"] += 1
            return []

    def expire(self, most: int = EVERY_RECORD) -> int:
        """Remove what was not used for its kind's TTL, at most so many records, and what dead
        writers left."""
        now_s = self._clock.now()
        with suppress(OSError, Backpressure):
            self._catalogue.note_uses()
            self.counters["tidied"] += self._blobs.tidy(now_s - UNFINISHED_S)
        self.suspects.expire()
        gone = 0
        for row in self._rows():
            if gone >= most:
                break
            ttl_s = self._ttls.of(row.record.meta.kind).ttl_s
            if ttl_s is not None and row.record.touched_s < now_s - ttl_s:
                gone += self._delete(row)
        return gone

    def purge(self, tenant: bytes) -> int:
        """Remove every record of a tenant, quarantined ones too; returns how many."""
        gone = 0
        for row in self._rows(under_tenant(tenant)):
            with suppress(OSError, Backpressure):
                self.suspects.forget(row.record.meta.id)
            gone += self._delete(row)
        return gone

    def price(self, costs_ms: Mapping[bytes, float]) -> None:
        """Write what artifacts cost to make again into the catalogue, where all nodes see it; only
        when room is managed.
        """
        with suppress(OSError, Backpressure):
            self._catalogue.price(costs_ms)

    def usage(self) -> Mapping[tuple[bytes, ArtifactKind], TierUsage]:
        """Return what the catalogue lists, by tenant and kind; makes one listing."""
        total: dict[tuple[bytes, ArtifactKind], TierUsage] = {}
        for row in self._rows():
            meta, size = row.record.meta, row.record.stored_bytes
            used = total.get((meta.tenant, meta.kind), TierUsage())
            total[meta.tenant, meta.kind] = TierUsage(used.stored_bytes + size, used.records + 1)
        return total

    def close(self) -> None:
        """Write down what was used; nothing is held open."""
        with suppress(OSError, Backpressure):
            self._catalogue.note_uses()
