"""The store under a node: host memory over disk over a shared medium, behind tickets. Wiring and
timing only.

Unless told otherwise, what is written is durable below when it is "kept", and a copy stays in host
memory, from where it comes back fastest: the store's placement does that.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Thread

import msgspec

from ownerserve.kv.messages import Tier
from ownerserve.kv.units import GIB
from ownerserve.node.storage.losses import Losses
from ownerserve.node.storage.media import DEFAULT_WRITE, open_remote, write_policy
from ownerserve.node.storage.upkeep import Upkeep
from ownerserve.plan.cost.events import Loaded
from ownerserve.store.disk.core import listed
from ownerserve.store.disk.tier import DiskOptions, DiskTier, StoreUnavailable
from ownerserve.store.format.header import CHUNK
from ownerserve.store.format.model import SHARED, Hit, Listed, ReadOutcome, Want
from ownerserve.store.format.model import WriteOutcome as Outcome
from ownerserve.store.index.reader import IndexFailed
from ownerserve.store.service.runtime import StoreService
from ownerserve.store.service.wallclock import WallClock
from ownerserve.store.tiers.backend import Reservation, Telling, TierBackend
from ownerserve.store.tiers.buffers import BufferPool, Landing
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.pinned import CudaHost, PinnedMemory
from ownerserve.store.tiers.placement import Placement, WritePolicy, WriteThrough
from ownerserve.store.tiers.policy import by_utility, split
from ownerserve.store.tiers.tiered import TieredStore

log = logging.getLogger("ownerserve.node")

CLOSE_S = 10.0
"""How long the tiers have to flush and to let another writer in."""

MEDIUM_OF = {"memory": Tier.HOST, "disk": Tier.DISK, "remote": Tier.REMOTE}


class ListedPart(Listed, frozen=True):
    """A record that was found by a boundary, at the end of its first `units` units."""

    boundary: bytes = b""
    units: int = 0


class Sighting(msgspec.Struct, frozen=True, gc=False):
    """A record that some tier has, and the nearest medium that has it."""

    listed: Listed
    near: Tier


def _part(record: Listed, units: int, boundary: bytes) -> ListedPart:
    return ListedPart(**msgspec.structs.asdict(record), boundary=boundary, units=units)


def _at_boundary(tier: TierBackend, digest: bytes) -> list[tuple[Listed, int]]:
    """Records of a tier that hold `digest` at a unit's end. A shared medium can't be asked so."""
    if isinstance(tier, MemoryTier):
        return tier.at_boundary(digest)
    if isinstance(tier, DiskTier):
        return [(listed(entry), units) for entry, units in tier.core.index.at_boundary(digest)]
    return []


class NodeTiers(TieredStore):
    """Written as `write` says (None: through to the lowest tier), read from the fastest.

    Times every read in the thread that makes it, so that a busy engine does not look like a slow
    disk. `timings` is filled by reading threads and emptied by the node's. `worth_ms` is filled by
    the node, for records that it is about to write, and emptied by the writing thread: what is
    stored is priced at once, before anything can be evicted for it.
    """

    def __init__(self, tiers: Sequence[TierBackend], write: WritePolicy | None = None) -> None:
        super().__init__(tiers, Placement(write=write or WriteThrough(len(tiers) - 1)))
        self.timings: deque[Loaded] = deque(maxlen=256)
        self.worth_ms: dict[bytes, float] = {}
        self.losses = Losses()
        for tier in tiers:
            if isinstance(tier, Telling):
                tier.on_removed = self.losses.add

    def commit(self, reservations: Sequence[Reservation]) -> tuple[Outcome, ...]:
        """As the placement says, then prices."""
        ids = [reserved.meta.id for reserved in reservations]
        outcomes = super().commit(reservations)
        priced = {id_: ms for id_ in ids if (ms := self.worth_ms.pop(id_, None)) is not None}
        if priced:
            self.price(priced)
        return outcomes

    def look(
        self, ids: Sequence[bytes], boundaries: Sequence[bytes], *, tenant: bytes = SHARED
    ) -> Mapping[bytes, Listed]:
        """What any tier has of `ids`, and `tenant`'s records that hold the first of `boundaries`
        that any of them holds, in host memory or on disk. Both are hints."""
        return {**self._inside(boundaries, tenant), **self.find(ids)}

    def sighted(
        self, ids: Sequence[bytes], boundaries: Sequence[bytes], *, tenant: bytes = SHARED
    ) -> Mapping[bytes, Sighting]:
        """As `look`, and where each is nearest. Asks the media: not for the engine's thread."""
        found = self.look(ids, boundaries, tenant=tenant)
        near = self.nearest(found)
        return {id_: Sighting(record, near[id_]) for id_, record in found.items()}

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

    def read(self, wants: Sequence[Want], landing: Landing | None = None) -> ReadOutcome:
        """As any tiered read, timed when all of it came from one tier."""
        media = self.media([want.id for want in wants])
        started_s = time.perf_counter()
        outcome = super().read(wants, landing)
        took_ms = (time.perf_counter() - started_s) * 1e3
        origins = set(media.values())
        if isinstance(outcome, Hit) and len(origins) == 1:
            count = sum(len(part.data) for part in outcome.parts)
            self.timings.append(Loaded(origins.pop(), count, took_ms))
        return outcome

    def nearest(self, found: Iterable[bytes]) -> dict[bytes, Tier]:
        """Where each of `found`, which are all somewhere, is nearest. Does not ask the lowest."""
        *upper, lowest = self.tiers
        near = dict.fromkeys(found, MEDIUM_OF[lowest.name])
        for tier in reversed(upper):
            near.update(dict.fromkeys(tier.find(tuple(near)), MEDIUM_OF[tier.name]))
        return near

    def located(self, ids: Sequence[bytes]) -> dict[str, frozenset[bytes]]:
        """Which of `ids` each tier has, by the tier's name. A shared medium is not asked, which
        would cost a look at each id: what is written through to it counts as there."""
        found: dict[str, frozenset[bytes]] = {}
        for level, tier in enumerate(self.tiers):
            if isinstance(tier, MemoryTier | DiskTier):
                found[tier.name] = frozenset(tier.find(ids))
            elif level == self.plan.home:
                found[tier.name] = frozenset(ids)
        return found

    def media(self, ids: Sequence[bytes]) -> dict[bytes, Tier]:
        """The fastest medium that has each id."""
        found: dict[bytes, Tier] = {}
        for tier in self.tiers:
            missing = [id_ for id_ in ids if id_ not in found]
            if missing:
                medium = MEDIUM_OF[tier.name]
                found.update(dict.fromkeys(tier.find(missing), medium))
        return found


