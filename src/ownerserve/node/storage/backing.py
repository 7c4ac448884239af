"""A `Backing` is the store under a node: host memory over disk over a shared medium, behind
tickets. Wiring and timing only.

Unless told otherwise, what is written is durable below when it is "kept", and a copy stays in host
memory, from where it comes back fastest: the store's placement does that. `Upkeep` is the thread
beside it that forgets what nobody asked for, `RecordLosses` what the store's threads say is gone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Protocol

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.units import GIB
from ownerserve.node.storage.limits import STANDARD, UPKEEP_S, StoreLimits
from ownerserve.node.storage.media import DEFAULT_WRITE, open_remote, write_policy
from ownerserve.node.vocabulary.events import PeerPrefix, RecordsLost
from ownerserve.node.vocabulary.settings import BRINGS_AT_ONCE
from ownerserve.plan.cost.events import Loaded
from ownerserve.store.disk.maintain import collect
from ownerserve.store.disk.tier import DiskTier, StoreUnavailable
from ownerserve.store.format.header import CHUNK
from ownerserve.store.format.model import (
    SHARED,
    Listed,
    Meta,
    ReadHit,
    ReadMiss,
    ReadOutcome,
    ReadPart,
    Want,
    WriteOutcome,
)
from ownerserve.store.index.reader import IndexFailed
from ownerserve.store.service.runtime import StoreService, WallClock
from ownerserve.store.tiers.backend import Reservation, Telling, TierBackend
from ownerserve.store.tiers.buffers import BufferPool, BufferSource
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.pinned import CudaHost, PinnedMemory
from ownerserve.store.tiers.placement import Placement, WritePolicy, WriteThrough
from ownerserve.store.tiers.policy import by_utility
from ownerserve.store.tiers.tiered import TieredStore

log = logging.getLogger("ownerserve.node")

BUFFERS_BYTES = 2 * GIB
"""Memory of a disk tier for what it reads and is given to write, at least."""
CLOSE_S = 10.0
"""How long the tiers have to flush and to let another writer in."""

MEDIUM_OF = {"memory": Tier.HOST, "disk": Tier.DISK, "remote": Tier.REMOTE}


class ListedPart(Listed, frozen=True):
    """A `ListedPart` is a record that was found by a boundary, which stands at the end of its first
    `units` units."""

    boundary: bytes = b""
    units: int = 0


class Sighting(msgspec.Struct, frozen=True, gc=False):
    """A `Sighting` is a record that some tier has, and the nearest medium that has it. `listed`
    None: a peer is said to hold it, and to have it at hand in `ready_ms`."""

    listed: Listed | None
    near: Tier
    ready_ms: float = 0.0


class PeerTier(Protocol):
    """A `PeerTier` has what other workers hold (node.transfers.peers). Its calls wait, and are made
    on the store's threads; `timings` has what each read took."""

    timings: deque[Loaded]

    def look(self, prefix: PeerPrefix) -> Mapping[bytes, float]:
        """Return which records of the prefix its peer could lend, and in how many ms it has each at
        hand: a hint."""
        ...

    def has(self, ids: Sequence[bytes]) -> frozenset[bytes]:
        """Return which of `ids` a peer is said to hold."""
        ...

    def read(self, wants: Sequence[Want], of: Sequence[Want] = ()) -> ReadOutcome:
        """Bring the wants, verified, or give a miss: all that is given up together, or a part `of`
        it."""
        ...

    def expect(
        self,
        wants: Sequence[Want],
        turn_id: TurnId,
        computed: Sequence[Sequence[Want]],
    ) -> None:
        """Have the wants read, whatever of them was given up before; and all parts that a peer
        `computed` for the turn when the first of them is read, since the others will be. Does not
        wait, nor do `give_up` and `call_off`."""
        ...

    def give_up(self, wants: Sequence[Want]) -> None:
        """Bring none of these any more: nobody waits."""
        ...

    def call_off(self, turn_id: TurnId) -> None:
        """Have nobody compute the turn's prompt any more; no error where nobody does."""
        ...


