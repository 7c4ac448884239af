"""An adoption copies a dead store's records into another one, whose writer does it.

    1. the dead store is locked, and read as any dead store is: verified bytes or none
    2. newest first, in groups: appended to the other store, one fdatasync, index. What is there
       already is passed over, so that an adoption cut short is begun again and loses nothing
    3. FROM/ADOPTED names the store that has them, durably: nobody does it twice

Nothing of the dead store is erased. Between two stores the newest stay: a record goes in where
there is room, or where what must go for it was touched before it. Age, uses and price go with it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ownerserve.kv.errors import UNREADABLE, InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.store.disk.home import ADOPTED, Home, refuse_held
from ownerserve.store.disk.snapshot import DeadStore, StoreView
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.header import MAX_PAYLOAD
from ownerserve.store.format.model import (
    ArtifactKind,
    MissReason,
    ReadMiss,
    RefusalReason,
    Want,
    WriteRefused,
)
from ownerserve.store.index.reader import IndexEntry
from ownerserve.store.tiers.backend import Reservation
from ownerserve.store.tiers.buffers import BufferPool

GROUP_BYTES = 32 * MIB
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_UNREADABLE = (MissReason.CORRUPT, MissReason.ABSENT, MissReason.OTHER_FORMAT)


class AdoptionMark(msgspec.Struct, frozen=True):
    """A mark is what FROM/ADOPTED says: the id of the store that has the records, and when it had
    them all, in seconds since 1970.
    """

    into: str
    at_s: float


class Adoption(msgspec.Struct):
    """An adoption counts a dead store's records: `adopted` now, `standing` in the other store
    before, `expired` (past its time to live), `left_out` for older than what stands where there is
    no room, `unreadable` (they failed verification, or are of another format; left where they are).
    `evicted` are older ones that the other store gave up for them. `is_marked`: nobody will do it
    again.
    """

    records: int = 0
    adopted: int = 0
    adopted_bytes: int = 0
    standing: int = 0
    expired: int = 0
    left_out: int = 0
    unreadable: int = 0
    evicted: int = 0
    is_marked: bool = False

    @property
    def seen(self) -> int:
        """Count the records that were dealt with."""
        return self.adopted + self.standing + self.expired + self.left_out + self.unreadable


OnProgress = Callable[[Adoption], None]


class TakenStore(DeadStore):
    """A taken store is a dead one that nobody else can open for writing, or take, until it is
    closed; on a read-only medium nobody can anyway.
    """

    is_writable = True
    _taken: Home | None = None

    def __init__(self, directory: Path, *, key_file: Path | None = None) -> None:
        try:
            super().__init__(directory, key_file=key_file)
        except BaseException:
            self._let_go()
            raise

    def _approach(self, home: Home) -> None:
        self._taken = home
        try:
            home.lock()
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            self.is_writable = False
            refuse_held(home.directory)

    def close(self) -> None:
        """Let go of it."""
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        if self._taken is not None:
            self._taken.unlock()


@contextmanager
def taken(source: Path, key_file: Path | None = None) -> Iterator[TakenStore]:
    """Hold the dead store at `source`; its tenants' records are read with the key in `key_file`,
    else with its own. Raises InvalidInput.
    """
    store = TakenStore(source, key_file=key_file)
    try:
        yield store
    finally:
        store.close()


def mark_of(store: StoreView) -> AdoptionMark | None:
    """Return which store has adopted this one; None when none has, or the mark can't be read."""
    try:
        return msgspec.json.decode((store.home.directory / ADOPTED).read_bytes(), type=AdoptionMark)
    except (FileNotFoundError, *UNREADABLE):
        return None


def refuse_adopted(source: TakenStore, into: DiskTier) -> None:
    """Raise InvalidInput when a third store has adopted `source`, and for a store into itself."""
    home, other = source.home, into.core.home
    if home.store_id == other.store_id:
        problem = f"{home.directory} and {other.directory} are one store, or one is a copy"
        raise InvalidInput(
            "FROM", problem, "open it as it is: its worker's next life needs no more"
        )
    mark = mark_of(source)
    if mark is not None and mark.into != other.store_id.hex():
        when = datetime.fromtimestamp(mark.at_s, UTC).isoformat(timespec="seconds")
        raise InvalidInput(
            "FROM",
            f"{home.directory} was adopted by the store with id {mark.into} at {when}",
            f"remove {home.directory / ADOPTED} to adopt it once more",
        )


def adopt(source: TakenStore, into: DiskTier, on_progress: OnProgress) -> Adoption:
    """Copy the records of `source` into `into`, and return what came of each; they are durable. The
    mark is the caller's, by `set_mark`, when all is done. Raises InvalidInput when there is a mark
    of another store, where a key is missing, and when a medium fails: call again.
    """
    refuse_adopted(source, into)
    return _Adopting(source, into, on_progress).run()


