"""A tiered store is tiers as one: written as the placement says, read from the fastest that has it,
copies moved.

Owns no artifact. Moving is asked for here and done in `settle`, on the runtime's writer thread, so
that neither a read nor a reservation waits for another tier's medium:

    eviction from level n    worth it?  -> written to the first below that takes it    (demotion)
    a read further down      worth it?  -> copied to the top                           (promotion)
    a write that is owed     worth it?  -> copied to its level, kept on top            (write-back)

What is removed or purged does not come back by a copy that waited: see `_moving`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock

from ownerserve.store.format.convert import read_converted
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
from ownerserve.store.tiers.backend import EVERY_RECORD, Evicting, Reservation, TierBackend, put
from ownerserve.store.tiers.buffers import BufferSource
from ownerserve.store.tiers.memory import HeldPart, MemoryTier
from ownerserve.store.tiers.moves import MoveQueue, TierMove
from ownerserve.store.tiers.placement import COMES_AGAIN, HAS_NO_ROOM, Placement

_TRY_NEXT = frozenset({MissReason.CORRUPT, MissReason.ABSENT, MissReason.IO_ERROR, MissReason.BUSY})


class TieredStore:
    """A tiered store is several tiers behind the tier port, fastest first."""

    name = "tiered"

    def __init__(self, tiers: Sequence[TierBackend], placement: Placement | None = None) -> None:
        self.tiers = tuple(tiers)
        self.placement = placement or Placement()
        self.plan = self.placement.write.plan(len(self.tiers))
        self.moves = MoveQueue()
        self.counters: Counter[str] = Counter()
        self._moving = Lock()  # held while a copy is made, and while artifacts are removed
        for level, tier in enumerate(self.tiers[:-1]):
            if isinstance(tier, Evicting):
                tier.on_evict = partial(self._on_evict, level)

    def find(self, ids: Sequence[bytes]) -> Mapping[bytes, Listed]:
        """Return what any tier has of `ids`, as the fastest one says."""
        found: dict[bytes, Listed] = {}
        for tier in self.tiers:
            missing = [id_ for id_ in ids if id_ not in found]
            if missing:
                found.update(tier.find(missing))
        return found

    def read(self, wants: Sequence[Want], landing: BufferSource | None = None) -> ReadOutcome:
        """Read and verify all wants, each from the fastest tier that can, or give a miss."""
        parts: dict[int, ReadPart] = {}
        why: dict[int, ReadMiss] = {}
        for level, tier in enumerate(self.tiers):
            left = [index for index in range(len(wants)) if index not in parts]
            if not left:
                break
            here = tier.find([wants[index].id for index in left])
            held = [index for index in left if wants[index].id in here]
            if not held:
                continue
            outcomes = self._read_level(level, [wants[i] for i in held], landing, here=here)
            for index, outcome in zip(held, outcomes, strict=True):
                if isinstance(outcome, ReadPart):
                    parts[index] = outcome
                else:
                    why[index] = outcome
                    if outcome.reason not in _TRY_NEXT:
                        return outcome
        if len(parts) == len(wants):
            return ReadHit(tuple(parts[index] for index in range(len(wants))), self.name)
        missing = next(index for index in range(len(wants)) if index not in parts)
        return why.get(missing, ReadMiss(MissReason.ABSENT, wants[missing].id))

    def hold(self, wants: Sequence[Want]) -> tuple[HeldPart, ...] | None:
        """Return all wants as they lie in host memory, the fastest tier, for their taker to verify
        as it uses them; None when one isn't there as it is wanted: then it is for `read`."""
        top = self.tiers[0]
        parts = top.hold(wants) if isinstance(top, MemoryTier) else None
        if parts is not None:
            self.counters[f"hit_{top.name}"] += len(parts)
        return parts

    def _read_level(
        self,
        level: int,
        wants: Sequence[Want],
        landing: BufferSource | None,
        *,
        here: Mapping[bytes, Listed],
    ) -> list[ReadPart | ReadMiss]:
        """Return each want's outcome: in one read, or one by one where that gives nothing, since
        the others may be good and what is in another layout may be converted.
        """
        removals = self.moves.removals
        together = self.tiers[level].read(wants, landing)
        if isinstance(together, ReadHit):
            return [
                self._took(level, part, record=here[want.id], removals=removals)
                for part, want in zip(together.parts, wants, strict=True)
            ]
        known = together.reason is not MissReason.FOREIGN_LAYOUT
        return [
            together
            if known and want.id == together.id
            else self._read_one(level, want, landing, here[want.id])
            for want in wants
        ]

    def _read_one(
        self, level: int, want: Want, landing: BufferSource | None, record: Listed
    ) -> ReadPart | ReadMiss:
        tier, removals = self.tiers[level], self.moves.removals
        outcome = self._read_from(tier, want, landing)
        if isinstance(outcome, ReadMiss):
            if outcome.reason is not MissReason.FOREIGN_LAYOUT:
                return outcome
            converted = read_converted(
                partial(self._read_from, tier, landing=landing), want, record
            )
            self.counters["foreign" if isinstance(converted, ReadMiss) else "converted"] += 1
            return converted
        return self._took(level, outcome.parts[0], record=record, removals=removals)

    def _took(self, level: int, part: ReadPart, *, record: Listed, removals: int) -> ReadPart:
        """Count a hit and have it copied up; `removals` is from before the read."""
        self.counters[f"hit_{self.tiers[level].name}"] += 1
        whole = len(part.data) == record.payload_bytes
        if level and whole and self.placement.goes_up(record):
            self.moves.add(TierMove(record, part.data, 0), removals)
        return part

    def _read_from(
        self, tier: TierBackend, want: Want, landing: BufferSource | None
    ) -> ReadOutcome:
        return tier.read([want], landing)

    def _on_evict(
        self, level: int, record: Listed, payload: Callable[[], memoryview | None]
    ) -> None:
        id_ = record.meta.id
        if level < self.plan.home:
            self.counters["covered"] += 1  # written through: it was durable before it was here
        elif self.placement.goes_down(record) and (data := payload()) is not None:
            self.moves.add(TierMove(record, data, level + 1))
        else:
            self.counters["dropped"] += 1
            self.moves.settled(id_)

    def settle(self) -> int:
        """Make the copies that wait and those that are owed; returns how many were made."""
        done = 0
        for _ in range(len(self.moves)):
            with self._moving:
                move = self.moves.take()
                if move is None:
                    break
                levels = (0,) if move.goes_up else range(move.level, len(self.tiers))
                outcome = self._copy(move.record, move.payload, levels)
            made = isinstance(outcome, WriteDone)
            lost = isinstance(outcome, WriteRefused) and not move.goes_up
            self.counters["promoted" if move.goes_up else "demoted"] += made
            self.counters["demotions_refused"] += lost
            done += made
        return done + self._write_back()

    def _write_back(self) -> int:
        """Make the owed copies of what is dirty on top. Stops at a medium that takes nothing now:
        all wait.
        """
        done, later = 0, self.plan.later
        for id_ in self.moves.dirty if later is not None else ():
            with self._moving:
                outcome = self._copy_down(id_, range(later or 0, len(self.tiers)))
            if isinstance(outcome, WriteRefused) and outcome.reason in COMES_AGAIN:
                self.counters["write_backs_deferred"] += 1
                break
            self.moves.settled(id_)
            done += isinstance(outcome, WriteDone)
        self.counters["written_back"] += done
        return done

    def _copy_down(self, id_: bytes, levels: Sequence[int]) -> WriteOutcome:
        """Copy a record, verified, from the top to the first of `levels` that takes it, if worth
        it.
        """
        top = self.tiers[0]
        record = top.find([id_]).get(id_)
        if record is None or not self.placement.goes_down(record):
            return WriteRefused(RefusalReason.LOW_UTILITY, id_)
        outcome = top.read([Want(id_)])
        if isinstance(outcome, ReadMiss):
            return WriteRefused(RefusalReason.LOW_UTILITY, id_)  # bad on top: nothing to copy
        return self._copy(record, outcome.parts[0].data, levels)

    def _copy(self, record: Listed, payload: memoryview, levels: Sequence[int]) -> WriteOutcome:
        outcome: WriteOutcome = WriteRefused(RefusalReason.NO_SPACE, record.meta.id)
        for level in levels:
            outcome = put(self.tiers[level], record.meta, payload)
            if isinstance(outcome, WriteDone) and record.restore_cost_ms:
                self.tiers[level].price({record.meta.id: record.restore_cost_ms})
            if not isinstance(outcome, WriteRefused):
                break
        return outcome

    def reserve(self, meta: Meta, payload_bytes: int) -> Reservation | AlreadyStored | WriteRefused:
        """Reserve at the level whose commit will be the answer."""
        outcome: Reservation | AlreadyStored | WriteRefused = WriteRefused(
            RefusalReason.NO_SPACE, meta.id
        )
        for level in (self.plan.home, *self.plan.overflow):
            outcome = self.tiers[level].reserve(meta, payload_bytes)
            if isinstance(outcome, Reservation):
                outcome.level = level
            if not isinstance(outcome, WriteRefused) or outcome.reason not in HAS_NO_ROOM:
                break
        return outcome

    def commit(self, reservations: Sequence[Reservation]) -> tuple[WriteOutcome, ...]:
        """Commit each at the level that reserved it, each level once; then the copies that go with
        it.
        """
        outcomes: dict[int, WriteOutcome] = {}
        for level, tier in enumerate(self.tiers):
            own = [(at, item) for at, item in enumerate(reservations) if item.level == level]
            if not own:
                continue
            copies = [self._reserve_copies(item) for _, item in own]
            answers = tier.commit([item for _, item in own])
            for (at, item), above, answer in zip(own, copies, answers, strict=True):
                outcomes[at] = answer
                self._finish_copies(above, answer)
                if self.plan.later is not None and level == 0 and isinstance(answer, WriteDone):
                    self.moves.owe(item.meta.id, item.meta.tenant)
        return tuple(outcomes[at] for at in range(len(reservations)))

    def _reserve_copies(self, item: Reservation) -> list[tuple[TierBackend, Reservation]]:
        """Reserve and fill the copies while the bytes can still be seen: a commit takes the
        buffer.
        """
        copies = []
        for level in self.plan.with_it:
            room = self.tiers[level].reserve(item.meta, item.payload_bytes)
            if isinstance(room, Reservation):
                room.payload[:] = item.payload
                copies.append((self.tiers[level], room))
            else:
                self.counters["copies_refused"] += isinstance(room, WriteRefused)
        return copies

    def _finish_copies(
        self, copies: list[tuple[TierBackend, Reservation]], answer: WriteOutcome
    ) -> None:
        for tier, room in copies:
            if isinstance(answer, WriteRefused):
                tier.abort(room)  # what is not durable is not shown as kept
            else:
                tier.commit([room])

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation's room back."""
        self.tiers[reservation.level].abort(reservation)

    def remove(self, ids: Sequence[bytes]) -> int:
        """Remove artifacts from every tier; returns how many there were."""
        with self._moving:
            there = len(self.find(ids))
            for tier in self.tiers:
                tier.remove(ids)
            self.moves.forget(ids)  # after: a read that began before may have queued a copy
        return there

    def expire(self, most: int = EVERY_RECORD) -> int:
        """Remove expired copies from every tier, at most so many of each; returns how many."""
        return sum(tier.expire(most) for tier in self.tiers)

    def purge(self, tenant: bytes) -> int:
        """Remove a tenant's copies from every tier, and what waits to be moved; returns how many
        copies.
        """
        with self._moving:
            gone = sum(tier.purge(tenant) for tier in self.tiers)
            self.moves.forget_tenant(tenant)  # after, as in `remove`
        return gone

    def price(self, costs_ms: Mapping[bytes, float]) -> None:
        """Note in every tier what it costs to make these artifacts again."""
        for tier in self.tiers:
            tier.price(costs_ms)

    def usage(self) -> Mapping[tuple[bytes, ArtifactKind], TierUsage]:
        """Return what the copies in all tiers occupy together, by tenant and kind."""
        total: dict[tuple[bytes, ArtifactKind], TierUsage] = {}
        for tier in self.tiers:
            for key, used in tier.usage().items():
                before = total.get(key, TierUsage())
                total[key] = TierUsage(*(a + b for a, b in zip(before, used, strict=True)))
        return total

    def close(self) -> None:
        """Make the copies that wait, then close every tier."""
        self.settle()
        for tier in self.tiers:
            tier.close()
