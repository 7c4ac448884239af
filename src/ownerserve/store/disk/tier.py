"""The disk tier has one writer and any number of reading threads.

Owns the store's directory while open. Composes what does the work: `append` writes, `read`
reads, the index remembers, `reclaim` gives back, `policy` chooses. Nothing here raises for
what the medium does; see `tiers.backend`.

    reserve   room by policy (evicting if need be) and a buffer; nothing on disk yet
    commit    seal -> append all -> one fdatasync -> one index transaction -> acknowledged
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import TypeVar

import msgspec

from ownerserve.kv.clock import Clock
from ownerserve.kv.errors import CapacityExceeded, OwnerServeError
from ownerserve.store.disk.append import RecordDraft, tell
from ownerserve.store.disk.home import Home
from ownerserve.store.disk.keyring import open_keys
from ownerserve.store.disk.read import DiskReader, OpenSegments
from ownerserve.store.disk.recover import Recovered, discard_index, rebuild, recover
from ownerserve.store.disk.scan import records
from ownerserve.store.disk.superblock import DEFAULT_SEGMENT_BYTES
from ownerserve.store.format.header import BLOCK, MAX_PAYLOAD
from ownerserve.store.format.model import (
    AlreadyStored,
    ArtifactKind,
    Listed,
    Meta,
    ReadHit,
    ReadMiss,
    ReadOutcome,
    RefusalReason,
    TierUsage,
    Want,
    WriteDone,
    WriteOutcome,
    WriteRefused,
)
from ownerserve.store.format.seal import Keys, SealKind
from ownerserve.store.format.segment import Segment, segment_path
from ownerserve.store.format.verify import draft, record_room
from ownerserve.store.index.reader import (
    Change,
    IndexEntry,
    IndexFailed,
    Quarantined,
    SegmentSpan,
    Touch,
)
from ownerserve.store.tiers.backend import (
    EVERY_RECORD,
    OnEvict,
    OnRemoved,
    Reservation,
    nobody_listens,
)
from ownerserve.store.tiers.buffers import BufferPool, BufferSource
from ownerserve.store.tiers.health import Health
from ownerserve.store.tiers.ledger import Ledger
from ownerserve.store.tiers.policy import Order, TierLimits, WriteBudget, by_utility, choose

log = logging.getLogger("ownerserve.store")

SEGMENTS_AT_LEAST = 8
"""A full store has at least so many segments: what the open one has preallocated and what lies dead
where there are no holes is little beside the capacity."""
_FLUSH_AT = 4096
"""Reads of so many records are remembered before the index hears of them."""
T = TypeVar("T")


class DiskCore:
    """A disk tier's core is an open store's parts, and the steps that the tier, its reader and
    maintenance share.

    Owns the writer's two locks, the touches not yet in the index, and the counters. `appending` is
    held by who appends, across its I/O; `lock` by who changes the index or the accounts, for short.
    Who needs both takes `appending` first (`exclusive`). Every method is called with `lock` held,
    except `touch`, which needs none, and those that take it.
    """

    def __init__(
        self, home: Home, keys: Keys, clock: Clock, *, parts: Recovered, budget: WriteBudget | None
    ) -> None:
        self.home = home
        self.keys = keys
        self.clock = clock
        self.index = parts.index
        self.appender = parts.appender
        self.reclaimer = parts.reclaimer
        self.appending = RLock()
        self.lock = RLock()
        self.budget = budget
        self.health = Health(f"store {home.directory}")
        self.counters: Counter[str] = Counter()
        self._touched: dict[int, Touch] = {}

    def now_ms(self) -> int:
        """Return the clock's reading as the format keeps it, in whole milliseconds."""
        return int(self.clock.now() * 1000)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Hold the lock; what the medium does wrong is noted and goes no further."""
        with self.lock:
            try:
                yield
            except (OSError, IndexFailed) as error:
                self.trouble(error)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold both locks: nothing is being appended, so every record on disk is in the index."""
        with self.appending, self.shielded():
            yield

    def attempt(self, step: Callable[[], T], otherwise: T) -> T:
        """Take the step and return its result; `otherwise` when the medium failed."""
        with self.shielded():
            return step()
        return otherwise  # type: ignore[unreachable]  # mypy: a context manager may swallow

    def trouble(self, error: object) -> None:
        """Count a failed write and let `health` pause the next ones."""
        self.counters["io_errors"] += 1
        self.health.failed(error, self.clock.now())

    def touch(self, entries: Iterable[IndexEntry]) -> None:
        """Remember that `entries` were read; a crash loses recency and nothing else.

        The method takes no lock, since every read comes through here: at worst one touch of two is
        lost.
        """
        now_ms, touched = self.now_ms(), self._touched
        for entry in entries:
            touch = touched.get(entry.sequence)
            if touch is None:
                touched[entry.sequence] = Touch(entry, now_ms)
            else:
                touch.at_ms, touch.times = now_ms, touch.times + 1
        if len(touched) >= _FLUSH_AT:
            with self.shielded():
                self.flush()

    def flush(self) -> None:
        """Write recency and reuse counts of the reads so far into the index."""
        touched, self._touched = self._touched, {}
        if touched:
            self.index.apply(Change(touched=list(touched.values())))

    def find(self, ids: Sequence[bytes]) -> dict[bytes, Listed]:
        """Return what the index has of `ids`, reads not yet flushed included. Needs no lock."""
        found = {}
        for id_, entry in self.index.get_many(ids).items():
            touch = self._touched.get(entry.sequence)
            found[id_] = (entry if touch is None else touch.applied()).listed()
        return found

    def evict(self, ids: Sequence[bytes]) -> int:
        """Remove records; returns how many there were."""
        entries = list(self.index.get_many(ids).values()) if ids else []
        if entries:
            self.reclaimer.remove(entries)
            self.reclaimer.drop_empty()
            self.counters["evicted"] += len(entries)
        return len(entries)

    def oldest(self, kind: ArtifactKind, limit: int, tenant: bytes | None = None) -> list[Listed]:
        """List up to `limit` records of a kind (of a tenant), least recently touched first."""
        return [entry.listed() for entry in self.index.oldest(kind, limit, tenant=tenant)]

    def oldest_flushed(self, kind: ArtifactKind, limit: int) -> list[Listed]:
        """List up to `limit` records of a kind, least recently touched first, the latest reads
        counted; none when the index fails.
        """

        def step() -> list[Listed]:
            self.flush()
            return self.oldest(kind, limit)

        return self.attempt(step, [])

    def price(self, costs_ms: Mapping[bytes, float]) -> None:
        """Note what it costs to make these artifacts again."""
        with self.shielded():
            entries = self.index.get_many(list(costs_ms))
            self.index.apply(Change(priced={e.sequence: costs_ms[i] for i, e in entries.items()}))
            for id_ in entries:
                self.index.forget(id_)

    def quarantine(self, entry: IndexEntry, reason: str) -> None:
        """Put aside a record that failed verification: it is a miss from now on, kept for
        inspection until gc. Where the index has two records in one place it is the index that
        failed.
        """
        with self.shielded():
            standing = self.index.get(entry.meta.id)
            if standing is None or standing.sequence != entry.sequence:
                return
            if self.index.overlaps(entry):
                self.index.is_damaged = True
                return
            bad = Quarantined(entry.meta.id, entry.meta.tenant, entry.span, reason, self.now_ms())
            self.index.apply(Change(remove=[entry], quarantine=[bad]))
            self.counters["quarantined"] += 1
            log.warning(
                "%s: record %s in segment %d at %d quarantined: %s",
                self.health.name,
                entry.meta.id.hex()[:16],
                entry.segment,
                entry.offset,
                reason,
            )


