"""A restore takes a turn from its arrival to its start. Pure.

    phase     leaves by                                                     holds
    LOOKING   RecordsFound: a plan is made                                  -
    FOUND     DeviceAsked: the engine says what it has itself               -
    OFFERED   DevicePlaced: the engine says where it may go | DeviceAsked   -
    LOADING   Fetched | NotFetched | deadline                               slots, reserved
    FILLING   Filled | deadline                                             slots, with a writer
    BETWEEN   go_on: there is room for the next part                        -
    BRINGING  Filled | NotFetched                                           slots, with a writer

FOUND and OFFERED are for a device that answers `Later` (restore.device): a turn waits there in the
engine's queue and not for us, so they have no deadline; and once it has blocks, one effect
(`FetchAndFill`, while BRINGING) reads and writes them, since only its performer knows when it is
quiet. All that was read and written counts, or nothing.

A long restore comes in parts (NodeSettings.part_tokens): LOADING, FILLING and BETWEEN once more
for each. What is committed is in the tree, verified and named by its tokens, whatever becomes of
the next part. BETWEEN two of them the turn is back in line for room (admission.RoomQueue), and
nothing keeps what has come but its soft reference. The last part has the point state.

Whatever goes wrong, the turn starts: with less state and more to compute. What could not be read
is left out of the next plan, so a bad record costs one attempt and is counted once. A part's slots
are reserved before a byte of it is read, and the reservation pins what of the prefix is resident.

A reservation that is given up is on hold until its writer is quiet. A `Fetch` reads into memory of
its own and was handed no slot, so while LOADING nobody writes: the slots are free at once, and a
silent store keeps no device memory. A `Fill` and a `FetchAndFill` were handed the slots: theirs are
free when that operation's own answer comes, however late, and if none comes, never.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import zip_longest
from math import inf

import msgspec

from ownerserve.cache.outcomes import (
    Arrival,
    CacheRefused,
    Match,
    NoRoom,
    Replay,
    Restore,
    Resume,
    SlotsReserved,
    Verified,
)
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import TOKEN_BYTES, HashedPrefix, Packed
from ownerserve.node.restore import sources
from ownerserve.node.restore.sources import Device, Later
from ownerserve.node.restore.trials import Trials
from ownerserve.node.retention.record_value import memory_price
from ownerserve.node.vocabulary.chains import Hashes
from ownerserve.node.vocabulary.events import (
    CallOffPrefill,
    Completion,
    DropOperation,
    Effect,
    Fetch,
    FetchAndFill,
    Fetched,
    Fill,
    Filled,
    Filling,
    FindRecords,
    MoveSlots,
    NotFetched,
    Offer,
    OperationId,
    PeerPrefix,
    PeerRecord,
    PrefillOrder,
    RecordsFound,
    RestoreOutcome,
    RestoreReport,
    Start,
    TurnArrived,
)
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import Digests, RecordNames
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.cost.prices import Prices
from ownerserve.plan.inputs import Backlog, RestoreQuery
from ownerserve.plan.outcome import Priced, RestorePlan
from ownerserve.plan.restore import Planner
from ownerserve.store.format.model import MissReason, Want

FIRST_CELLS = 4
"""Cells that a restore asks for at first."""
LAST_POINTS = 64
"""How many depths before the end of what is stored are asked for point state at first: a session's
last turn ended there. All others are asked for only when nothing is."""
ORDER_S = 300.0
"""A prompt that another worker computes is waited for so much longer: the bring ends by deadlines
of its own, which know what that worker said."""
NONE = range(0)
NOTHING_KNOWN = Match(0, ())


class RestorePhase(StrEnum):
    """A `RestorePhase` is where a restore stands; the module's table says how it goes on."""

    LOOKING = "looking"
    FOUND = "found"
    OFFERED = "offered"
    LOADING = "loading"
    FILLING = "filling"
    BETWEEN = "between"
    BRINGING = "bringing"


WRITING = (RestorePhase.FILLING, RestorePhase.BRINGING)
"""Phases in which somebody was handed the slots."""


class Look(StrEnum):
    """A `Look` is what a restore in LOOKING has asked the catalogue for last.

    A cold prompt takes the first look alone, a long one up to four, each of some hundred ids and
    not of thousands.

        range    resident | NEAR: every end | FAR: whole cells ........... | EDGE: every end | cap
        points                        NEAR ]                          EDGE ]  POINTS: the others
    """

    NEAR = "near"
    FAR = "far"
    EDGE = "edge"
    POINTS = "points"


