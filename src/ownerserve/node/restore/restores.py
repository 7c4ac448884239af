"""Restores: from a turn's arrival to its start. Pure.

    phase     leaves by                                                     holds
    LOOKING   Found: a plan is made                                         -
    FOUND     Asked: the engine says what it has itself                     -
    OFFERED   Placed: the engine says where it may go | Asked: again        -
    LOADING   Fetched | NotFetched | deadline                               slots, reserved
    FILLING   Filled | NotFetched: all of it counts, or nothing             the same

FOUND and OFFERED are for a device that answers `Later` (restore.device): a turn waits there in the
engine's queue and not for us, so they have no deadline; and once it has blocks, one effect
(`Bring`) reads and writes them, since only its performer knows when it is quiet.

Whatever goes wrong, the turn starts: with less state and more to compute. What could not be read
is left out of the next plan, so a bad record costs one attempt and is counted once. Slots are
reserved before a byte is read, and the reservation pins what of the prefix is resident; it is
given up before its errand's answer can touch them, since only a `Fill` writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from math import inf

import msgspec

from ownerserve.cache.outcomes import (
    Arrival,
    Match,
    NoRoom,
    Refused,
    Replay,
    Reserved,
    Restore,
    Resume,
)
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import TOKEN_BYTES, HashedPrefix, Packed
from ownerserve.node.restore import sources
from ownerserve.node.restore.sources import Device, Later
from ownerserve.node.retention.record_value import memory_price
from ownerserve.node.vocabulary.chains import Hashes
from ownerserve.node.vocabulary.events import (
    Arrived,
    Bring,
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
    Offer,
    RestoreOutcome,
    RestoreReport,
    Start,
)
from ownerserve.node.vocabulary.records import Digests, RecordNames
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.inputs import Backlog
from ownerserve.plan.outcome import Priced, RestorePlan
from ownerserve.plan.restore import Planner
from ownerserve.store.format.model import MissReason

FIRST_CELLS = 4
"""Cells that a restore asks for at first."""
LAST_POINTS = 64
"""How many depths before the end of what is stored are asked for point state at first: a session's
last turn ended there. All others are asked for only when nothing is."""
NONE = range(0)
NOBODY = TurnId("")
NOTHING_KNOWN = Match(0, ())


class Phase(StrEnum):
    """See the module's table."""

    LOOKING = "looking"
    FOUND = "found"
    OFFERED = "offered"
    LOADING = "loading"
    FILLING = "filling"


class Look(StrEnum):
    """What a wish in LOOKING has asked for last. A cold prompt takes the first look alone, a long
    one up to four, each of some hundred ids and not of thousands.

        range    resident | NEAR: every end | FAR: whole cells ........... | EDGE: every end | cap
        points                        NEAR ]                          EDGE ]  POINTS: the others
    """

    NEAR = "near"
    FAR = "far"
    EDGE = "edge"
    POINTS = "points"


class Wish(msgspec.Struct, eq=False):
    """A turn that waits for state. Owned by `Restores` until its `Start`.

    In blocks: the device has range state up to `resident` and a point at `complete`; up to `cap`
    may be restored, up to `upto` every end was asked for, and in `unasked` no point was.
    """

    event: Arrived
    names: RecordNames
    digests: Digests
    arrived_s: float
    deadline_s: float
    hashed: HashedPrefix | None = None
    phase: Phase = Phase.LOOKING
    look: Look = Look.NEAR
    errand: Errand = 0
    resident: int = 0
    complete: int = 0
    cap: int = 0
    upto: int = 0
    unasked: tuple[range, ...] = ()
    asked: dict[bytes, sources.Sought] = {}
    found: dict[bytes, Tier] = {}
    bad: set[bytes] = set()
    attempts: int = 0
    misses: int = 0
    plan: RestorePlan | None = None
    readings: tuple[sources.Reading, ...] = ()
    arrival: Arrival | None = None
    room: Reserved | None = None


