"""Restores: from a turn's arrival to its start. Pure.

    phase     leaves by                                                     holds
    LOOKING   Found: a plan is made                                         -
    LOADING   Fetched | NotFetched | deadline                               slots, reserved
    FILLING   Filled: the cache takes them in, all or nothing               the same
    READY     Running: the engine has begun it                              -

Whatever goes wrong, the turn starts: with less state and more to compute. What could not be read
is left out of the next plan, so a bad record costs one attempt and is counted once. Slots are
reserved before a byte is read, and the reservation pins what of the prefix is resident; it is
given up before its errand's answer can touch them, since only a `Fill` writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import (
    Arrival,
    Match,
    Refused,
    Replay,
    Reserved,
    Restore,
    Resume,
)
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.node import survey
from ownerserve.node.chains import Chains
from ownerserve.node.events import (
    Arrived,
    Drop,
    Effect,
    Errand,
    Fetch,
    Fetched,
    Fill,
    Filled,
    Filling,
    Find,
    Found,
    NotFetched,
    RestoreOutcome,
    RestoreReport,
    Start,
)
from ownerserve.node.records import Digests, RecordNames
from ownerserve.node.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.inputs import Backlog, Tier
from ownerserve.plan.outcome import Priced, RestorePlan
from ownerserve.plan.restore import Planner
from ownerserve.store.model import MissReason


class Phase(StrEnum):
    """See the module's table."""

    LOOKING = "looking"
    LOADING = "loading"
    FILLING = "filling"


class Wish(msgspec.Struct, eq=False):
    """A turn that waits for state. Owned by `Restores` until its `Start`."""

    event: Arrived
    digests: Digests
    arrived_s: float
    deadline_s: float
    phase: Phase = Phase.LOOKING
    errand: Errand = 0
    asked: Mapping[bytes, survey.Sought] = {}
    found: Mapping[bytes, Tier] = {}
    bad: set[bytes] = set()
    attempts: int = 0
    misses: int = 0
    plan: RestorePlan | None = None
    readings: tuple[survey.Reading, ...] = ()
    room: Reserved | None = None


