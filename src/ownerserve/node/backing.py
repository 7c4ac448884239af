"""The store under a node: host memory over disk, behind tickets. Wiring and timing only.

What is written goes to the lowest tier first, so that "kept" means durable, and a copy stays in
host memory, from where it comes back fastest.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from ownerserve.plan.cost.events import Loaded
from ownerserve.plan.inputs import Tier as Medium
from ownerserve.store.buffers import Landing
from ownerserve.store.disk import DiskOptions, DiskTier, StoreUnavailable
from ownerserve.store.memory import MemoryTier
from ownerserve.store.model import Hit, Meta, Present, ReadOutcome, Refused, Stored, Want
from ownerserve.store.model import WriteOutcome as Outcome
from ownerserve.store.policy import split
from ownerserve.store.service import StoreService
from ownerserve.store.tier import Reservation, Tier, put
from ownerserve.store.tiered import TieredStore
from ownerserve.store.wallclock import WallClock

log = logging.getLogger("ownerserve.node")

MEDIUM_OF = {"memory": Medium.HOST, "disk": Medium.DISK, "remote": Medium.REMOTE}


class WriteDown(TieredStore):
    """Tiers that are written from the bottom and read from the top.

    Times every read in the thread that makes it, so that a busy engine does not look like a slow
    disk. `timings` is filled by reading threads and emptied by the node's.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        super().__init__(tiers)
        self.timings: deque[Loaded] = deque(maxlen=256)

    def reserve(self, meta: Meta, payload_bytes: int) -> Reservation | Present | Refused:
        """Room in the lowest tier: one record is one write."""
        return self.tiers[-1].reserve(meta, payload_bytes)

    def commit(self, reservations: Sequence[Reservation]) -> tuple[Outcome, ...]:
        """Durable below, then a copy above; that one may be refused without harm."""
        above = self.tiers[:-1]
        copies = [bytes(r.payload) if above else b"" for r in reservations]
        outcomes = self.tiers[-1].commit(reservations)
        for reserved, copy, outcome in zip(reservations, copies, outcomes, strict=True):
            if above and isinstance(outcome, Stored | Present):
                put(above[0], reserved.meta, copy)
        return outcomes

    def abort(self, reservation: Reservation) -> None:
        """The room is free again."""
        self.tiers[-1].abort(reservation)

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

    def nearest(self, found: Iterable[bytes]) -> dict[bytes, Medium]:
        """Where each of `found`, which are all somewhere, is nearest. Asks host memory only."""
        top, *below = self.tiers
        ids = tuple(found)
        lower = MEDIUM_OF[below[-1].name] if below else MEDIUM_OF[top.name]
        near = dict.fromkeys(top.find(ids), MEDIUM_OF[top.name]) if below else {}
        return {id_: near.get(id_, lower) for id_ in ids}

    def media(self, ids: Sequence[bytes]) -> dict[bytes, Medium]:
        """The fastest medium that has each id."""
        found: dict[bytes, Medium] = {}
        for tier in self.tiers:
            missing = [id_ for id_ in ids if id_ not in found]
            if missing:
                medium = MEDIUM_OF[tier.name]
                found.update(dict.fromkeys(tier.find(missing), medium))
        return found


class Backing:
    """An open store and its threads. Close it once, after the node."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = WriteDown(tiers)
        self.service = StoreService(self.tiers, WallClock())

    def close(self) -> None:
        """Finish what is in the air and let another writer in."""
        self.service.close()
        self.tiers.close()


def open_backing(directory: Path | None, host_bytes: int) -> Backing | None:
    """Host memory of `host_bytes` (0: none) over the store at `directory` (None: none).

    A medium that does not let the store be opened is one warning: the worker serves without it.
    Raises InvalidInput for what the operator can mend (another writer, another format).
    """
    clock = WallClock()
    tiers: list[Tier] = []
    if host_bytes:
        tiers.append(MemoryTier(clock, split(host_bytes)))
    if directory is not None:
        try:
            tiers.append(DiskTier(directory, clock, options=DiskOptions()))
        except StoreUnavailable as error:
            log.warning("%s; serving without it", error)
    return Backing(tiers) if tiers else None