class Restores:
    """All turns that wait for state, and the slots reserved for them."""

    def __init__(
        self,
        device: Device,
        names: RecordNames,
        *,
        planner: Planner,
        costs: CostModel,
        settings: NodeSettings,
    ) -> None:
        self.reports: dict[TurnId, RestoreReport] = {}
        self._device = device
        self._names = names
        self._planner = planner
        self._costs = costs
        self._settings = settings
        self._block = device.layout.block_tokens
        self._wishes: dict[TurnId, Wish] = {}
        self._by_errand: dict[Errand, Wish] = {}

    def __len__(self) -> int:
        return len(self._wishes)

    def held_blocks(self, turn_id: TurnId) -> int:
        """Blocks from the prompt's start on that a restore has reserved or locked."""
        wish = self._wishes.get(turn_id)
        if wish is None or wish.room is None:
            return 0
        return wish.room.start // self._block + len(wish.room.blocks)

    def __contains__(self, turn_id: TurnId) -> bool:
        return turn_id in self._wishes

    # -- what a turn goes on from --------------------------------------------------------------

    def resume(self, tokens: Packed) -> Resume | None:
        """How to begin a turn now, with what the device has: asked when the engine begins it.

        None: at the deepest complete point, as the cache does by itself.
        """
        match = self._device.match(NOBODY, tokens)
        count = len(tokens) // TOKEN_BYTES
        if isinstance(match, Later) or not match.points:
            return None
        if not self._names.point_names or not match.points[0].lacks:
            return None  # nothing resident lies behind the deepest complete point
        nothing = sources.NOTHING_HELD
        way = self._plan(self._names, match, nothing, tokens=count, backlog=Backlog()).chosen
        if way.position == 0 or sources.is_loading(way):
            return None
        if way.computed_from == way.position:
            return Restore(way.position)
        start = way.computed_from // self._block * self._block
        return Replay(start, way.position)

    def _plan(
        self,
        names: RecordNames,
        match: Match,
        stored: sources.Held,
        *,
        tokens: int,
        backlog: Backlog,
    ) -> RestorePlan:
        prices = self._costs.prices()
        short = self._device.shortage(-(-tokens // self._block) - match.range_tokens // self._block)
        rate = 0.0 if short is None else memory_price(short, prices)
        question = sources.query(
            names, match, stored, tokens=tokens, backlog=backlog, hbm_ms_per_gib=rate
        )
        return self._planner.plan(question, prices)

    # -- events --------------------------------------------------------------------------------

    def arrived(
        self, event: Arrived, chains: Hashes, *, errand: Errand, now: float
    ) -> Iterable[Effect]:
        """Ask the store, unless the device has all that could be restored."""
        cap = max(0, len(event.tokens) // TOKEN_BYTES - 1) // self._block
        match = self._device.match(event.turn_id, event.tokens)
        if isinstance(match, Later):
            match = NOTHING_KNOWN
        complete = next((p.position for p in match.points if not p.lacks), 0) // self._block
        if not self._names.point_names:
            complete = min(cap, match.range_tokens // self._block)
        deadline_s = now + self._settings.restore_deadline_s
        names = self._names.of(event.tenant)
        if complete >= cap:
            wish = Wish(event, names, (), now, deadline_s)
            return [self._start(wish, RestoreOutcome.RESIDENT, now)]
        hashed = chains.hashed(event.tokens, event.session_id, event.hashed)
        wish = Wish(event, names, hashed.digests, now, deadline_s, hashed=hashed, bad=set())
        wish.resident = min(cap, match.range_tokens // self._block)
        wish.complete, wish.cap = complete, cap
        # Nothing can be used behind a gap: a long prompt asks for its first cells, and for the
        # rest when those are there. A cold one so costs some ids and not thousands.
        grid = self._names.blocks
        wish.upto = min(cap, (wish.resident // grid + FIRST_CELLS) * grid)
        self._wishes[event.turn_id] = wish
        ends = range(wish.resident, wish.upto)
        return [self._ask(wish, errand, ends=ends, points=self._last(wish, complete))]

    def _last(self, wish: Wish, start: int) -> range:
        """The last depths in (start, upto] to ask for points; the others wait."""
        first = max(start, wish.upto - LAST_POINTS)
        wish.unasked += (range(start + 1, first + 1),)
        return range(first + 1, wish.upto + 1)

    def _ask(
        self,
        wish: Wish,
        errand: Errand,
        *,
        ends: range = NONE,
        points: Iterable[int] = (),
        cells: range = NONE,
    ) -> Find:
        """Ask for range records that end behind each block of `ends`, or at a depth of `cells`, and
        for point state at the depths `points`."""
        depths = (*range(ends.start + 1, ends.stop + 1), *cells)
        asked = sources.sought(wish.names, wish.digests, ranges=depths, points=points)
        wish.asked.update(asked)
        wish.errand = errand
        self._by_errand[errand] = wish
        boundaries = tuple(reversed(wish.digests[ends.start : ends.stop]))
        tenant = wish.names.tenant
        return Find(errand, tuple(asked), wish.deadline_s, boundaries, tenant)

    def found(self, event: Found, *, errand: Errand, now: float) -> Iterable[Effect]:
        """The catalogue has answered: ask on, or decide, and read what the plan wants."""
        wish = self._answered(event.errand, Phase.LOOKING)
        if wish is None:
            return ()
        wish.found.update(event.held)
        wish.asked.update(sources.sought_inside(wish.names, wish.digests, event.inside))
        find = self._look_on(wish, errand)
        return self._decide(wish, errand=errand, now=now) if find is None else [find]

    def _look_on(self, wish: Wish, errand: Errand) -> Find | None:
        """The next look, as far as one can still find anything; see `Look`."""
        grid = self._names.blocks
        stored = sources.held(wish.names, wish.asked, wish.found)
        ends = {cell.end for cell, _ in stored.cells}
        if wish.look is Look.NEAR:
            goes_on = wish.upto < wish.cap and wish.upto in ends
            wish.look = Look.FAR if goes_on else Look.EDGE
            cells = range(wish.upto + grid, wish.cap + 1, grid)
            if goes_on and cells:
                return self._ask(wish, errand, cells=cells)
        if wish.look is Look.FAR:
            wish.look, before, edge = Look.EDGE, wish.upto, wish.upto
            while edge + grid in ends:
                edge += grid
            wish.upto = min(wish.cap, edge + grid - 1)
            points = self._last(wish, before)
            if self._names.point_names or edge < wish.upto:
                return self._ask(wish, errand, ends=range(edge, wish.upto), points=points)
        if wish.look is Look.EDGE:
            wish.look = Look.POINTS
            depths = [depth for gap in wish.unasked for depth in gap]
            if depths and self._lacks_point(wish, stored):
                return self._ask(wish, errand, points=depths)
        return None

    def _lacks_point(self, wish: Wish, stored: sources.Held) -> bool:
        """Whether there is range state to go on from, and no point of the store's to do it at."""
        wanted = len(self._names.point_names)
        if not wanted or any(len(parts) == wanted for parts in stored.points.values()):
            return False
        return bool(stored.cells) or wish.resident > wish.complete

    def asked(self, turn_id: TurnId, *, now: float) -> Iterable[Effect]:
        """The engine has a place for the turn and says what it has: plan, and offer."""
        wish = self._wishes.get(turn_id)
        if wish is None or wish.phase not in (Phase.FOUND, Phase.OFFERED):
            return ()
        return self._decide(wish, errand=0, now=now)

    def placed(self, turn_id: TurnId, *, errand: Errand, now: float) -> Iterable[Effect]:
        """The engine has taken the offer: the turn has blocks to bring state into."""
        wish = self._wishes.get(turn_id)
        if wish is None or wish.phase is not Phase.OFFERED:
            return ()
        assert wish.arrival is not None
        reserved = self._device.reserve(turn_id, wish.arrival, now)
        if not isinstance(reserved, Reserved):
            return [self._start(wish, RestoreOutcome.NO_ROOM, now)]
        wish.room = reserved
        wish.attempts += 1
        wish.phase, wish.errand = Phase.FILLING, errand
        self._by_errand[errand] = wish
        wants = tuple(reading.want for reading in wish.readings)
        until_s = now + self._settings.restore_deadline_s
        return [Bring(turn_id, errand, wants, self._fillings(wish), until_s)]

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
        wish = self._answered(event.errand, Phase.LOADING, Phase.FILLING)
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
        inserted = self._device.commit(room.ticket, signature(event.ids), now)
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

    def _answered(self, errand: Errand, *phases: Phase) -> Wish | None:
        """The wish that waits for this answer; None for a late, foreign or repeated one."""
        wish = self._by_errand.get(errand)
        if wish is None or wish.phase not in phases:
            return None
        del self._by_errand[errand]
        return wish

    def _decide(self, wish: Wish, *, errand: Errand, now: float) -> Iterable[Effect]:
        event = wish.event
        stored = sources.held(wish.names, wish.asked, wish.found, without=wish.bad)
        if not stored.cells and not stored.points:
            missed = RestoreOutcome.MISS if wish.misses else RestoreOutcome.NOTHING_STORED
            return [self._start(wish, missed, now)]
        count = len(event.tokens) // TOKEN_BYTES
        match = self._device.match(event.turn_id, event.tokens)
        if isinstance(match, Later):
            wish.phase, wish.deadline_s = Phase.FOUND, inf
            return ()
        wish.plan = self._plan(wish.names, match, stored, tokens=count, backlog=event.backlog)
        way = wish.plan.chosen
        if not sources.is_loading(way):
            missed = RestoreOutcome.MISS if wish.misses else RestoreOutcome.NOT_WORTH_IT
            return [self._start(wish, missed, now)]
        reserved = self._reserve(wish, match, way, stored=stored, now=now)
        if isinstance(reserved, Later):
            wish.phase, wish.deadline_s = Phase.OFFERED, inf
            return [Offer(event.turn_id, way.position)]
        if not isinstance(reserved, Reserved):
            return [self._start(wish, RestoreOutcome.NO_ROOM, now)]
        wish.room = reserved
        wish.attempts += 1
        wish.phase, wish.errand = Phase.LOADING, errand
        self._by_errand[errand] = wish
        wants = tuple(reading.want for reading in wish.readings)
        return [Fetch(errand, wants, wish.deadline_s)]

    def _reserve(
        self, wish: Wish, match: Match, way: Priced, *, stored: sources.Held, now: float
    ) -> Reserved | NoRoom | Refused | Later:
        """Slots for the chosen way, and what to read into them."""
        start = min(match.range_tokens, way.position) // self._block
        wish.readings = sources.readings(wish.names, stored, way=way, start=start)
        wish.arrival = Arrival(
            tokens=wish.event.tokens[: way.position * TOKEN_BYTES],
            prefix_hash=wish.digests[way.position // self._block - 1],
            digest=signature(reading.want.id for reading in wish.readings),
            points=tuple({r.end * self._block for r in wish.readings if r.is_point}),
            hashed=wish.hashed,
        )
        reserved = self._device.reserve(wish.event.turn_id, wish.arrival, now)
        if isinstance(reserved, Reserved):
            assert reserved.start == start * self._block, "nothing came between match and reserve"
        return reserved

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
            self._device.abort(wish.room.ticket)
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
            loaded_point_bytes=sum(r.size_bytes for r in wish.readings if r.is_point)
            if loaded
            else 0,
            brought_tokens=self._brought_tokens(wish) if loaded else 0,
            misses=wish.misses,
        )
        return Start(turn_id)

    def _brought_tokens(self, wish: Wish) -> int:
        assert wish.plan is not None, "what is loaded was planned"
        return max(0, wish.plan.chosen.position - wish.complete * self._block)


def signature(ids: Iterable[bytes]) -> bytes:
    """What an arrival from the store is signed with: the records it is made of, in order.

    Each id binds model, tenant, prefix, component and tokens, and the store hands out bytes only
    with the digest written under that id (invariant 4).
    """
    return hashlib.sha256(b"".join(ids)).digest()