def _part(record: Listed, units: int, boundary: bytes) -> ListedPart:
    return ListedPart(**msgspec.structs.asdict(record), boundary=boundary, units=units)


def _at_boundary(tier: TierBackend, digest: bytes) -> list[tuple[Listed, int]]:
    """Return the tier's records that hold `digest` at a unit's end, with the units up to there;
    none for a shared medium, which can't be asked so."""
    if isinstance(tier, MemoryTier):
        return tier.at_boundary(digest)
    if isinstance(tier, DiskTier):
        return [(entry.listed(), units) for entry, units in tier.core.index.at_boundary(digest)]
    return []


class NodeTiers(TieredStore):
    """`NodeTiers` are tiers that are written as `write` says (None: through to the lowest) and read
    from the fastest.

    Times every read in the thread that makes it, so that a busy engine does not look like a slow
    disk. `timings` is filled by reading threads and emptied by the node's. `record_value_ms` is
    filled by the node, for records that it is about to write, and emptied by the writing thread:
    what is stored is priced at once, before anything can be evicted for it.
    """

    def __init__(self, tiers: Sequence[TierBackend], write: WritePolicy | None = None) -> None:
        super().__init__(tiers, Placement(write=write or WriteThrough(len(tiers) - 1)))
        self.timings: deque[Loaded] = deque(maxlen=256)
        self.record_value_ms: dict[bytes, float] = {}
        self.losses = RecordLosses()
        self.peers: PeerTier | None = None
        """`peers` are other workers that lend; None: nobody is asked."""
        for tier in tiers:
            if isinstance(tier, Telling):
                tier.on_removed = self.losses.add

    def commit(self, reservations: Sequence[Reservation]) -> tuple[WriteOutcome, ...]:
        """Write as the placement says, then price what was stored; return the outcome of each
        reservation."""
        ids = [reserved.meta.id for reserved in reservations]
        outcomes = super().commit(reservations)
        priced = {id_: ms for id_ in ids if (ms := self.record_value_ms.pop(id_, None)) is not None}
        if priced:
            self.price(priced)
        return outcomes

    def look(
        self, ids: Sequence[bytes], boundaries: Sequence[bytes], *, tenant: bytes = SHARED
    ) -> Mapping[bytes, Listed]:
        """Return what any tier has of `ids`, and `tenant`'s records that hold the first of
        `boundaries` that any of them holds, in host memory or on disk. Both are hints."""
        return {**self._inside(boundaries, tenant), **self.find(ids)}

    def sighted(
        self,
        ids: Sequence[bytes],
        boundaries: Sequence[bytes],
        *,
        tenant: bytes = SHARED,
        peer: PeerPrefix | None = None,
    ) -> Mapping[bytes, Sighting]:
        """Return what `look` finds, and where each is nearest, and what else `peer` could lend. It
        waits for media and peers, so it is not for the engine's thread."""
        found = self.look(ids, boundaries, tenant=tenant)
        near = self.nearest(found)
        seen = {id_: Sighting(record, near[id_]) for id_, record in found.items()}
        if peer is not None and self.peers is not None:
            for id_, ready_ms in self.peers.look(peer).items():
                seen.setdefault(id_, Sighting(None, Tier.PEER, ready_ms))
        return seen

    def _inside(self, boundaries: Sequence[bytes], tenant: bytes) -> dict[bytes, Listed]:
        try:
            for digest in boundaries:
                found = {
                    record.meta.id: _part(record, units, digest)
                    for tier in reversed(self.tiers)  # what the fastest says stands
                    for record, units in _at_boundary(tier, digest)
                    if record.meta.tenant == tenant
                }
                if found:
                    return dict(found)
        except IndexFailed as error:
            log.warning("%s: branches are not looked for", error)
        return {}

    def read(self, wants: Sequence[Want], landing: BufferSource | None = None) -> ReadOutcome:
        """Read as any tiered store does, and note the time when all of it came from one tier. What
        no tier has is brought from the peer that is said to hold it."""
        media = self.media([want.id for want in wants])
        if self.peers is not None and len(media) < len(wants):
            away = [want for want in wants if want.id not in media]
            if self.peers.has([want.id for want in away]):
                return self._read_both(wants, away, landing)
        return self._timed(wants, landing, media)

    def read_own(self, wants: Sequence[Want]) -> ReadOutcome:
        """Read what is here alone: nothing is brought from a peer, since one asks for it."""
        return self._timed(wants, None, self.media([want.id for want in wants]))

    def _timed(
        self, wants: Sequence[Want], landing: BufferSource | None, media: Mapping[bytes, Tier]
    ) -> ReadOutcome:
        started_s = time.perf_counter()
        outcome = super().read(wants, landing)
        took_ms = (time.perf_counter() - started_s) * 1e3
        origins = set(media.values())
        if isinstance(outcome, ReadHit) and len(origins) == 1:
            count = sum(len(part.data) for part in outcome.parts)
            self.timings.append(Loaded(origins.pop(), count, took_ms))
        return outcome

    def _read_both(
        self, wants: Sequence[Want], away: Sequence[Want], landing: BufferSource | None
    ) -> ReadOutcome:
        """Read what is here, then bring what is `away`: nothing is moved for a read that fails."""
        assert self.peers is not None
        here = [want for want in wants if want not in away]
        parts: dict[Want, ReadPart] = {}
        if here:
            read = super().read(here, landing)
            if isinstance(read, ReadMiss):
                return read
            parts.update(zip(here, read.parts, strict=True))
        brought = self.peers.read(away, wants)
        if isinstance(brought, ReadMiss):
            return brought
        parts.update(zip(away, brought.parts, strict=True))
        return ReadHit(tuple(parts[want] for want in wants), str(Tier.PEER))

    def nearest(self, found: Iterable[bytes]) -> dict[bytes, Tier]:
        """Return where each of `found`, which are all somewhere, is nearest. The lowest tier is not
        asked."""
        *upper, lowest = self.tiers
        near = dict.fromkeys(found, MEDIUM_OF[lowest.name])
        for tier in reversed(upper):
            near.update(dict.fromkeys(tier.find(tuple(near)), MEDIUM_OF[tier.name]))
        return near

    def located(self, ids: Sequence[bytes]) -> dict[str, frozenset[bytes]]:
        """Return which of `ids` each tier has, by the tier's name. A shared medium is not asked,
        which would cost a look at each id: what is written through to it counts as there."""
        found: dict[str, frozenset[bytes]] = {}
        for level, tier in enumerate(self.tiers):
            if isinstance(tier, MemoryTier | DiskTier):
                found[tier.name] = frozenset(tier.find(ids))
            elif level == self.plan.home:
                found[tier.name] = frozenset(ids)
        return found

    def standing(self, ids: Sequence[bytes]) -> dict[Tier, frozenset[bytes]]:
        """Return which of `ids` stand in host memory and on disk, which a worker has for itself."""
        own = (tier for tier in self.tiers if isinstance(tier, MemoryTier | DiskTier))
        return {MEDIUM_OF[tier.name]: frozenset(tier.find(ids)) for tier in own}

    def media(self, ids: Sequence[bytes]) -> dict[bytes, Tier]:
        """Return the fastest medium that has each id; an id that none has is left out."""
        found: dict[bytes, Tier] = {}
        for tier in self.tiers:
            missing = [id_ for id_ in ids if id_ not in found]
            if missing:
                medium = MEDIUM_OF[tier.name]
                found.update(dict.fromkeys(tier.find(missing), medium))
        return found


