"""TierBackend is the port every tier implements: host memory, disk, remote, peer. One contract
suite over all.

    find      what is there; a hint, the read decides
    read      all wants, verified, or a miss; never a part, never an exception for bad bytes
    reserve   room and a buffer, before anything is written; an open reservation is the pin
    commit    durable (as durable as the tier is) and readable, many at once
    abort     the room is free again
    price     what an artifact costs to make again: what eviction and demotion go by
    remove    records gone (evicted, demoted, purged)

A tier never raises for what a medium does: EIO, a full disk or a lost peer is a refusal or a miss,
counted, warned about once. Calls may block: the runtime makes them on its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from ownerserve.store.format.model import (
    AlreadyStored,
    ArtifactKind,
    Listed,
    Meta,
    ReadOutcome,
    TierUsage,
    Want,
    WriteOutcome,
    WriteRefused,
)
from ownerserve.store.tiers.buffers import BufferSource


class Reservation:
    """A reservation is room for one record. Fill `payload`, then commit or abort, once.

    After either, the buffer is the tier's: `payload` is released and a later write to it raises.
    `level` is that of the tier that made it, where tiers are composed. `former` is what another
    store knew of the record, whose age, uses and price it keeps on disk; None: it is new.
    """

    __slots__ = (
        "former", "level", "meta", "open", "payload", "payload_bytes", "record", "stored_bytes",
    )  # fmt: skip

    def __init__(self, meta: Meta, record: memoryview, at: tuple[int, int]) -> None:
        head, payload_bytes = at
        self.meta = meta
        self.record = record
        self.payload_bytes = payload_bytes
        self.stored_bytes = len(record)
        self.payload = record[head : head + payload_bytes]
        self.open = True
        self.level = 0
        self.former: Listed | None = None

    def take(self) -> memoryview:
        """Spend the reservation and return the record's buffer; raises ValueError the second
        time.
        """
        if not self.open:
            raise ValueError("a reservation is committed or aborted once")
        self.open = False
        self.payload.release()
        record, self.record = self.record, memoryview(b"")
        return record


EVERY_RECORD = 1 << 62
"""How many records a call may take that is to take all of them."""


class TierBackend(Protocol):
    """A tier is one place where artifacts are kept."""

    @property
    def name(self) -> str:
        """Return the tier's name, as outcomes and logs have it."""
        ...

    def find(self, ids: Sequence[bytes]) -> Mapping[bytes, Listed]:
        """Return what is here of `ids`; what can't be read is left out."""
        ...

    def read(self, wants: Sequence[Want], landing: BufferSource | None = None) -> ReadOutcome:
        """Read and verify all wants, or give a miss. `landing` gives the memory, where the tier
        needs any.
        """
        ...

    def reserve(self, meta: Meta, payload_bytes: int) -> Reservation | AlreadyStored | WriteRefused:
        """Reserve room for one record of `payload_bytes`. Raises InvalidInput for an impossible
        meta.
        """
        ...

    def commit(self, reservations: Sequence[Reservation]) -> tuple[WriteOutcome, ...]:
        """Make filled reservations readable, and durable where the tier is; one outcome for
        each.
        """
        ...

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation's room back; nothing of it is kept."""
        ...

    def remove(self, ids: Sequence[bytes]) -> int:
        """Remove records; returns how many there were."""
        ...

    def expire(self, most: int = EVERY_RECORD) -> int:
        """Remove what has not been touched for its kind's TTL, at most `most` records; returns how
        many.
        """
        ...

    def purge(self, tenant: bytes) -> int:
        """Remove every record of a tenant; returns how many."""
        ...

    def price(self, costs_ms: Mapping[bytes, float]) -> None:
        """Note what it costs, in ms, to make these artifacts again; those not here are passed
        over.
        """
        ...

    def usage(self) -> Mapping[tuple[bytes, ArtifactKind], TierUsage]:
        """Return the bytes and records that stand, by tenant and kind."""
        ...

    def close(self) -> None:
        """Let go of what the tier holds open; nothing may be asked of it afterwards."""
        ...


OnEvict = Callable[[Listed, Callable[[], memoryview | None]], None]
"""Called with each record that must make room, before it goes, and a way to get its bytes, which
may read the medium: verified, or None when they are bad."""


OnRemoved = Callable[[Sequence[Meta]], None]
"""Called with what was evicted, expired, purged or quarantined, after it went; on the thread that
did it, under the tier's lock: it must be short."""


def nobody_listens(metas: Sequence[Meta]) -> None:
    """Do nothing: the OnRemoved of a tier that nobody asks."""


@runtime_checkable
class Telling(Protocol):
    """A telling tier tells what it holds no more, whatever the reason."""

    on_removed: OnRemoved


@runtime_checkable
class Evicting(Protocol):
    """An evicting tier tells what it evicts. `on_evict` None: nobody listens."""

    on_evict: OnEvict | None


def put(tier: TierBackend, meta: Meta, payload: bytes | memoryview) -> WriteOutcome:
    """Reserve, fill and commit one artifact."""
    reserved = tier.reserve(meta, len(payload))
    if not isinstance(reserved, Reservation):
        return reserved
    reserved.payload[:] = payload
    return tier.commit([reserved])[0]