class PendingRestore(msgspec.Struct, eq=False):
    """A `PendingRestore` is a turn that waits for state; `Restores` owns it until its `Start`.

    In blocks: the device has range state up to `resident` and a point at `complete`; up to `cap`
    may be restored, up to `upto` every end was asked for, and in `unasked` no point was.
    """

    event: TurnArrived
    names: RecordNames
    digests: Digests
    arrived_s: float
    deadline_s: float
    hashed: HashedPrefix | None = None
    order: PrefillOrder | None = None
    phase: RestorePhase = RestorePhase.LOOKING
    look: Look = Look.NEAR
    operation_id: OperationId = 0
    resident: int = 0
    complete: int = 0
    cap: int = 0
    upto: int = 0
    unasked: tuple[range, ...] = ()
    asked: dict[bytes, sources.RecordQuery] = {}
    found: dict[bytes, Tier] = {}
    peer_ready_ms: float = 0.0
    stored: sources.StoredRecords | None = None
    """What of `found` can be used; None: that has changed since it was made."""
    bases: set[bytes] = set()
    """Ids of other prefixes' points that were asked for, since a lead of theirs was found."""
    bad: set[bytes] = set()
    misses: int = 0
    lost: int = 0
    """Blocks that had been brought and were evicted before the next part came."""
    plan: RestorePlan | None = None
    match: Match | None = None
    """What the device had when `plan` was made."""
    readings: tuple[sources.RecordRead, ...] = ()
    """What the part that is brought now is read from; it reaches depth `end`."""
    end: int = 0
    to_come: tuple[sources.RecordRead, ...] = ()
    """What that part and those behind it are read from, until somebody has been told."""
    brought: tuple[sources.RecordRead, ...] = ()
    """What the parts were read from that are committed."""
    arrival: Arrival | None = None
    room: SlotsReserved | None = None

    @property
    def goal(self) -> int:
        """`goal` is the depth up to which the plan brings state."""
        assert self.plan is not None, "what is brought was planned"
        return self.plan.chosen.position // self.names.layout.block_tokens