def spend(core: DiskCore, count: int) -> None:
    """Count bytes written against the write budget, if there is one."""
    if core.budget is not None:
        core.budget.spend(count, core.clock.now())


def release_quarantine(core: DiskCore, before_s: float, tenant: bytes | None = None) -> int:
    """Erase quarantined records older than `before_s` (of one tenant)."""
    old = [
        bad
        for bad in core.index.quarantined()
        if bad.at_ms < before_s * 1000 and tenant in (None, bad.tenant)
    ]
    core.index.release(old)
    core.reclaimer.erase([bad.span for bad in old])
    return len(old)


def purge_tenant(core: DiskCore, tenant: bytes) -> int:
    """Remove a tenant's records: indexed, quarantined, and any copy the segments still hold.

    The segments are the truth, so all their headers are read: O(records), not O(tenant's).
    """
    gone = 0
    while entries := [entry.meta.id for entry in islice(core.index.walk(tenant=tenant), 1024)]:
        gone += core.evict(entries)
    release_quarantine(core, core.clock.now() + 1, tenant)
    for number in core.home.segment_numbers():
        segment = Segment(segment_path(core.home.directory, number), os.O_RDWR)
        spans = [
            SegmentSpan(number, header.place.offset, header.record_bytes)
            for header in records(segment, BLOCK, core.home.store_id)
            if header.meta.tenant == tenant
        ]
        if spans:
            core.index.apply(Change(doom=spans))
            core.reclaimer.erase(spans)
            gone += len(spans)
    core.counters["purged"] += gone
    return gone


