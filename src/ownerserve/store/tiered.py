"""Tiers as one: writes go to the top, reads come from the fastest that has it, copies move between.

Owns no artifact. Moving is asked for here and done in `settle`, on the runtime's writer thread, so
that neither a read nor a reservation waits for another tier's medium:

    eviction from the top  -> goes_down? -> written to the next tier        (demotion)
    a read further down    -> goes_up?   -> copied to the top               (promotion)
    spill(store, ids)      -> copied down now, kept on top                  (an idle session)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from threading import Lock

import msgspec

from ownerserve.kv.units import MIB
from ownerserve.store.buffers import Landing
from ownerserve.store.memory import MemoryTier
from ownerserve.store.model import (
    Hit,
    Kind,
    Listed,
    Meta,
    Miss,
    MissReason,
    Part,
    Present,
    ReadOutcome,
    RefusalReason,
    Refused,
    Stored,
    Usage,
    Want,
    WriteOutcome,
)
from ownerserve.store.policy import Placement
from ownerserve.store.tier import Reservation, Tier, put

MAX_QUEUED_BYTES = 256 * MIB
_RETRY_BELOW = frozenset(
    {RefusalReason.NO_SPACE, RefusalReason.QUOTA, RefusalReason.TOO_LARGE, RefusalReason.BUSY}
)
_TRY_NEXT = frozenset({MissReason.CORRUPT, MissReason.ABSENT, MissReason.IO_ERROR, MissReason.BUSY})


class Move(msgspec.Struct):
    """A copy to make: verified bytes, and the first tier that may take them."""

    meta: Meta
    payload: memoryview
    to: int


class TieredStore:
    """Several tiers behind the tier port, fastest first."""

    name = "tiered"

    def __init__(self, tiers: Sequence[Tier], placement: Placement | None = None) -> None:
        self.tiers = tuple(tiers)
        self.placement = placement or Placement()
        self.counters: Counter[str] = Counter()
        self._open: dict[bytes, Tier] = {}
        self._moves: deque[Move] = deque()
        self._queued_bytes = 0
        self._lock = Lock()
        top = self.tiers[0]
        if isinstance(top, MemoryTier):
            top.listen(self._on_evict)

    def find(self, ids: Sequence[bytes]) -> Mapping[bytes, Listed]:
        """What any tier has; as the fastest one says."""
        found: dict[bytes, Listed] = {}
        for tier in self.tiers:
            missing = [id_ for id_ in ids if id_ not in found]
            if missing:
                found.update(tier.find(missing))
        return found

    def read(self, wants: Sequence[Want], landing: Landing | None = None) -> ReadOutcome:
        """All wants verified, each from the fastest tier that can, or a miss."""
        parts: dict[int, Part] = {}
        why = Miss(MissReason.ABSENT, wants[0].id if wants else b"")
        for level, tier in enumerate(self.tiers):
            left = [index for index in range(len(wants)) if index not in parts]
            if not left:
                break
            here = tier.find([wants[index].id for index in left])
            for index in left:
                want = wants[index]
                if want.id not in here:
                    why = Miss(MissReason.ABSENT, want.id) if why.id == b"" else why
                    continue
                outcome = tier.read([want], landing)
                if isinstance(outcome, Hit):
                    parts[index] = outcome.parts[0]
                    self.counters[f"hit_{tier.name}"] += 1
                    self._consider_promotion(level, here[want.id], outcome.parts[0])
                else:
                    why = outcome
                    if outcome.reason not in _TRY_NEXT:
                        return outcome
        if len(parts) == len(wants):
            return Hit(tuple(parts[index] for index in range(len(wants))), self.name)
        missing = next(index for index in range(len(wants)) if index not in parts)
        return why if why.id == wants[missing].id else Miss(MissReason.ABSENT, wants[missing].id)

    def _consider_promotion(self, level: int, record: Listed, part: Part) -> None:
        whole = len(part.data) == record.payload_bytes
        if level and whole and self.placement.goes_up(record):
            self._queue(Move(part.meta, part.data, 0))

    def _on_evict(self, record: Listed, payload: memoryview) -> None:
        if len(self.tiers) > 1 and self.placement.goes_down(record):
            self._queue(Move(record.meta, payload, 1))
        else:
            self.counters["dropped"] += 1

    def _queue(self, move: Move) -> None:
        with self._lock:
            if self._queued_bytes + len(move.payload) > MAX_QUEUED_BYTES:
                self.counters["moves_shed"] += 1
                return
            self._moves.append(move)
            self._queued_bytes += len(move.payload)

    def settle(self) -> int:
        """Make the copies that wait; how many were made."""
        done = 0
        for _ in range(len(self._moves)):
            with self._lock:
                move = self._moves.popleft()
                self._queued_bytes -= len(move.payload)
            targets = self.tiers[:1] if move.to == 0 else self.tiers[move.to :]
            made = isinstance(_first_taken(targets, move.meta, move.payload), Stored)
            done += made
            self.counters["promoted" if move.to == 0 else "demoted"] += made
        return done

    def reserve(self, meta: Meta, payload_bytes: int) -> Reservation | Present | Refused:
        """In the fastest tier that has room."""
        outcome: Reservation | Present | Refused = Refused(RefusalReason.NO_SPACE, meta.id)
        for tier in self.tiers:
            outcome = tier.reserve(meta, payload_bytes)
            if isinstance(outcome, Reservation):
                self._open[meta.id] = tier
            if not isinstance(outcome, Refused) or outcome.reason not in _RETRY_BELOW:
                break
        return outcome

    def commit(self, reservations: Sequence[Reservation]) -> tuple[WriteOutcome, ...]:
        """Each in the tier that reserved it, each tier once."""
        by_tier: dict[str, list[Reservation]] = {}
        for reserved in reservations:
            by_tier.setdefault(self._open.pop(reserved.meta.id).name, []).append(reserved)
        outcomes: dict[bytes, WriteOutcome] = {}
        for tier in self.tiers:
            own = by_tier.get(tier.name, [])
            for reserved, outcome in zip(own, tier.commit(own) if own else (), strict=True):
                outcomes[reserved.meta.id] = outcome
        return tuple(outcomes[reserved.meta.id] for reserved in reservations)

    def abort(self, reservation: Reservation) -> None:
        """The room is free again."""
        self._open.pop(reservation.meta.id).abort(reservation)

    def remove(self, ids: Sequence[bytes]) -> int:
        """Gone from every tier; how many artifacts there were."""
        there = len(self.find(ids))
        for tier in self.tiers:
            tier.remove(ids)
        return there

    def expire(self) -> int:
        """Copies removed, over all tiers."""
        return sum(tier.expire() for tier in self.tiers)

    def purge(self, tenant: bytes) -> int:
        """Copies removed, over all tiers; what waits to be moved is dropped too."""
        with self._lock:
            kept = [move for move in self._moves if move.meta.tenant != tenant]
            self._moves = deque(kept)
            self._queued_bytes = sum(len(move.payload) for move in kept)
        return sum(tier.purge(tenant) for tier in self.tiers)

    def price(self, costs_ms: Mapping[bytes, float]) -> None:
        """To every tier, for those that are there."""
        for tier in self.tiers:
            tier.price(costs_ms)

    def usage(self) -> Mapping[tuple[bytes, Kind], Usage]:
        """Copies over all tiers: what they occupy together."""
        total: dict[tuple[bytes, Kind], Usage] = {}
        for tier in self.tiers:
            for key, used in tier.usage().items():
                before = total.get(key, Usage())
                total[key] = Usage(*(a + b for a, b in zip(before, used, strict=True)))
        return total

    def close(self) -> None:
        """Make the copies that wait, then close every tier."""
        self.settle()
        for tier in self.tiers:
            tier.close()


def spill(store: TieredStore, ids: Sequence[bytes]) -> dict[bytes, WriteOutcome]:
    """Copy from the top to the next tier that takes it; durable when the outcome is Stored."""
    top, *below = store.tiers
    outcomes: dict[bytes, WriteOutcome] = {}
    for id_, record in top.find(ids).items():
        if not store.placement.goes_down(record):
            outcomes[id_] = Refused(RefusalReason.LOW_UTILITY, id_)
            continue
        outcome = top.read([Want(id_)])
        if isinstance(outcome, Hit):
            part = outcome.parts[0]
            outcomes[id_] = _first_taken(below, part.meta, part.data)
    return outcomes


def _first_taken(tiers: Sequence[Tier], meta: Meta, payload: memoryview) -> WriteOutcome:
    outcome: WriteOutcome = Refused(RefusalReason.NO_SPACE, meta.id)
    for tier in tiers:
        outcome = put(tier, meta, payload)
        if not isinstance(outcome, Refused):
            break
    return outcome