class Backing:
    """A `Backing` is an open store and its threads. Close it once, after the node."""

    def __init__(
        self,
        tiers: Sequence[TierBackend],
        *,
        write: WritePolicy | None = None,
        upkeep_s: float = UPKEEP_S,
    ) -> None:
        self.sizes: dict[Tier, int | None] = {
            MEDIUM_OF[tier.name]: _bytes_of(tier) for tier in tiers
        }
        """What each medium may hold, in bytes; None: it does not say."""
        self.tiers = NodeTiers(tiers, write)
        self.upkeep = Upkeep(tiers, upkeep_s)
        self.service = StoreService(self.tiers, WallClock())
        self.upkeep.start()

    def add_peers(self, peers: PeerTier, brings: int = BRINGS_AT_ONCE) -> None:
        """Bring from other workers too; call it before the node runs. A bring waits on a reader's
        thread, which media must not lack for it: there are `brings` more for that."""
        self.tiers.peers = peers
        self.sizes[Tier.PEER] = None
        self.service.add_readers(brings)

    def close(self) -> None:
        """Finish what is in the air and let another writer in. Each step ends in its time: tiers
        that a thread still uses are left open, for the process to end with."""
        has_upkeep_ended = self.upkeep.stop()
        if self.service.close() and has_upkeep_ended:
            closing = Thread(target=self._close_tiers, name="store-close", daemon=True)
            closing.start()
            closing.join(CLOSE_S)
            if closing.is_alive():
                log.warning("the store does not close: its medium is silent")

    def _close_tiers(self) -> None:
        try:
            self.tiers.close()
        except Exception:  # a thread's root
            log.exception("the store was not closed as it should be")


