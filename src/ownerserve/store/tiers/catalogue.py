"""A catalogue is what a remote medium holds, kept in the medium itself: one small blob a record,
and room by it.

    catalogue/TENANT/KIND/ID-BYTES    body: empty, or the value of the record (17 bytes)

The name never changes, so that usage, expiry and purge need a listing and no read. The body is
written again when a price is known or the record was read; its modification time is the recency.
Many nodes write it and the last one stays: a lost update is a worse choice of victim, no more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

from ownerserve.kv.clock import Clock
from ownerserve.store.format.model import (
    SHARED,
    ArtifactKind,
    Listed,
    Meta,
    RefusalReason,
    TierUsage,
)
from ownerserve.store.tiers.blobs import Blobs
from ownerserve.store.tiers.ledger import Ledger
from ownerserve.store.tiers.policy import ExpectedUse, TierLimits

_SHARED_NAME = "shared"
_VALUE = struct.Struct("<BdQ")  # version 1, restore cost in ms, uses
LISTING_S = 300.0
"""A listing is this old at most before room is made by it: other nodes write too."""


class CatalogueRow(NamedTuple):
    """A row is a catalogue entry. Of the record's meta only id, tenant and kind are known here."""

    key: str
    record: Listed


def catalogue_key(meta: Meta, stored_bytes: int) -> str:
    """Return the name of a record's entry."""
    tenant = meta.tenant.hex() or _SHARED_NAME
    return f"catalogue/{tenant}/{meta.kind.name.lower()}/{meta.id.hex()}-{stored_bytes}"


def under_tenant(tenant: bytes) -> str:
    """Return the prefix of the names of a tenant's entries."""
    return f"catalogue/{tenant.hex() or _SHARED_NAME}/"


def parse(key: str, modified_s: float) -> CatalogueRow:
    """Return the entry that `key` names; raises ValueError or KeyError when it names none."""
    _, owner, kind, name = key.split("/")
    id_hex, _, size = name.partition("-")
    id_ = bytes.fromhex(id_hex)
    tenant = SHARED if owner == _SHARED_NAME else bytes.fromhex(owner)
    meta = Meta(id_, ArtifactKind[kind.upper()], "", bytes(32), 0, 0, tenant=tenant)
    return CatalogueRow(key, Listed(meta, int(size), int(size), modified_s))