def set_mark(source: TakenStore, into: DiskTier, done: Adoption) -> None:
    """Mark `source` as adopted by `into`, durably, where it can be written. Raises OSError."""
    if source.is_writable:
        mark = AdoptionMark(into.core.home.store_id.hex(), into.core.clock.now())
        source.home.write(ADOPTED, msgspec.json.encode(mark) + b"\n")
        done.is_marked = True


class _Adopting:
    """An adopting does one adoption; the object lives no longer than that."""

    def __init__(self, source: TakenStore, into: DiskTier, on_progress: OnProgress) -> None:
        self._source = source
        self._into = into
        self._on_progress = on_progress
        self._landing = BufferPool(4 * MAX_PAYLOAD)  # one record must fit, whatever its size
        self._done = Adoption()
        self._group: list[Reservation] = []

    def run(self) -> Adoption:
        done = self._done
        done.records = sum(used.records for used in self._source.usage().values())
        evicted = self._into.core.counters["evicted"]
        try:
            for kind in ArtifactKind:
                for entry in self._source.newest(kind):
                    self._take(entry)
                    if sum(room.stored_bytes for room in self._group) >= GROUP_BYTES:
                        self._commit()
            self._commit()
        except BaseException:
            for room in self._group:
                self._into.abort(room)
            raise
        done.evicted = self._into.core.counters["evicted"] - evicted
        return done

    def _take(self, entry: IndexEntry) -> None:
        done, meta = self._done, entry.meta
        if self._into.find([meta.id]):
            done.standing += 1
        elif self._is_past(entry):
            done.expired += 1
        elif not self._has_room(entry):
            done.left_out += 1
        else:
            self._reserve(entry)

    def _is_past(self, entry: IndexEntry) -> bool:
        ttl_s = self._into.limits.of(entry.meta.kind).ttl_s
        return ttl_s is not None and entry.touched_ms / 1000 < self._into.core.clock.now() - ttl_s

    def _has_room(self, entry: IndexEntry) -> bool:
        """Tell whether there is room for it, or what was touched before it could make some."""
        kind, core = entry.meta.kind, self._into.core
        standing = sum(
            used.stored_bytes for (_, k), used in self._into.usage().items() if k is kind
        )
        reserved = sum(room.stored_bytes for room in self._group if room.meta.kind is kind)
        short = standing + reserved + entry.stored_bytes
        short -= self._into.limits.of(kind).capacity_bytes
        if short <= 0:
            return True
        older = [
            record.stored_bytes
            for record in core.oldest_flushed(kind, 64)
            if record.touched_s * 1000 < entry.touched_ms
        ]
        return sum(older) >= short

    def _reserve(self, entry: IndexEntry) -> None:
        meta, done = entry.meta, self._done
        outcome = self._source.read([Want(meta.id)], self._landing)
        if isinstance(outcome, ReadMiss):
            self._missed(outcome.reason)
            done.unreadable += 1
            return
        (part,) = outcome.parts
        room = self._into.reserve(part.meta, len(part.data))
        if isinstance(room, WriteRefused) and room.reason is RefusalReason.BUSY:
            self._commit()  # its buffers
            room = self._into.reserve(part.meta, len(part.data))
        if isinstance(room, Reservation):
            room.payload[:] = part.data
            room.former = entry.listed()
            self._group.append(room)
        elif isinstance(room, WriteRefused):
            self._refused(room)
            done.left_out += 1
        else:
            done.standing += 1

    def _missed(self, reason: MissReason) -> None:
        directory = self._source.home.directory
        if reason is MissReason.NO_KEY:
            problem = f"tenants' records of {directory} are sealed with a key that is not there"
            mend = f"put it back as {directory / 'KEY'}, or name its copy (--key-file)"
            raise InvalidInput("key", problem, mend)
        if reason not in _UNREADABLE:
            raise InvalidInput("FROM", f"{directory} can't be read: {reason}", "run it again")

    def _refused(self, outcome: WriteRefused) -> None:
        if outcome.reason in (RefusalReason.IO_ERROR, RefusalReason.BUSY):
            problem = f"{self._into.core.home.directory} can't be written: {outcome.reason}"
            raise InvalidInput("INTO", problem, "mend it and run the same command again")

    def _commit(self) -> None:
        group, self._group = self._group, []
        sizes = [room.stored_bytes for room in group]
        for outcome, size in zip(self._into.commit(group) if group else (), sizes, strict=True):
            if isinstance(outcome, WriteRefused):
                self._refused(outcome)
            self._done.adopted += 1
            self._done.adopted_bytes += size
        self._on_progress(self._done)