class Restores:
    """`Restores` owns all turns that wait for state, and the slots reserved for them."""

    def __init__(
        self,
        device: Device,
        names: RecordNames,
        operations: Operations,
        *,
        planner: Planner,
        costs: CostModel,
        settings: NodeSettings,
    ) -> None:
        self.reports: dict[TurnId, RestoreReport] = {}
        self.parted: deque[tuple[TurnId, int]] = deque(maxlen=1)
        """`parted` has the turn that was planned last, and up to where device and store had range
        state of it then; who saves by it empties it."""
        self.trials = Trials()
        self.between: list[TurnArrived] = []
        """`between` has the turns that came between two parts; who gives them room empties it."""
        self._device = device
        self._names = names
        self._operations = operations
        self._planner = planner
        self._costs = costs
        self._settings = settings
        self._block = device.layout.block_tokens
        self._part_blocks = -(-settings.part_tokens // self._block)
        self._pending: dict[TurnId, PendingRestore] = {}
        self._by_operation: dict[OperationId, PendingRestore] = {}
        self.unquiet: dict[OperationId, int] = {}
        """`unquiet` has the tickets of reservations that were given up while the operation wrote
        into their slots: they are on hold until it has answered."""

    def __len__(self) -> int:
        return len(self._pending)

    def held_blocks(self, turn_id: TurnId) -> int:
        """Return how many blocks from the prompt's start on the turn's restore has reserved or
        locked; 0 without one."""
        pending = self._pending.get(turn_id)
        if pending is None or pending.room is None:
            return 0
        return pending.room.start // self._block + len(pending.room.blocks)

    def __contains__(self, turn_id: TurnId) -> bool:
        return turn_id in self._pending

    def is_looking(self, turn_id: TurnId) -> bool:
        """Return whether the turn waits for the catalogue."""
        pending = self._pending.get(turn_id)
        return pending is not None and pending.phase is RestorePhase.LOOKING

    # -- what a turn goes on from --------------------------------------------------------------

    def resume(self, turn_id: TurnId, tokens: Packed, count: int) -> Resume | None:
        """Decide how to begin a turn of `count` tokens now, with what the device has: of `tokens`,
        or in an engine that owns its blocks, of the turn, once it has said so. The engine asks when
        it begins the turn.

        None: at the deepest complete point, as the cache does by itself.
        """
        return self._resumed(self._device.match(turn_id, tokens), count)

    def use(self, planner: Planner) -> None:
        """Plan with `planner` from now on, since the engine has learnt what it can do."""
        self._planner = planner

    def _resumed(self, match: Match | Later, count: int) -> Resume | None:
        if isinstance(match, Later) or not match.points:
            return None
        if not self._names.point_names or not match.points[0].lacks:
            return None  # nothing resident lies behind the deepest complete point
        nothing = sources.NOTHING_HELD
        question, prices = self._question(
            self._names, match, nothing, tokens=count, backlog=Backlog()
        )
        way = self._planner.plan(question, prices).chosen
        if way.position == 0 or sources.is_loading(way):
            return None
        if way.computed_from == way.position:
            return Restore(way.position)
        start = way.computed_from // self._block * self._block
        return Replay(start, way.position)

    def _question(
        self,
        names: RecordNames,
        match: Match,
        stored: sources.StoredRecords,
        *,
        tokens: int,
        backlog: Backlog,
    ) -> tuple[RestoreQuery, Prices]:
        """Return what the planner is asked, and the prices that hold now."""
        prices = self._costs.prices()
        short = self._device.shortage(-(-tokens // self._block) - match.range_tokens // self._block)
        rate = 0.0 if short is None else memory_price(short, prices)
        question = sources.restore_query(
            names, match, stored, tokens=tokens, backlog=backlog, hbm_ms_per_gib=rate
        )
        return question, prices

    # -- events --------------------------------------------------------------------------------

    def completed(self, event: Completion, now: float) -> Iterable[Effect]:
        """Take the store's answer to a look, a fetch or a fill; return the effects that follow."""
        if event.operation_id in self.unquiet:
            return self._quiet(event)
        match event:
            case RecordsFound():
                return self._found(event, now)
            case Fetched():
                return self._fetched(event)
            case NotFetched():
                return self._not_fetched(event, now)
            case Filled():
                return self._filled(event, now)
        return ()

    def arrived(self, event: TurnArrived, chains: Hashes, *, now: float) -> Iterable[Effect]:
        """Bring the next part for a turn that is between two. Begin the restore of any other one:
        ask the store, or start the turn at once where the device has all that could be restored."""
        pending = self._pending.get(event.turn_id)
        if pending is not None and pending.phase is RestorePhase.BETWEEN:
            return self._go_on(pending, now)
        cap = max(0, len(event.tokens) // TOKEN_BYTES - 1) // self._block
        match = self._device.match(event.turn_id, event.tokens)
        if isinstance(match, Later):
            match = NOTHING_KNOWN
        complete = next((p.position for p in match.points if not p.lacks), 0) // self._block
        if not self._names.point_names:
            complete = min(cap, match.range_tokens // self._block)
        deadline_s = now + self._within_s(event)
        names = self._names.of(event.tenant)
        if complete >= cap:
            pending = PendingRestore(event, names, (), now, deadline_s)
            return self._started(pending, RestoreOutcome.RESIDENT, now)
        hashed = chains.hashed(event.tokens, event.session_id, event.hashed)
        pending = PendingRestore(
            event, names, hashed.digests, now, deadline_s, hashed=hashed, bad=set()
        )
        pending.resident = min(cap, match.range_tokens // self._block)
        pending.complete, pending.cap = complete, cap
        pending.order = self._order(pending)
        if pending.order is not None:
            pending.deadline_s += ORDER_S
        # Nothing can be used behind a gap: a long prompt asks for its first cells, and for the
        # rest when those are there. A cold one so costs some ids and not thousands.
        grid = self._names.blocks
        pending.upto = min(cap, (pending.resident // grid + FIRST_CELLS) * grid)
        if not self._names.range_names:  # nothing to look for but the points, anywhere
            pending.upto = cap
        self._pending[event.turn_id] = pending
        ends = range(pending.resident, pending.upto)
        return [self._ask(pending, ends=ends, points=self._last(pending, complete))]

    def _order(self, pending: PendingRestore) -> PrefillOrder | None:
        """Return who is to compute the prompt: by the gateway's word, or where none has been said
        and much is to be computed, whom the node finds."""
        order = pending.event.order
        left = (pending.cap - pending.resident) * self._block
        is_short = order is not None and order.worker is None and left < self._settings.order_tokens
        return None if is_short else order

    def _last(self, pending: PendingRestore, start: int) -> range:
        """Return the last depths in (start, upto], LAST_POINTS at most, to ask points at; the
        earlier ones are noted as unasked."""
        first = max(start, pending.upto - LAST_POINTS)
        pending.unasked += (range(start + 1, first + 1),)
        return range(first + 1, pending.upto + 1)

    def _ask(
        self,
        pending: PendingRestore,
        *,
        ends: range = NONE,
        points: Iterable[int] = (),
        cells: range = NONE,
    ) -> FindRecords:
        """Ask for range records that end behind each block of `ends`, or at a depth of `cells`, and
        for point state at the depths `points`."""
        depths = (*range(ends.start + 1, ends.stop + 1), *cells)
        asked = sources.record_queries(pending.names, pending.digests, ranges=depths, points=points)
        pending.asked.update(asked)
        operation_id = self._begin(pending)
        # Where a cell is whole, a lead may go on behind it.
        first = ends.start - 1 if pending.names.lead is not None and ends.start else ends.start
        boundaries = tuple(reversed(pending.digests[first : ends.stop]))
        tenant, ids = pending.names.tenant, tuple(asked)
        peer = self._peer(pending, asked)
        return FindRecords(operation_id, ids, pending.deadline_s, boundaries, tenant, peer)

    def _peer(
        self, pending: PendingRestore, asked: Mapping[bytes, sources.RecordQuery]
    ) -> PeerPrefix | None:
        """Return what of this look a peer may hold; None where nobody was named, or the session has
        no name that the peer knows."""
        event = pending.event
        order = pending.order
        lender = event.lender if order is None else order.worker
        session_id = event.lent_as or event.session_id
        if order is None and (lender is None or session_id is None):
            return None
        records = dict[bytes, PeerRecord]()
        for id_, query in asked.items():
            first = query.first
            if first is None:
                first = pending.names.cell_ending_at(query.end).first
            records[id_] = PeerRecord(query.component, first, query.end)
        tokens = pending.cap * self._block
        return PeerPrefix(
            lender=lender,
            session_id=session_id,
            parent=event.parent,
            tokens=tokens,
            digests=pending.digests,
            records=records,
            grid_blocks=pending.names.blocks,
            compute_ms=self._compute_ms(pending),
            turn_id=event.turn_id,
            order=order,
            resident_tokens=pending.resident * self._block if event.session_id else 0,
        )

    def _compute_ms(self, pending: PendingRestore) -> float:
        """Return what computing the rest of what may be restored would take here; in place of an
        order, behind all that waits here too."""
        known, price = pending.resident * self._block, self._costs.prices().prefill
        ms = price.ms(pending.cap * self._block - known, known)
        ahead = pending.event.backlog.prefill_tokens
        return ms + price.ms(ahead, 0) if pending.order is not None and ahead > 0 else ms

    def _found(self, event: RecordsFound, now: float) -> Iterable[Effect]:
        """Take the catalogue's answer: ask on, or decide, and read what the plan wants."""
        pending = self._answered(event.operation_id, RestorePhase.LOOKING)
        if pending is None:
            return ()
        if event.held:
            pending.found.update(event.held)
            pending.peer_ready_ms = max(pending.peer_ready_ms, event.peer_ready_ms)
            pending.stored = None
        inside = sources.queries_inside(pending.names, pending.digests, event.inside)
        pending.asked.update(inside)
        bases = {query.lead.base_id for query in inside.values() if query.lead is not None}
        find: FindRecords | None
        if bases := bases - {b""} - pending.bases:
            pending.bases |= bases
            ids, tenant = tuple(sorted(bases)), pending.names.tenant
            find = FindRecords(self._begin(pending), ids, pending.deadline_s, tenant=tenant)
        else:
            find = self._look_on(pending)
        return self._decide(pending, now) if find is None else [find]

    def _look_on(self, pending: PendingRestore) -> FindRecords | None:
        """Return the next look, as far as one can still find anything (see `Look`); None: what is
        found is all."""
        grid = self._names.blocks
        stored = self._stored(pending)
        ends = {cell.end for cell, _ in stored.cells}
        if pending.look is Look.NEAR:
            goes_on = pending.upto < pending.cap and pending.upto in ends
            pending.look = Look.FAR if goes_on else Look.EDGE
            cells = range(pending.upto + grid, pending.cap + 1, grid)
            if goes_on and cells:
                return self._ask(pending, cells=cells)
        if pending.look is Look.FAR:
            pending.look, before, edge = Look.EDGE, pending.upto, pending.upto
            while edge + grid in ends:
                edge += grid
            pending.upto = min(pending.cap, edge + grid - 1)
            points = self._last(pending, before)
            if self._names.point_names or edge < pending.upto:
                return self._ask(pending, ends=range(edge, pending.upto), points=points)
        if pending.look is Look.EDGE:
            pending.look = Look.POINTS
            depths = [depth for gap in pending.unasked for depth in gap]
            if depths and self._lacks_point(pending, stored):
                return self._ask(pending, points=depths)
        return None

    def _stored(self, pending: PendingRestore) -> sources.StoredRecords:
        """Return what the store has of the turn's prompt, as far as it was asked and nothing
        failed."""
        if pending.stored is None:
            stored = sources.stored_records(
                pending.names, pending.asked, pending.found, without=pending.bad
            )
            pending.stored = msgspec.structs.replace(stored, peer_ready_ms=pending.peer_ready_ms)
        return pending.stored

    def _lacks_point(self, pending: PendingRestore, stored: sources.StoredRecords) -> bool:
        """Return whether there is range state to go on from, or the model needs none, and the
        store has no whole point to do it at."""
        wanted = len(self._names.point_names)
        if not wanted or any(len(parts) == wanted for parts in stored.points.values()):
            return False
        if not self._names.range_names:
            return True
        return bool(stored.cells) or pending.resident > pending.complete

    def asked(self, turn_id: TurnId, *, now: float) -> Iterable[Effect]:
        """Plan, and offer, now that the engine has a place for the turn and says what it has
        itself; what was offered for as much stays, so that a turn that waits costs one plan."""
        pending = self._pending.get(turn_id)
        if pending is None or pending.phase not in (RestorePhase.FOUND, RestorePhase.OFFERED):
            return ()
        if pending.phase is RestorePhase.OFFERED and pending.plan is not None:
            event = pending.event
            if self._device.match(event.turn_id, event.tokens) == pending.match:
                way = pending.plan.chosen
                return [Offer(event.turn_id, way.position, way.computed_from)]
        return self._decide(pending, now)

    def placed(self, turn_id: TurnId, *, now: float) -> Iterable[Effect]:
        """Read into the turn's blocks what was offered, now that the engine has taken the offer and
        given the turn its blocks."""
        pending = self._pending.get(turn_id)
        if pending is None or pending.phase is not RestorePhase.OFFERED:
            return ()
        assert pending.arrival is not None
        reserved = self._device.reserve(turn_id, pending.arrival, now)
        if not isinstance(reserved, SlotsReserved):
            return self._started(pending, RestoreOutcome.NO_ROOM, now)
        pending.room = reserved
        pending.phase, operation_id = RestorePhase.BRINGING, self._begin(pending)
        wants = tuple(reading.want for reading in pending.readings)
        until_s = now + self._within_s(pending.event)
        return [FetchAndFill(turn_id, operation_id, wants, self._fillings(pending), until_s)]

    def _fetched(self, event: Fetched) -> Iterable[Effect]:
        """Write the bytes, which are in memory now, into the reserved slots, under the same
        operation."""
        pending = self._waiting(event.operation_id, RestorePhase.LOADING)
        if pending is None:
            return ()
        pending.phase = RestorePhase.FILLING
        return [Fill(event.operation_id, self._fillings(pending))]

    def _not_fetched(self, event: NotFetched, now: float) -> Iterable[Effect]:
        """Take a miss: plan again without what failed, or start the turn with what the device has,
        when it is late or attempts are used up."""
        pending = self._answered(event.operation_id, RestorePhase.LOADING, RestorePhase.BRINGING)
        if pending is None:
            return ()
        self._give_up_slots(pending, now)
        pending.misses += 1
        if event.reason is MissReason.DEADLINE or now >= pending.deadline_s:
            return self._started(pending, RestoreOutcome.LATE, now)
        pending.bad |= {event.id} if event.id else {r.want.id for r in pending.readings}
        pending.stored = None
        if pending.misses >= self._settings.attempts:
            return self._started(pending, RestoreOutcome.MISS, now)
        return self._decide(pending, now)

    def _filled(self, event: Filled, now: float) -> Iterable[Effect]:
        """Commit the slots, which are written: the part enters the tree with all its components at
        once. The turn starts behind the last part, else it waits for the next one's room."""
        pending = self._answered(event.operation_id, *WRITING)
        if pending is None:
            return ()
        assert pending.room is not None
        room, pending.room = pending.room, None
        inserted = self._device.commit(room.ticket, _verified(pending.readings, event.ids), now)
        if isinstance(inserted, CacheRefused):
            return self._started(pending, RestoreOutcome.MISS, now)
        pending.brought += pending.readings
        if pending.end < pending.goal:
            return self._in_line(pending)
        return self._started(pending, RestoreOutcome.LOADED, now)

    def _in_line(self, pending: PendingRestore) -> Iterable[Effect]:
        """Have the turn wait for the room of its next part; the line has a deadline."""
        pending.phase, pending.deadline_s = RestorePhase.BETWEEN, inf
        self.between.append(pending.event)
        return ()

    def _within_s(self, event: TurnArrived) -> float:
        """Return how long what is brought for the turn may take."""
        return self._settings.restore_deadline_s if event.within_s is None else event.within_s

    def _go_on(self, pending: PendingRestore, now: float) -> Iterable[Effect]:
        """Bring the next part, for which there is room now. What had been brought and is gone is
        planned anew, until as much has gone as there was to bring."""
        turn_id = pending.event.turn_id
        pending.deadline_s = now + self._within_s(pending.event)
        if pending.order is not None:
            pending.deadline_s += ORDER_S
        match = self._device.match(turn_id, pending.event.tokens)
        assert not isinstance(match, Later), "an engine's own blocks are filled at once"
        if match.range_tokens // self._block >= pending.end:
            return self._bring(pending, match, now)
        pending.lost += pending.end - match.range_tokens // self._block
        if pending.lost > pending.goal:
            return self._started(pending, RestoreOutcome.NO_ROOM, now)
        return self._decide(pending, now)

    def stop(self, turn_id: TurnId, now: float) -> Iterable[Effect]:
        """Start the turn with the parts that have come: there is no room for another one, or no
        more for the one that is on its way."""
        pending = self._pending.get(turn_id)
        if pending is None:
            return []
        return [*self._abandon(pending, RestoreOutcome.NO_ROOM, now), Start(turn_id)]

    def gone(self, turn_id: TurnId, now: float) -> Iterable[Effect]:
        """Give the turn's restore up, since the turn was given up; no error where there is none."""
        pending = self._pending.get(turn_id)
        return [] if pending is None else self._abandon(pending, RestoreOutcome.GONE, now)

    def overdue(self, now: float) -> list[Effect]:
        """Start the turns whose deadline is over with what the device has, and drop their
        operations."""
        effects: list[Effect] = []
        if not self._pending:
            return effects
        for pending in [w for w in self._pending.values() if w.deadline_s <= now]:
            effects += self._abandon(pending, RestoreOutcome.LATE, now)
            effects.append(Start(pending.event.turn_id))
        return effects

    def next_deadline(self) -> float | None:
        """Return the instant at which `overdue` has something to do; None: no turn waits."""
        if not self._pending:
            return None
        return min([pending.deadline_s for pending in self._pending.values()])

    # -- parts ---------------------------------------------------------------------------------

    def _begin(self, pending: PendingRestore) -> OperationId:
        """Begin a new operation, the one that the restore waits for from now on, and return its
        id."""
        pending.operation_id = self._operations.begin(self)
        self._by_operation[pending.operation_id] = pending
        return pending.operation_id

    def _end(self, operation_id: OperationId) -> None:
        self._by_operation.pop(operation_id, None)
        self._operations.end(operation_id)

    def _waiting(self, operation_id: OperationId, *phases: RestorePhase) -> PendingRestore | None:
        """Return the restore that waits in one of `phases` for this answer; None for a foreign or
        repeated answer."""
        pending = self._by_operation.get(operation_id)
        return pending if pending is not None and pending.phase in phases else None

    def _answered(self, operation_id: OperationId, *phases: RestorePhase) -> PendingRestore | None:
        """End the operation and return the restore that waited for it in one of `phases`; None for
        a foreign or repeated answer."""
        pending = self._waiting(operation_id, *phases)
        if pending is not None:
            self._end(operation_id)
        return pending

    def _decide(self, pending: PendingRestore, now: float) -> Iterable[Effect]:
        event = pending.event
        stored = self._stored(pending)
        if not stored.cells and not stored.points:
            missed = RestoreOutcome.MISS if pending.misses else RestoreOutcome.NOTHING_STORED
            return self._started(pending, missed, now)
        count = len(event.tokens) // TOKEN_BYTES
        match = self._device.match(event.turn_id, event.tokens)
        if isinstance(match, Later):
            pending.phase, pending.deadline_s = RestorePhase.FOUND, inf
            return ()
        pending.match = match
        known = sources.covered_tokens(pending.names, match, stored)
        self.parted.append((event.turn_id, known))
        question, prices = self._question(
            pending.names, match, stored, tokens=count, backlog=event.backlog
        )
        plan = self.trials.plan(self._planner, question, prices)
        if sources.is_loading(plan.chosen):
            pending.plan, pending.end = plan, 0
            return self._bring(pending, match, now)
        if not pending.brought:  # else the plan by which that came is told
            pending.plan = plan
        missed = RestoreOutcome.MISS if pending.misses else RestoreOutcome.NOT_WORTH_IT
        return self._started(pending, missed, now)

    def _bring(self, pending: PendingRestore, match: Match, now: float) -> Iterable[Effect]:
        """Bring the next part of what is planned, behind what the device has."""
        assert pending.plan is not None, "what is brought was planned"
        way, turn_id = pending.plan.chosen, pending.event.turn_id
        reserved, first = self._reserve(pending, match, way, now=now), list[Effect]()
        if reserved is None:
            return self._started(pending, RestoreOutcome.NOT_WORTH_IT, now)
        if isinstance(reserved, Later):
            pending.phase, pending.deadline_s = RestorePhase.OFFERED, inf
            return [Offer(turn_id, way.position, way.computed_from)]
        if isinstance(reserved, NoRoom) and (moves := self._device.give_way(reserved)):
            assert pending.arrival is not None
            first.append(MoveSlots(moves))
            reserved = self._device.reserve(turn_id, pending.arrival, now)
        if not isinstance(reserved, SlotsReserved):
            return [*first, *self._started(pending, RestoreOutcome.NO_ROOM, now)]
        pending.room = reserved
        pending.phase, operation_id = RestorePhase.LOADING, self._begin(pending)
        wants = tuple(reading.want for reading in pending.readings)
        computed = self._computed(pending)
        fetch = Fetch(operation_id, wants, pending.deadline_s, turn_id, computed)
        return [*first, fetch]

    def _computed(self, pending: PendingRestore) -> tuple[tuple[Want, ...], ...]:
        """Return, once for each plan, the parts of what somebody computes for the turn."""
        parts, rest = list[tuple[Want, ...]](), pending.to_come
        pending.to_come = ()
        while rest and pending.order is not None:
            part, _ = sources.next_part(rest, goal=pending.goal, blocks=self._part_blocks)
            away = (r.want for r in part if pending.found.get(r.want.id) is Tier.PEER)
            parts.append(tuple(away))
            rest = rest[len(part) :]
        return tuple(part for part in parts if part)

    def _reserve(
        self,
        pending: PendingRestore,
        match: Match,
        way: Priced,
        *,
        now: float,
    ) -> SlotsReserved | NoRoom | CacheRefused | Later | None:
        """Set what is to be read for the next part of the chosen way, and reserve slots for it on
        the device; None: the engine wants more range state with the load than the store has."""
        stored = self._stored(pending)
        resident = min(match.range_tokens, way.position) // self._block
        start = min(resident, way.position // self._block - self._settings.least_fetched)
        pending.readings = sources.record_reads(pending.names, stored, way=way, start=start)
        if not all(
            any(r.component == name and r.first <= at < r.end for r in pending.readings)
            for name in pending.names.range_names
            for at in range(start, resident)
        ):
            return None
        if not pending.end:
            pending.to_come = pending.readings
        pending.readings, pending.end = sources.next_part(
            pending.readings, goal=pending.goal, blocks=self._part_blocks
        )
        end_bytes = pending.end * self._device.layout.packed_block_bytes
        pending.arrival = Arrival(
            tokens=pending.event.tokens[:end_bytes],
            prefix_hash=pending.digests[pending.end - 1],
            points=tuple({r.end * self._block for r in pending.readings if r.is_point}),
            hashed=pending.hashed,
        )
        reserved = self._device.reserve(pending.event.turn_id, pending.arrival, now)
        if isinstance(reserved, SlotsReserved):
            assert reserved.start == start * self._block, "nothing came between match and reserve"
        return reserved

    def _fillings(self, pending: PendingRestore) -> tuple[Filling, ...]:
        """Return, for each part of the fetch, the slots that it goes into."""
        assert pending.room is not None
        room, start = pending.room, pending.room.start // self._block
        fillings = []
        for part, reading in enumerate(pending.readings):
            if reading.led_to:
                slots: tuple[int, ...] = (reading.end * self._block, reading.led_to * self._block)
            elif reading.is_point:
                slots = (room.points[reading.end * self._block][reading.component],)
            else:
                slots = room.blocks[reading.first - start : reading.end - start]
            fillings.append(Filling(part, reading.component, slots))
        return tuple(fillings)

    def _give_up_slots(self, pending: PendingRestore, now: float) -> None:
        """Abort the reservation, if there is one. Its slots are free, unless an operation that was
        handed them has not answered yet."""
        if pending.room is None:
            return
        ticket, pending.room = pending.room.ticket, None
        self._device.abort(ticket, now)
        operation_id = pending.operation_id
        if pending.phase in WRITING and operation_id in self._by_operation:
            self.unquiet[operation_id] = ticket
        else:
            self._device.quiet(ticket)

    def _quiet(self, event: Completion) -> Iterable[Effect]:
        """Free the slots of a restore that was given up, now that its writer has answered."""
        if isinstance(event, Filled | NotFetched):
            self._device.quiet(self.unquiet.pop(event.operation_id))
            self._operations.end(event.operation_id)
        return ()

    def _abandon(
        self, pending: PendingRestore, outcome: RestoreOutcome, now: float
    ) -> list[Effect]:
        operation_id = pending.operation_id
        self._give_up_slots(pending, now)
        self._by_operation.pop(operation_id, None)
        if operation_id not in self.unquiet:
            self._operations.end(operation_id)
        *called_off, _ = self._started(pending, outcome, now)
        return [DropOperation(operation_id), *called_off]

    def _started(
        self, pending: PendingRestore, outcome: RestoreOutcome, now: float
    ) -> list[Effect]:
        """Return the turn's `Start`, last, and what goes before it: nobody computes its prompt for
        it any more."""
        start = self._start(pending, outcome, now)
        is_ordered = pending.order is not None
        return [CallOffPrefill(start.turn_id), start] if is_ordered else [start]

    def _start(self, pending: PendingRestore, outcome: RestoreOutcome, now: float) -> Start:
        turn_id = pending.event.turn_id
        self._pending.pop(turn_id, None)
        brought = pending.brought
        self.reports[turn_id] = RestoreReport(
            outcome=outcome,
            plan=pending.plan,
            waited_s=now - pending.arrived_s,
            loaded_bytes=sum(r.size_bytes for r in brought),
            loaded_point_bytes=sum(r.size_bytes for r in brought if r.is_point),
            brought=self._brought(pending, outcome),
            misses=pending.misses,
            is_ordered=pending.order is not None and self._is_away(pending.found, brought),
        )
        return Start(turn_id)

    def _is_away(self, found: Mapping[bytes, Tier], readings: Iterable[sources.RecordRead]) -> bool:
        """Return whether some of what is read was not here."""
        return any(found.get(reading.want.id) is Tier.PEER for reading in readings)

    def _brought(self, pending: PendingRestore, outcome: RestoreOutcome) -> dict[Tier, int]:
        if outcome is RestoreOutcome.LOADED:
            reached = pending.goal
        else:
            reached = max((reading.end for reading in pending.brought), default=0)
        return sources.brought_tokens(
            pending.names, pending.brought, complete=pending.complete, reached=reached
        )


def _verified(readings: Iterable[sources.RecordRead], ids: Iterable[bytes]) -> tuple[Verified, ...]:
    """Return what was written, as the device's door wants it: by the ids of the records asked for,
    and of those that were read.

    Each id binds model, tenant, prefix, component and tokens, and the store hands out bytes only
    with the digest written under that id (invariant 4).
    """
    return tuple(
        Verified("", 0, 0, b"", found)
        if reading is None
        else Verified(reading.component, reading.first, reading.end, reading.want.id, found or b"")
        for reading, found in zip_longest(readings, ids)
    )