class Catalogue:
    """A catalogue holds the entries of one medium. Room is managed when there are `limits`, else it
    is the medium's.

    Thread-safe. With limits it remembers every entry it listed or wrote, about 1 KiB each.
    """

    def __init__(
        self, blobs: Blobs, clock: Clock, limits: TierLimits | None, expected: ExpectedUse
    ) -> None:
        self._blobs = blobs
        self._clock = clock
        self._limits = limits
        self._expected = expected
        self._rows: dict[bytes, CatalogueRow] = {}
        self._standing: dict[tuple[bytes, ArtifactKind], TierUsage] = {}
        self._value_known: set[bytes] = set()
        self._listed_s: float | None = None
        self._uses: dict[bytes, int] = {}
        self._lock = Lock()

    def rows(self, under: str = "catalogue/") -> Iterator[CatalogueRow]:
        """List the entries under a prefix. Raises what the medium raises; what is no entry is
        passed over.
        """
        for blob in self._blobs.list(under):
            with suppress(ValueError, KeyError):
                yield parse(blob.key, blob.modified_s)

    def write(self, meta: Meta, stored_bytes: int) -> None:
        """Enter a record, before it is written."""
        row = parse(catalogue_key(meta, stored_bytes), self._clock.now())
        self._blobs.put(row.key, memoryview(b""))
        with self._lock:
            self._forget(meta.id)
            self._remember(row)
            self._value_known.add(meta.id)

    def delete(self, row: CatalogueRow) -> None:
        """Delete a record's entry: the record is gone."""
        self._blobs.delete(row.key)
        with self._lock:
            self._forget(row.record.meta.id)

    def _remember(self, row: CatalogueRow) -> None:
        if self._limits is not None:
            self._rows[row.record.meta.id] = row
            self._count(row.record, 1)

    def _forget(self, id_: bytes) -> None:
        row = self._rows.pop(id_, None)
        self._value_known.discard(id_)
        if row is not None:
            self._count(row.record, -1)

    def _count(self, record: Listed, sign: int) -> None:
        key = (record.meta.tenant, record.meta.kind)
        used = self._standing.get(key, TierUsage())
        self._standing[key] = TierUsage(
            used.stored_bytes + sign * record.stored_bytes, used.records + sign
        )

    def used(self, id_: bytes) -> None:
        """Note that a record was read, until `note_uses`; one that is not listed here is passed
        over.
        """
        with self._lock:
            if id_ in self._rows:
                self._uses[id_] = self._uses.get(id_, 0) + 1

    def note_uses(self) -> None:
        """Write down what was read since: it moves these records away from the end."""
        with self._lock:
            uses, self._uses = self._uses, {}
            rows = [(self._rows[id_], count) for id_, count in uses.items() if id_ in self._rows]
        for row, count in rows:
            record = self._with_value(row).record
            self._write_value(row, record.restore_cost_ms, record.reuse_count + count)

    def price(self, costs_ms: Mapping[bytes, float]) -> None:
        """Note what records cost to make again, of those that this node knows to be here."""
        with self._lock:
            known = [(self._rows[id_], ms) for id_, ms in costs_ms.items() if id_ in self._rows]
        for row, cost_ms in known:
            record = self._with_value(row).record
            if abs(cost_ms - record.restore_cost_ms) > 0.1 * record.restore_cost_ms:
                self._write_value(row, cost_ms, record.reuse_count)

    def _write_value(self, row: CatalogueRow, cost_ms: float, uses: int) -> None:
        self._blobs.put(row.key, memoryview(_VALUE.pack(1, cost_ms, uses)))
        self._learn(row, self._clock.now(), (cost_ms, uses))

    def _with_value(self, row: CatalogueRow) -> CatalogueRow:
        """Return the row with price and uses as the medium has them, read once for each listing."""
        id_ = row.record.meta.id
        with self._lock:
            if id_ in self._value_known:
                return self._rows.get(id_, row)
        body = memoryview(bytearray(_VALUE.size))
        cost_ms, uses = 0.0, 0
        if self._blobs.get_into(row.key, 0, body) == _VALUE.size and body[0] == 1:
            _, cost_ms, uses = _VALUE.unpack(body)
        return self._learn(row, row.record.touched_s, (cost_ms, uses))

    def _learn(self, row: CatalogueRow, touched_s: float, value: tuple[float, int]) -> CatalogueRow:
        cost_ms, uses = value
        old = row.record
        listed = Listed(old.meta, old.payload_bytes, old.stored_bytes, touched_s, uses, cost_ms)
        with self._lock:
            id_ = old.meta.id
            if id_ in self._rows:
                self._rows[id_] = CatalogueRow(row.key, listed)
                self._value_known.add(id_)
        return CatalogueRow(row.key, listed)

    def make_room(self, meta: Meta, stored_bytes: int) -> Sequence[CatalogueRow] | RefusalReason:
        """Return the rows whose records must go first, the least useful for their bytes; a refusal
        when no room can be made.
        """
        if self._limits is None:
            return ()
        self._refresh()
        ledger = Ledger(self._limits, self._standing)
        victims = ledger.make_room(
            meta, stored_bytes, oldest=self._oldest, order=self._expected.order(self._clock.now())
        )
        if isinstance(victims, RefusalReason):
            return victims
        with self._lock:
            found = [self._rows.get(victim.meta.id) for victim in victims]
        return [row for row in found if row is not None]

    def _refresh(self) -> None:
        now_s = self._clock.now()
        if self._listed_s is not None and 0 <= now_s - self._listed_s < LISTING_S:
            return
        rows = list(self.rows())
        with self._lock:
            old, known = self._rows, self._value_known
            self._rows, self._standing, self._value_known = {}, {}, set()
            for row in rows:
                id_ = row.record.meta.id
                same = id_ in known and old[id_].record.touched_s >= row.record.touched_s
                self._remember(old[id_] if same else row)
                self._value_known |= {id_} if same else set()
            self._listed_s = now_s

    def _oldest(self, kind: ArtifactKind, limit: int, tenant: bytes | None) -> Sequence[Listed]:
        with self._lock:
            rows = [
                row
                for row in self._rows.values()
                if row.record.meta.kind is kind and tenant in (None, row.record.meta.tenant)
            ]
        rows.sort(key=lambda row: row.record.touched_s)
        return [self._with_value(row).record for row in rows[:limit]]