class StoreUnavailable(OwnerServeError):
    """The operator must act: the medium does not let the store be opened. Serve without it."""


class Index(Enum):
    """Index says what becomes of the index when a store is opened."""

    KEPT = "kept"
    MADE_ANEW = "made anew"
    """Dropped once the store is ours alone, and made from the segments."""


class DiskOptions(msgspec.Struct, frozen=True):
    """DiskOptions say how a store on disk is opened. `key_file` None: the store's own KEY file."""

    limits: TierLimits = TierLimits()
    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    key_file: Path | None = None
    at_rest: SealKind = SealKind.BLAKE3
    write_budget: WriteBudget | None = None
    order: Order = by_utility
    index: Index = Index.KEPT


class DiskTier:
    """A disk tier keeps artifacts in segments under one directory. Implements
    `backend.TierBackend`.
    """

    name = "disk"

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        *,
        options: DiskOptions | None = None,
        landing: BufferSource | None = None,
    ) -> None:
        self._options = options or DiskOptions()
        self.limits = self._options.limits
        self._landing = landing or BufferPool()
        segments, parts, keys, home = self._open(directory)
        self.recovery = parts.report
        self.on_evict: OnEvict | None = None
        self.on_removed: OnRemoved = nobody_listens
        parts.index.on_removed = lambda metas: self.on_removed(metas)
        self.core = DiskCore(home, keys, clock, parts=parts, budget=self._options.write_budget)
        self._ledger = Ledger(self._options.limits, parts.index.standing)
        self._reader = DiskReader(
            home,
            parts.index,
            keys,
            segments=segments,
            landing=self._landing,
            listeners=(self.core.touch, self.core.quarantine),
        )

    def _open(self, directory: Path) -> tuple[OpenSegments, Recovered, Keys, Home]:
        options = self._options
        try:
            home = Home.create_or_open(directory, options.segment_bytes)
            home.cap_segments(options.limits.capacity_bytes // SEGMENTS_AT_LEAST)
            try:
                keys = open_keys(home, options.key_file, options.at_rest)
                if options.index is Index.MADE_ANEW:
                    discard_index(home)
                segments = OpenSegments(home)
                parts = recover(home, keys, segments=segments, landing=self._landing)
            except BaseException:
                home.unlock()
                raise
        except OSError as error:
            raise StoreUnavailable(f"store {directory}: {error}") from error
        return segments, parts, keys, home

    def find(self, ids: Sequence[bytes]) -> Mapping[bytes, Listed]:
        """Return what the index has of `ids`; nothing when the index fails."""
        try:
            return self.core.find(ids)
        except IndexFailed:
            self.core.counters["io_errors"] += 1
            return {}

    def read(self, wants: Sequence[Want], landing: BufferSource | None = None) -> ReadOutcome:
        """Read and verify all wants, or give a miss."""
        outcome = self._reader.read(wants, landing)
        if isinstance(outcome, ReadMiss):
            self.core.counters[f"miss_{outcome.reason}"] += 1
        else:
            self.core.counters["hit"] += 1
        return outcome

    def reserve(self, meta: Meta, payload_bytes: int) -> Reservation | AlreadyStored | WriteRefused:
        """Reserve room for one record, evicting by policy. Raises InvalidInput for an impossible
        meta.
        """
        meta.check()
        if not 0 < payload_bytes <= MAX_PAYLOAD or payload_bytes % meta.units:
            return self._refuse(RefusalReason.TOO_LARGE, meta.id)

        def step() -> Reservation | AlreadyStored | RefusalReason:
            try:
                return self._reserve(meta, payload_bytes)
            except CapacityExceeded:
                return RefusalReason.BUSY

        refused: Reservation | AlreadyStored | RefusalReason = RefusalReason.IO_ERROR
        outcome = self._mending(step, refused)
        return self._refuse(outcome, meta.id) if isinstance(outcome, RefusalReason) else outcome

    def _refuse(self, reason: RefusalReason, id_: bytes) -> WriteRefused:
        self.core.counters[f"refused_{reason}"] += 1
        return WriteRefused(reason, id_)

    def _reserve(
        self, meta: Meta, payload_bytes: int
    ) -> Reservation | AlreadyStored | RefusalReason:
        core, now_s = self.core, self.core.clock.now()
        if core.index.get(meta.id) is not None:
            return AlreadyStored(meta.id)
        if self._ledger.is_held(meta.id):
            return RefusalReason.BUSY
        if not core.health.writable(now_s):
            return RefusalReason.IO_ERROR
        seal = core.keys.for_write(meta.tenant)
        if seal is None:
            return RefusalReason.NO_KEY
        head, total = record_room(meta, payload_bytes, seal)
        if core.budget is not None and not core.budget.admit(total, now_s):
            return RefusalReason.WRITE_BUDGET
        core.flush()  # eviction goes by true ages
        victims = self._ledger.make_room(meta, total, oldest=core.oldest, order=self._options.order)
        if isinstance(victims, RefusalReason):
            return victims
        room = self._landing.take(total)
        self._tell(victims)
        core.evict([victim.meta.id for victim in victims])
        reservation = Reservation(meta, room, (head, payload_bytes))
        self._ledger.hold(reservation)
        return reservation

    def _tell(self, victims: Sequence[Listed]) -> None:
        """Tell who listens of the records that are about to go, while their bytes still stand."""
        for victim in victims if self.on_evict is not None else ():
            assert self.on_evict is not None
            self.on_evict(victim, partial(self._whole, victim.meta.id))

    def _whole(self, id_: bytes) -> memoryview | None:
        outcome = self._reader.read([Want(id_)], None)
        return outcome.parts[0].data if isinstance(outcome, ReadHit) else None

    def commit(self, reservations: Sequence[Reservation]) -> tuple[WriteOutcome, ...]:
        """Make all reservations durable with one sync; when the medium fails, each is refused."""
        core = self.core
        now_ms = core.now_ms()
        rooms = [(reserved, reserved.take()) for reserved in reservations]
        with core.appending:
            try:
                sealed = (self._seal(reserved, room, now_ms) for reserved, room in rooms)
                done = core.appender.append(sealed, now_ms)
                with core.lock:
                    tell(core.appender, core.index, done)
                    self._account(done.entries)
                return tuple(WriteDone(entry.meta.id, entry.stored_bytes) for entry in done.entries)
            except (OSError, IndexFailed) as error:
                with core.lock:
                    core.trouble(error)
                ids = [reserved.meta.id for reserved in reservations]
                return tuple(self._refuse(RefusalReason.IO_ERROR, id_) for id_ in ids)
            finally:
                with core.lock:
                    for reserved in reservations:  # held until the index says it instead
                        self._ledger.release(reserved)

    def _account(self, stored: Sequence[IndexEntry]) -> None:
        core = self.core
        core.health.worked()
        written = sum(entry.stored_bytes for entry in stored)
        core.counters["stored"] += len(stored)
        core.counters["stored_bytes"] += written
        spend(core, written)

    def _seal(self, reserved: Reservation, room: memoryview, now_ms: int) -> RecordDraft:
        meta, payload_bytes = reserved.meta, reserved.payload_bytes
        seal = self.core.keys.for_write(meta.tenant)
        assert seal is not None  # reserve saw it
        header = draft(room, meta, payload_bytes, seal=seal, now_ms=now_ms)
        old = reserved.former
        if old is None:
            return RecordDraft(header, room, now_ms)
        touched_ms = min(now_ms, int(old.touched_s * 1000))
        return RecordDraft(header, room, touched_ms, old.reuse_count, old.restore_cost_ms)

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation's room back; nothing of it was written."""
        with self.core.lock:
            reservation.take()
            self._ledger.release(reservation)

    def remove(self, ids: Sequence[bytes]) -> int:
        """Remove records; returns how many there were."""
        return self._mending(lambda: self.core.evict(ids), 0)

    def expire(self, most: int = EVERY_RECORD) -> int:
        """Remove what has not been touched for its kind's TTL, at most so many records."""
        gone = 0
        self._mend()
        for kind in ArtifactKind:
            ttl_s = self._options.limits.of(kind).ttl_s
            while ttl_s is not None and gone < most:
                before_s = self.core.clock.now() - ttl_s
                late = [
                    r.meta.id
                    for r in self.core.oldest_flushed(kind, min(1024, most - gone))
                    if r.touched_s < before_s
                ]
                removed = self.remove(late)
                gone += removed
                if not removed:
                    break
        return gone

    def price(self, costs_ms: Mapping[bytes, float]) -> None:
        """Note what it costs to make these artifacts again; eviction gives up the cheapest."""
        self.core.price(costs_ms)

    def shrink(self) -> int:
        """Evict what stands beyond the limits, as after they were lowered."""
        gone = 0
        for kind in ArtifactKind:
            standing = sum(used.stored_bytes for (_, k), used in self.usage().items() if k is kind)
            excess = standing - self._options.limits.of(kind).capacity_bytes
            while excess > 0:
                oldest = self.core.oldest_flushed(kind, 1024)
                within = min(excess, sum(record.stored_bytes for record in oldest))
                victims = choose(oldest, within, order=self._options.order)
                removed = self.remove([record.meta.id for record in victims])
                if not removed:
                    break
                gone += removed
                excess -= sum(record.stored_bytes for record in victims)
        return gone

    def purge(self, tenant: bytes) -> int:
        """Remove every record of a tenant from the disk, also what the index forgot; returns how
        many.
        """
        with self.core.appending:
            return self._mending(lambda: purge_tenant(self.core, tenant), 0)

    def _mending(self, step: Callable[[], T], otherwise: T) -> T:
        """Take the step and return its result, once more where it found the index damaged;
        `otherwise` when the medium failed.
        """
        self._mend()
        result = self.core.attempt(step, otherwise)
        return self.core.attempt(step, otherwise) if self._mend() else result

    def _mend(self) -> bool:
        """Make the index again from the segments where a query of any thread found it damaged;
        tells whether it was. Reads go on meanwhile, and miss what has not come in yet.
        """
        core = self.core
        if not core.index.is_damaged:
            return False
        with core.exclusive():
            if core.index.is_damaged:  # nobody else was first
                log.warning("%s: the index is made again from the segments", core.health.name)
                core.appender.close()
                parts = rebuild(
                    core.home,
                    core.index,
                    core.keys,
                    segments=self._reader.segments,
                    landing=self._landing,
                )
                core.appender, core.reclaimer = parts.appender, parts.reclaimer
                self.recovery = parts.report
                core.health.worked()
        return not core.index.is_damaged

    def usage(self) -> Mapping[tuple[bytes, ArtifactKind], TierUsage]:
        """Return the bytes and records that stand, by tenant and kind."""
        with self.core.lock:
            return {key: used for key, used in self.core.index.standing.items() if used.records}

    def close(self) -> None:
        """Flush, and give up the writer's lock; who opens the store next makes an index anew that
        was found damaged. Closing twice is harmless.
        """
        with self.core.exclusive():
            self.core.flush()
            self.core.appender.close()
        self._reader.close()
        self.core.index.close()
        if self.core.index.is_damaged:
            discard_index(self.core.home)
            self.core.index.is_damaged = False
        self.core.home.unlock()
