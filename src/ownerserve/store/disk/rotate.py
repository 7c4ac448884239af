"""A rotation seals a store's tenant records anew, by another key, as the store's one writer.

    1. KEY.next is made, where no file elsewhere is named        a crash: the next rotation uses it
    2. KEYID: (old, new)                                         both keys open the store from here
    3. oldest records first, in groups: copies sealed anew are appended and synced -> index: rows
       point to the copies, the old spans are doomed -> holes are punched
    4. KEYID: (new), then KEY.next becomes KEY                   the old key opens nothing any more

Any step may be the last: the rotation is begun again with the same keys, and goes on. Shared
records bear no key and stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ownerserve.kv.clock import Clock
from ownerserve.kv.errors import Corrupt, InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.store.disk.append import RecordDraft
from ownerserve.store.disk.home import Home
from ownerserve.store.disk.keyring import (
    NEXT,
    OWN,
    HeldKey,
    KeyId,
    KeyRing,
    at_hand,
    find_ring,
    held,
    settle,
    write_key_id,
)
from ownerserve.store.disk.read import OpenSegments, read_all
from ownerserve.store.disk.recover import Recovered, discard_index, recover
from ownerserve.store.disk.scan import records
from ownerserve.store.format.header import BLOCK, MAX_PAYLOAD
from ownerserve.store.format.seal import KEY_BYTES, Keys
from ownerserve.store.format.segment import Segment, segment_path
from ownerserve.store.format.verify import check_meta, check_place, draft, open_chunks, open_header
from ownerserve.store.index.reader import Change, IndexEntry, SegmentSpan
from ownerserve.store.tiers.buffers import BufferPool

GROUP_BYTES = 32 * MIB
_TRIES = 2


class KeyChange(msgspec.Struct, frozen=True):
    """A key change names the files of the old and the new key. None: the store's own key, and one
    that is made for it.
    """

    key_file: Path | None = None
    new_key_file: Path | None = None


class Rotated(msgspec.Struct):
    """Rotated counts a rotation's work: tenants' `records`, of which so many are `resealed`, so
    many had the new key before (`standing`), and so many no key at hand opens: `unreadable`, left
    to be found and quarantined by a read. `erased` were given up with a lost key.
    """

    key: str = ""
    records: int = 0
    resealed: int = 0
    standing: int = 0
    unreadable: int = 0
    resealed_bytes: int = 0
    erased: int = 0


OnProgress = Callable[[Rotated], None]


def rotate_key(
    directory: Path, change: KeyChange, *, clock: Clock, on_progress: OnProgress
) -> Rotated:
    """Seal all tenants' records of the store at `directory` by a new key, or finish what an earlier
    call began. Raises InvalidInput for a key that is not the store's, and where another writer has
    it; OSError and IndexFailed when the medium fails: call again.
    """
    with _locked(directory) as home:
        ring = _begin(home, change)
        with _recovered(home, ring.keys()) as (parts, segments):
            done = _Rotation(home, ring, parts, segments=segments).run(clock, on_progress)
        settle(home, ring.current)
        _drop_former(home, ring)
        done.key = str(_place(home, ring.current))
        return done


def replace_lost_key(directory: Path, change: KeyChange) -> Rotated:
    """Erase all tenants' records of a store whose key is lost, and give it a new one. Raises
    InvalidInput where the key is not lost.
    """
    with _locked(directory) as home:
        try:
            find_ring(home, at_hand(home, change.key_file))
        except InvalidInput:
            pass
        else:
            raise InvalidInput("--old-key-lost", "no key is missing", "leave the option out")
        with _recovered(home, Keys()) as (parts, _):
            done = Rotated(erased=_erase_tenants(home, parts))
        home.remove(NEXT)
        new = _new_key(home, change)
        settle(home, new)
        done.key = str(_place(home, new))
        return done


@contextmanager
def _locked(directory: Path) -> Iterator[Home]:
    home = Home.create_or_open(directory, Home.open(directory).segment_bytes)
    try:
        yield home
    finally:
        home.unlock()


@contextmanager
def _recovered(home: Home, keys: Keys) -> Iterator[tuple[Recovered, OpenSegments]]:
    segments = OpenSegments(home)
    parts = recover(home, keys, segments=segments, landing=BufferPool(4 * MAX_PAYLOAD))
    try:
        yield parts, segments
        parts.appender.close()
    finally:
        segments.clear()
        parts.index.close()
        if parts.index.is_damaged:
            discard_index(home)  # the next call makes it again


def _begin(home: Home, change: KeyChange) -> KeyRing:
    """Return the new key and the old one, and have KEYID say so; the new one alone when the
    rotation is done.
    """
    new = None if change.new_key_file is None else held(change.new_key_file)
    if change.key_file is not None and new is None:
        raise InvalidInput("--new-key-file", "missing beside --key-file", "name a file of 32 bytes")
    found = at_hand(home, change.key_file)
    ring = find_ring(home, found if new is None else [*found, new])
    if ring is None:
        return KeyRing(_new_key(home, change))
    if ring.former is not None:
        if new is not None and new.mark != ring.current.mark:
            raise InvalidInput(
                "--new-key-file",
                "a rotation to another key was cut short",
                "finish it first, with the file it was begun with",
            )
        return ring
    if new is not None and new.mark == ring.current.mark:
        return ring
    settle(home, ring.current)  # KEY.next may be the one in use
    new = new or _new_key(home, change)
    write_key_id(home, KeyId(ring.current.mark, new.mark))
    return KeyRing(new, former=ring.current)


def _new_key(home: Home, change: KeyChange) -> HeldKey:
    if change.new_key_file is not None:
        return held(change.new_key_file)
    path = home.directory / NEXT
    if not path.exists():
        home.write(NEXT, os.urandom(KEY_BYTES))
    return held(path)


def _drop_former(home: Home, ring: KeyRing) -> None:
    """Remove the store's own key when one elsewhere took its place: it opens nothing any more."""
    own = home.directory / OWN
    if (
        ring.former is not None
        and ring.former.path == own
        and ring.current.path.parent != own.parent
    ):
        home.remove(OWN)