class Restores:
    """All turns that wait for state, and the slots reserved for them."""

    def __init__(
        self,
        cache: HeteroCache,
        names: RecordNames,
        *,
        planner: Planner,
        costs: CostModel,
        settings: NodeSettings,
    ) -> None:
        self.reports: dict[TurnId, RestoreReport] = {}
        self._cache = cache
        self._names = names
        self._planner = planner
        self._costs = costs
        self._settings = settings
        self._block = cache.layout.block_tokens
        self._wishes: dict[TurnId, Wish] = {}
        self._by_errand: dict[Errand, Wish] = {}

    def __len__(self) -> int:
        return len(self._wishes)

    # -- what a turn goes on from --------------------------------------------------------------

    def resume(self, tokens: Packed) -> Resume | None:
        """How to begin a turn now, with what the device has: asked when the engine begins it.

        None: at the deepest complete point, as the cache does by itself.
        """
        match = self._cache.match(tokens)
        count = len(tokens) // TOKEN_BYTES
        if not match.range_tokens or count < 2:
            return None
        way = self._plan(match, survey.NOTHING_HELD, tokens=count, backlog=Backlog()).chosen
        if way.position == 0 or survey.is_loading(way):
            return None
        if way.computed_from == way.position:
            return Restore(way.position)
        start = way.computed_from // self._block * self._block
        return Replay(start, way.position)

    def _plan(
        self, match: Match, stored: survey.Held, *, tokens: int, backlog: Backlog
    ) -> RestorePlan:
        question = survey.query(self._names, match, stored, tokens=tokens, backlog=backlog)
        return self._planner.plan(question, self._costs.prices())

    # -- events --------------------------------------------------------------------------------

    def arrived(
        self, event: Arrived, chains: Chains, *, errand: Errand, now: float
    ) -> Iterable[Effect]:
        """Ask the store, unless the device has all that could be restored."""
        cap = max(0, len(event.tokens) // TOKEN_BYTES - 1) // self._block
        match = self._cache.match(event.tokens)
        complete = next((p.position for p in match.points if not p.lacks), 0) // self._block
        if not self._names.layout.point_names:
            complete = min(cap, match.range_tokens // self._block)
        deadline_s = now + self._settings.restore_deadline_s
        if complete >= cap:
            wish = Wish(event, (), now, deadline_s)
            return [self._start(wish, RestoreOutcome.RESIDENT, now)]
        digests = chains.digests(event.tokens, event.session_id)
        wish = Wish(event, digests, now, deadline_s, errand=errand, bad=set())
        resident = min(cap, match.range_tokens // self._block)
        wish.asked = survey.sought(
            self._names, digests, resident=resident, complete=complete, cap=cap
        )
        self._wishes[event.turn_id] = self._by_errand[errand] = wish
        return [Find(errand, tuple(wish.asked), deadline_s)]

    def found(self, event: Found, *, errand: Errand, now: float) -> Iterable[Effect]:
        """The catalogue has answered; decide, and read what the plan wants."""
        wish = self._answered(event.errand, Phase.LOOKING)
        if wish is None:
            return ()
        wish.found = event.held
        return self._decide(wish, errand=errand, now=now)

    def fetched(self, event: Fetched) -> Iterable[Effect]:
        """The bytes are at hand: into the slots with them."""
        wish = self._answered(event.errand, Phase.LOADING)
        if wish is None:
            return ()
        wish.phase = Phase.FILLING
        self._by_errand[event.errand] = wish
        return [Fill(event.errand, self._fillings(wish))]

    def not_fetched(self, event: NotFetched, *, errand: Errand, now: float) -> Iterable[Effect]:
        """A miss: plan again without what failed, or go on without any."""
        wish = self._answered(event.errand, Phase.LOADING)
        if wish is None:
            return ()
        self._give_up_slots(wish)
        wish.misses += 1
        if event.reason is MissReason.DEADLINE or now >= wish.deadline_s:
            return [self._start(wish, RestoreOutcome.LATE, now)]
        wish.bad |= {event.id} if event.id else {r.want.id for r in wish.readings}
        if wish.attempts >= self._settings.attempts:
            return [self._start(wish, RestoreOutcome.MISS, now)]
        return self._decide(wish, errand=errand, now=now)

    def filled(self, event: Filled, now: float) -> Iterable[Effect]:
        """The slots are written: the prefix enters the tree with all its components at once."""
        wish = self._answered(event.errand, Phase.FILLING)
        if wish is None:
            return ()
        assert wish.room is not None
        room, wish.room = wish.room, None
        inserted = self._cache.ingest.commit(room.ticket, signature(event.ids), now)
        good = not isinstance(inserted, Refused)
        outcome = RestoreOutcome.LOADED if good else RestoreOutcome.MISS
        return [self._start(wish, outcome, now)]

    def gone(self, turn_id: TurnId, now: float) -> Iterable[Effect]:
        """The client has hung up."""
        wish = self._wishes.get(turn_id)
        return [] if wish is None else self._abandon(wish, RestoreOutcome.GONE, now)

    def overdue(self, now: float) -> list[Effect]:
        """Turns that have waited long enough start with what the device has."""
        effects: list[Effect] = []
        for wish in [w for w in self._wishes.values() if w.deadline_s <= now]:
            effects += self._abandon(wish, RestoreOutcome.LATE, now)
            effects.append(Start(wish.event.turn_id))
        return effects

    def next_deadline(self) -> float | None:
        """When `overdue` has something to do."""
        return min((wish.deadline_s for wish in self._wishes.values()), default=None)

    # -- parts ---------------------------------------------------------------------------------

    def _answered(self, errand: Errand, phase: Phase) -> Wish | None:
        """The wish that waits for this answer; None for a late, foreign or repeated one."""
        wish = self._by_errand.get(errand)
        if wish is None or wish.phase is not phase:
            return None
        del self._by_errand[errand]
        return wish

    def _decide(self, wish: Wish, *, errand: Errand, now: float) -> Iterable[Effect]:
        event = wish.event
        stored = survey.held(self._names, wish.asked, wish.found, without=wish.bad)
        if not stored.cells and not stored.points:
            missed = RestoreOutcome.MISS if wish.misses else RestoreOutcome.NOTHING_STORED
            return [self._start(wish, missed, now)]
        count = len(event.tokens) // TOKEN_BYTES
        match = self._cache.match(event.tokens)
        wish.plan = self._plan(match, stored, tokens=count, backlog=event.backlog)
        way = wish.plan.chosen
        if not survey.is_loading(way):
            missed = RestoreOutcome.MISS if wish.misses else RestoreOutcome.NOT_WORTH_IT
            return [self._start(wish, missed, now)]
        if not self._reserve(wish, way, stored, now=now):
            return [self._start(wish, RestoreOutcome.NO_ROOM, now)]
        wish.attempts += 1
        wish.phase, wish.errand = Phase.LOADING, errand
        self._by_errand[errand] = wish
        wants = tuple(reading.want for reading in wish.readings)
        return [Fetch(errand, wants, wish.deadline_s)]

    def _reserve(self, wish: Wish, way: Priced, stored: survey.Held, *, now: float) -> bool:
        """Slots for the chosen way, and what to read into them."""
        match = self._cache.match(wish.event.tokens)
        start = min(match.range_tokens, way.position) // self._block
        wish.readings = survey.readings(self._names, stored, way=way, start=start)
        arrival = Arrival(
            tokens=wish.event.tokens[: way.position * TOKEN_BYTES],
            prefix_hash=wish.digests[way.position // self._block - 1],
            digest=signature(reading.want.id for reading in wish.readings),
            points=tuple({r.end * self._block for r in wish.readings if r.is_point}),
        )
        reserved = self._cache.ingest.reserve(arrival, now)
        if not isinstance(reserved, Reserved):
            return False
        assert reserved.start == start * self._block, "nothing came between match and reserve"
        wish.room = reserved
        return True

    def _fillings(self, wish: Wish) -> tuple[Filling, ...]:
        """Where each part of the fetch belongs."""
        assert wish.room is not None
        room, start = wish.room, wish.room.start // self._block
        fillings = []
        for part, reading in enumerate(wish.readings):
            if reading.is_point:
                slots: tuple[int, ...] = (
                    room.points[reading.end * self._block][reading.component],
                )
            else:
                slots = room.blocks[reading.first - start : reading.end - start]
            fillings.append(Filling(part, reading.component, slots))
        return tuple(fillings)

    def _give_up_slots(self, wish: Wish) -> None:
        """Nobody writes into them: only a `Fill` does, and it is done before anything else."""
        if wish.room is not None:
            self._cache.ingest.abort(wish.room.ticket)
            self._cache.ingest.quiet(wish.room.ticket)
            wish.room = None

    def _abandon(self, wish: Wish, outcome: RestoreOutcome, now: float) -> list[Effect]:
        self._give_up_slots(wish)
        self._by_errand.pop(wish.errand, None)
        self._start(wish, outcome, now)
        return [Drop(wish.errand)]

    def _start(self, wish: Wish, outcome: RestoreOutcome, now: float) -> Start:
        turn_id = wish.event.turn_id
        self._wishes.pop(turn_id, None)
        loaded = outcome is RestoreOutcome.LOADED
        self.reports[turn_id] = RestoreReport(
            outcome=outcome,
            plan=wish.plan,
            waited_s=now - wish.arrived_s,
            loaded_bytes=sum(r.size_bytes for r in wish.readings) if loaded else 0,
            misses=wish.misses,
        )
        return Start(turn_id)


def signature(ids: Iterable[bytes]) -> bytes:
    """What an arrival from the store is signed with: the records it is made of, in order.

    Each id binds model, tenant, prefix, component and tokens, and the store hands out bytes only
    with the digest written under that id (invariant 4).
    """
    return hashlib.sha256(b"".join(ids)).digest()