class Backing:
    """An open store and its threads. Close it once, after the node."""

    def __init__(
        self,
        tiers: Sequence[TierBackend],
        *,
        write: WritePolicy | None = None,
        upkeep_s: float = 0.0,
    ) -> None:
        self.sizes: dict[Tier, int | None] = {
            MEDIUM_OF[tier.name]: _bytes_of(tier) for tier in tiers
        }
        """What each medium may hold, in bytes; None: it does not say."""
        self.tiers = NodeTiers(tiers, write)
        self.upkeep = Upkeep(tiers, upkeep_s)
        self.service = StoreService(self.tiers, WallClock())
        self.upkeep.start()

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
    """What `tier` may hold; None for one that knows no limit."""
    return tier.limits.capacity_bytes if isinstance(tier, MemoryTier | DiskTier) else None


def open_backing(
    directory: Path | None,
    host_bytes: int,
    *,
    remote: str | None = None,
    write: str = DEFAULT_WRITE,
    upkeep_s: float = 0.0,
    cuda: CudaHost | None = None,
) -> Backing | None:
    """Host memory of `host_bytes` (0: none) over the store at `directory` (None: none) over the
    shared medium `remote` (None: none), written as `write` says, tidied every `upkeep_s` seconds
    (0: never). `cuda`: the runtime that page-locks the host memory. `media` has the words.

    A medium that does not let the store be opened is one warning: the worker serves without it.
    Raises InvalidInput for what the operator can mend (another writer, another format).
    """
    write_policy(write)  # before anything is opened
    clock = WallClock()
    tiers: list[TierBackend] = []
    if host_bytes:
        memory = None if cuda is None else PinnedMemory(cuda)
        pool = BufferPool(2 * (host_bytes + CHUNK), max(host_bytes, GIB // 4), memory=memory)
        tiers.append(MemoryTier(clock, split(host_bytes), landing=pool, order=by_utility))
    openers = (
        lambda: directory and DiskTier(directory, clock, options=DiskOptions()),
        lambda: remote and open_remote(remote, clock),
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
    return Backing(tiers, write=policy, upkeep_s=upkeep_s)