def _bytes_of(tier: TierBackend) -> int | None:
    """Return the bytes that `tier` may hold; None for one that knows no limit."""
    return tier.limits.capacity_bytes if isinstance(tier, MemoryTier | DiskTier) else None


def open_backing(
    directory: Path | None,
    host_bytes: int,
    *,
    remote: str | None = None,
    remote_key_file: Path | None = None,
    write: str = DEFAULT_WRITE,
    limits: StoreLimits = STANDARD,
    cuda: CudaHost | None = None,
    buffer_bytes: int = 0,
) -> Backing | None:
    """Open host memory of `host_bytes` (0: none) over the store at `directory` (None: none), over
    the shared medium `remote` (None: none), sealed by the key in `remote_key_file` (None: none),
    written as `write` says, each within `limits`. `cuda` is the runtime that page-locks the host
    memory, that of the disk's buffers too. `buffer_bytes` is what writers may have reserved at once
    on disk: until it is durable it is in the tier's own memory. None: there is no tier. `media` has
    the words.

    A medium that does not let the store be opened is one warning: the worker serves without it.
    Raises InvalidInput for what the operator can mend (another writer, another format).
    """
    write_policy(write)  # before anything is opened
    if remote_key_file is not None and not remote:
        raise InvalidInput("remote-key-file", "no shared medium is named", "name one as remote")
    clock = WallClock()
    tiers: list[TierBackend] = []
    memory = None if cuda is None else PinnedMemory(cuda)
    if host_bytes:
        pool = BufferPool(2 * (host_bytes + CHUNK), max(host_bytes, GIB // 4), memory=memory)
        tiers.append(MemoryTier(clock, limits.of(host_bytes), landing=pool, order=by_utility))
    openers = (
        lambda: (
            directory
            and DiskTier(
                directory,
                clock,
                options=limits.on_disk(),
                # A reservation is padded by up to a quarter, and readers have buffers beside them.
                landing=BufferPool(max(BUFFERS_BYTES, 2 * buffer_bytes), memory=memory),
            )
        ),
        lambda: remote and open_remote(remote, clock, remote_key_file),
    )
    for opener in openers:
        try:
            if tier := opener():
                tiers.append(tier)
        except (StoreUnavailable, OSError) as error:
            log.warning("%s; serving without it", error)
    if not tiers:
        return None
    policy = write_policy(write, [tier.name for tier in tiers])
    return Backing(tiers, write=policy, upkeep_s=limits.upkeep_s)


# ---- upkeep


STOP_S = 10.0
EXPIRE_AT_ONCE = 4096
"""Records of each tier that one pass removes at most."""
COMPACT_AT_ONCE = 2
"""Segments that one pass compacts at most."""
MORE_AFTER_S = 1.0
"""How soon the next pass comes behind one that reached a bound."""


class Upkeep:
    """`Upkeep` is a thread on which the store forgets what nobody asked for, and gives its room
    back.

    It runs a pass over `tiers` every `every_s` seconds between `start` and `stop`; 0: never. A pass
    may wait for the medium, and holds the store's lock for one bounded step at a time; it is
    bounded too, since the worker stops behind it: where it leaves something to do the next one
    comes soon.
    """

    def __init__(self, tiers: Sequence[TierBackend], every_s: float) -> None:
        if every_s < 0:
            raise InvalidInput("store-upkeep", f"{every_s:g} s", "use 0 (never) or more")
        self.counts: Counter[str] = Counter()  # replaced whole: any thread may read it
        self._tiers = tiers
        self.every_s = every_s
        self._landing = BufferPool()
        self._stopping = Event()
        self._thread = Thread(target=self._serve, name="store-upkeep", daemon=True)

    def start(self) -> None:
        """Begin; the first pass comes after one interval."""
        if self.every_s:
            self._thread.start()

    def stop(self) -> bool:
        """End after the pass that is under way, within `STOP_S`; call it before the tiers are
        closed. False: a medium is silent, and the pass still uses a tier."""
        self._stopping.set()
        if self._thread.ident is None:
            return True
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.warning("the store's upkeep does not end: its medium is silent")
        return not self._thread.is_alive()

    def run_once(self) -> float:
        """Run one pass (TTLs, old quarantine, sparse and empty segments) and return in how many
        seconds the next one is to come."""
        total, has_more = self.counts.copy(), False
        total["passes"] += 1
        for tier in self._tiers:
            expired = tier.expire(EXPIRE_AT_ONCE)
            total["expired"] += expired
            has_more = has_more or expired >= EXPIRE_AT_ONCE
            if isinstance(tier, DiskTier):
                done = collect(tier.core, self._landing, most=COMPACT_AT_ONCE)
                has_more = has_more or done.segments_compacted >= COMPACT_AT_ONCE
                total["segments_compacted"] += done.segments_compacted
                total["segments_dropped"] += done.segments_dropped
                total["compacted_bytes"] += done.bytes_copied
                total["quarantine_released"] += done.quarantine_released
        self.counts = total
        return min(MORE_AFTER_S, self.every_s) if has_more else self.every_s

    def _serve(self) -> None:
        after_s = self.every_s
        while not self._stopping.wait(after_s):
            after_s = self.every_s
            try:
                after_s = self.run_once()
            except Exception:  # a thread's root: a store that can't be tidied still serves
                self.counts = self.counts + Counter(failed=1)
                log.exception("the store's upkeep failed")


# ---- losses


LISTED = 4096


class RecordLosses:
    """`RecordLosses` is a short list of the records that went from a worker's tiers, as the store's
    threads tell it.

    Any thread may add; the node's thread takes, and so empties it. What is too much to list is
    counted.
    """

    def __init__(self) -> None:
        self._ends: set[PrefixHash] = set()
        self._unnoted = 0
        self._lock = Lock()

    def add(self, metas: Iterable[Meta]) -> None:
        """Note that the records of these metas are gone from the tier that tells it."""
        with self._lock:
            for meta in metas:
                if len(self._ends) < LISTED:
                    self._ends.add(PrefixHash(meta.prefix_hash))
                else:
                    self._unnoted += 1

    def take(self) -> RecordsLost | None:
        """Take what went since the last time; None: nothing."""
        if not self._ends:
            return None
        with self._lock:
            lost = RecordsLost(tuple(self._ends), self._unnoted)
            self._ends, self._unnoted = set(), 0
        return lost