def _place(home: Home, key: HeldKey) -> Path:
    own = home.directory / OWN
    return own if key.path == home.directory / NEXT else key.path


class _Rotation:
    """A rotation seals what the old key sealed; the object lives no longer than that."""

    def __init__(
        self, home: Home, ring: KeyRing, parts: Recovered, *, segments: OpenSegments
    ) -> None:
        self._home = home
        self._new = Keys(ring.current.key)
        self._old = Keys(ring.former.key) if ring.former is not None else Keys()
        self._parts = parts
        self._segments = segments
        self._landing = BufferPool(4 * MAX_PAYLOAD)  # one record must fit, whatever its size
        self._done = Rotated()

    def run(self, clock: Clock, on_progress: OnProgress) -> Rotated:
        index, done = self._parts.index, self._done
        done.records = sum(used.records for (who, _), used in index.usage().items() if who)
        last = index.highest_sequence()  # copies get higher ones
        group: list[tuple[IndexEntry, RecordDraft]] = []
        size = 0
        for entry in index.walk():
            if entry.sequence > last:
                break
            drafted = self._resealed(entry) if entry.meta.tenant else None
            if drafted is None:
                continue
            group.append((entry, drafted))
            size += entry.stored_bytes
            if size >= GROUP_BYTES:
                self._replace(group, clock)
                on_progress(done)
                group, size = [], 0
        if group:
            self._replace(group, clock)
        on_progress(done)
        return done

    def _resealed(self, entry: IndexEntry) -> RecordDraft | None:
        """Return a record sealed anew; None where it is already, or no key opens it."""
        copy = self._landing.take(entry.stored_bytes)
        for _ in range(_TRIES):  # a medium may err once
            try:
                segment = self._segments.get(entry.segment)
                read_all(segment, entry.offset, copy)
                if self._bears_new_key(copy[: entry.header_bytes]):
                    self._done.standing += 1
                    return None
                header, seal = open_header(copy[: entry.header_bytes], self._old)
                check_place(header, self._home.store_id, entry.segment, entry.offset)
                check_meta(header, entry.meta, entry.payload_bytes)
                end = entry.header_bytes + entry.payload_bytes
                open_chunks(copy[entry.header_bytes : end], header, seal)
            except (Corrupt, FileNotFoundError):
                continue
            anew = self._new.resealing(header.meta.tenant, header.seal)
            assert anew is not None
            made_ms = header.created_ms
            fresh = draft(copy, header.meta, header.payload_bytes, seal=anew, now_ms=made_ms)
            return RecordDraft(
                fresh, copy, entry.touched_ms, entry.reuse_count, entry.restore_cost_ms
            )
        self._done.unreadable += 1
        return None

    def _bears_new_key(self, header: memoryview) -> bool:
        try:
            open_header(header, self._new)
        except Corrupt:
            return False
        return True

    def _replace(self, group: Sequence[tuple[IndexEntry, RecordDraft]], clock: Clock) -> None:
        parts, done = self._parts, self._done
        old = [entry for entry, _ in group]
        spans = [entry.span for entry in old]
        new = parts.appender.append([drafted for _, drafted in group], int(clock.now() * 1000))
        parts.index.apply(Change(remove=old, add=new.entries, segments=new.segments, doom=spans))
        parts.appender.told()
        parts.reclaimer.erase(spans)
        parts.reclaimer.drop_empty()
        done.resealed += len(old)
        done.resealed_bytes += sum(entry.stored_bytes for entry in old)


def _erase_tenants(home: Home, parts: Recovered) -> int:
    """Erase every tenant's records: indexed, quarantined, and what else the segments hold."""
    index, reclaimer = parts.index, parts.reclaimer
    tenants = {tenant for tenant, _ in index.usage() if tenant}
    gone = 0
    for tenant in tenants:
        entries = list(index.walk(tenant=tenant))
        reclaimer.remove(entries)
        gone += len(entries)
    bad = [one for one in index.quarantined() if one.tenant]
    index.release(bad)
    reclaimer.erase([one.span for one in bad])
    for number in home.segment_numbers():
        segment = Segment(segment_path(home.directory, number), os.O_RDONLY)
        spans = [
            SegmentSpan(number, header.place.offset, header.record_bytes)
            for header in records(segment, BLOCK, home.store_id)
            if header.meta.tenant
        ]
        index.apply(Change(doom=spans))
        reclaimer.erase(spans)
    reclaimer.drop_empty()
    return gone
