"""Spills copy state from our own cache to the store: of idle sessions, and where room is short.
Pure.

    IdleSpills        turn ends ── gap, or pressed ── Find what is missing ── Copy ── Kept
    PressureRelief    watermark crossed ── press ── the cache evicts, and names points ── Copy

No copy is waited for by a turn: its bytes are off the device when a tick's effects are performed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Set
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import inf

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.pressure import Checkpoint, Spill
from ownerserve.cache.sessions import ResidentPrefix
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId
from ownerserve.kv.prefix import Packed
from ownerserve.kv.units import MIB
from ownerserve.node.retention.holds import CopyHolds
from ownerserve.node.retention.policy import Checkpoints, SessionGaps
from ownerserve.node.retention.record_value import RecordValue, SessionValue
from ownerserve.node.vocabulary.chains import Chains
from ownerserve.node.vocabulary.events import (
    Completion,
    DropOperation,
    Effect,
    FindRecords,
    Kept,
    NotKept,
    OperationId,
    RecordsFound,
    StoreCopy,
)
from ownerserve.node.vocabulary.operations import Operations, Owner
from ownerserve.node.vocabulary.records import Cell, Digests, RecordNames
from ownerserve.node.vocabulary.settings import NodeSettings

FIND_DEADLINE_S = 5.0
ECHO_S = 1.0
"""How long after a deadline its performer may take to say so."""
COPY_DEADLINE_S = 30.0
"""A copy that is in no store by then is given up: others want its place among those in flight."""
HELD_BYTES_A_TICK = 64 * MIB
"""Read off the device between two steps while turns wait for what is held: some ms of a step."""
SESSIONS_KEPT = 4096
"""Idle sessions that are remembered, with their gaps, and sessions that others were forked from;
the one unheard of for longest is forgotten first."""


# ---- idle sessions


class Forks:
    """`Forks` remembers the sessions that others were forked from here, SESSIONS_KEPT at most:
    others stand on their state."""

    def __init__(self) -> None:
        self._parents: OrderedDict[SessionId, None] = OrderedDict()

    def add(self, parent: SessionId) -> None:
        """Note that a session was forked from `parent`."""
        self._parents[parent] = None
        self._parents.move_to_end(parent)
        if len(self._parents) > SESSIONS_KEPT:
            self._parents.popitem(last=False)

    def __contains__(self, session_id: SessionId) -> bool:
        return session_id in self._parents


class RecordCopies:
    """`RecordCopies` makes the copies of our cache's records: priced as they are begun, counted as
    wear once kept."""

    def __init__(
        self,
        names: RecordNames,
        value: RecordValue,
        operations: Operations,
        checkpoints: Checkpoints,
    ) -> None:
        self.names = names
        self.value = value
        self._operations = operations
        self._checkpoints = checkpoints

    def begin(
        self,
        owner: Owner,
        cell: Cell,
        component: str,
        slots: tuple[int, ...],
        *,
        digests: Digests,
        of: SessionValue,
    ) -> StoreCopy:
        """Begin an operation of `owner` and return the copy of one component of `cell`, or of the
        point at its end when it is empty."""
        if cell.first == cell.end:
            meta = self.names.point_meta(component, cell.end, digests)
        else:
            meta = self.names.range_meta(component, cell, digests)
        cost_ms = self.value.cost_ms(of, cell, component)
        return StoreCopy(self._operations.begin(owner), meta, component, slots, cost_ms)

    def kept(self, copy: StoreCopy) -> None:
        """Count the copy, which is in the store, as written."""
        payload_bytes = self.names.payload_bytes(copy.component, copy.slots)
        self._checkpoints.kept(copy.meta, payload_bytes)


class IdleSession(msgspec.Struct, eq=False):
    """An `IdleSession` is a session between two turns; `points` are the depths whose point state is
    wanted in the store, `ends` the depths at which its last turn ended."""

    since_s: float
    points: set[int]
    ends: frozenset[int]


class SpillBatch(msgspec.Struct, eq=False):
    """A `SpillBatch` is the copies of one session. `missing` maps the ids that the store is not
    known to have to their pieces.

    `pieces` are cells of range state, and empty ones that stand for the point at their end.
    `unstored` counts the components of each point that the store does not have yet; `open` the
    copies that nobody has answered. `is_asked`: there are no more to come.
    """

    session_id: SessionId
    tokens: Packed
    digests: Digests
    pieces: deque[Cell]
    missing: dict[bytes, Cell]
    unstored: Counter[int]
    value: SessionValue
    open: int = 0
    is_asked: bool = False
    until_s: float = 0.0


class OpenCopy(msgspec.Struct, eq=False):
    """An `OpenCopy` is a copy that was asked for and that nobody has answered."""

    copy: StoreCopy
    batch: SpillBatch
    until_s: float


class IdleSpills:
    """`IdleSpills` knows which sessions are idle, what of theirs is being copied, and what was
    kept.

        turn ends ── gap, or pressed ── Find what is missing ── Copy, some bytes a tick ── Kept

    Range state goes as the grid cuts it; point state at the boundaries that the checkpoint policy
    names, as far as the device still has it. A copy is asked for only while the blocks stand in the
    tree, and is made at once: no lock outlives the tick, and nothing waits for a medium. A turn
    that arrives meanwhile wins: what was not begun is left for its end. A session that costs no
    more to compute than to load is not worth a record, unless others were forked from it.
    """

    def __init__(
        self,
        cache: HeteroCache,
        chains: Chains,
        operations: Operations,
        *,
        copies: RecordCopies,
        gaps: SessionGaps,
        settings: NodeSettings,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._gaps = gaps
        self._copies = copies
        self._value = copies.value
        self._cache = cache
        self._operations = operations
        self._names = copies.names
        self._chains = chains
        self._settings = settings
        self._idle: OrderedDict[SessionId, IdleSession] = OrderedDict()
        self.forks = Forks()
        """Sessions that others stand on: copied before others, and also when that saves little."""
        self.holds = CopyHolds(cache)
        self._due: dict[SessionId, float] = {}
        self._queue: list[tuple[float, SessionId]] = []  # of _due; entries may be out of date
        self._looking: dict[OperationId, SpillBatch] = {}
        self._copying: deque[SpillBatch] = deque()
        self._in_flight: dict[OperationId, OpenCopy] = {}
        self.over: list[SpillBatch] = []
        """Batches all of whose copies were answered for; whoever tells of them empties it."""

    # -- events --------------------------------------------------------------------------------

    def ended(
        self, session_id: SessionId, *, points: Set[int], ends: frozenset[int], now: float
    ) -> None:
        """Note that a turn of the session is over: it is idle until it comes back, and the state at
        the depths `points` is wanted in the store."""
        before = self._idle.pop(session_id, None)
        wanted = {*points, *(before.points if before is not None else ())}
        self._idle[session_id] = IdleSession(now, wanted, ends)
        self._wait(session_id, now)
        if len(self._idle) > SESSIONS_KEPT:
            forgotten, _ = self._idle.popitem(last=False)
            self._due.pop(forgotten, None)
            self.holds.let(forgotten)
            self._gaps.forget(forgotten)

    def _wait(self, session_id: SessionId, now: float) -> None:
        session = self._cache.sessions.get(session_id)
        depth = session.depth if session is not None else 0
        due_s = now + self._gaps.spill_after_s(session_id, depth)
        self._due[session_id] = due_s
        heappush(self._queue, (due_s, session_id))
        if len(self._queue) > 2 * SESSIONS_KEPT:
            self._queue = [(at_s, name) for name, at_s in self._due.items()]
            heapify(self._queue)

    def turn_ends(self, session_id: SessionId) -> frozenset[int]:
        """Return the depths, in blocks, at which the session's last turn ended."""
        idle = self._idle.get(session_id)
        return idle.ends if idle is not None else frozenset()

    def resumed(self, session_id: SessionId, now: float) -> None:
        """Note that the session is back: its gap is learnt, and what is not copied waits for the
        turn's end."""
        self.holds.let(session_id)
        idle = self._idle.get(session_id)
        if idle is None:
            return
        self._gaps.observe(session_id, now - idle.since_s)
        self._due.pop(session_id, None)
        for operation_id in [e for e, b in self._looking.items() if b.session_id == session_id]:
            del self._looking[operation_id]
            self._operations.end(operation_id)
        self._copying = deque(b for b in self._copying if b.session_id != session_id)

    def stayed(self, session_id: SessionId, now: float) -> None:
        """Plan the session's copy anew, since its turn came to nothing and it is as idle as
        before."""
        if session_id in self._idle:
            self._wait(session_id, now)

    def hurry(self) -> None:
        """Make every idle session due now, since the worker is about to stop."""
        self.press(len(self._due))

    def press(self, count: int) -> set[SessionId]:
        """Make up to `count` sessions due now, since their room is wanted, and return them: those
        that were forked from first, then by when they ended."""
        idle = [name for name in self._idle if name in self._due]
        names = sorted(idle, key=lambda name: name not in self.forks)[:count]
        for name in names:
            self._due[name] = 0.0
            heappush(self._queue, (0.0, name))
        return set(names)

    def put_away(self, session_id: SessionId) -> None:
        """Make one idle session due now, since it leaves or others wait for its room."""
        if session_id in self._due:
            self._due[session_id] = 0.0
            heappush(self._queue, (0.0, session_id))

    def is_pending(self, sessions: Set[SessionId]) -> bool:
        """Return whether anything of `sessions` is still to be copied."""
        batches = (*self._looking.values(), *self._copying)
        flying = (one.batch for one in self._in_flight.values())
        return any(b.session_id in sessions for b in (*batches, *flying)) or any(
            self._due.get(name) == 0.0 for name in sessions
        )

    def completed(self, event: Completion, now: float) -> Iterable[Effect]:
        """Take what the store has of a batch, or how a copy ended; no effect follows at once."""
        match event:
            case RecordsFound():
                self._found(event)
            case Kept(operation_id):
                self._kept(operation_id)
            case NotKept(operation_id):
                self._landed(operation_id, "not_kept")
        return ()

    def _found(self, event: RecordsFound) -> None:
        batch = self._looking.pop(event.operation_id, None)
        if batch is None:
            return
        self._operations.end(event.operation_id)
        for id_ in event.held:
            cell = batch.missing.pop(id_, None)
            if cell is not None and cell.first == cell.end:
                self._point_stored(batch, cell.end)
        wanted = set(batch.missing.values())
        batch.pieces = deque(piece for piece in batch.pieces if piece in wanted)
        self._copying.append(batch)

    def _kept(self, operation_id: OperationId) -> None:
        flying = self._landed(operation_id, "kept")
        if flying is not None:
            cell = flying.batch.missing[flying.copy.meta.id]
            if cell.first == cell.end:
                self._point_stored(flying.batch, cell.end)
            self._copies.kept(flying.copy)

    def _landed(self, operation_id: OperationId, outcome: str) -> OpenCopy | None:
        """End the copy that was answered for, count its outcome, and return it; None: it is none of
        these."""
        flying = self._in_flight.pop(operation_id, None)
        if flying is not None:
            self._operations.end(operation_id)
            flying.batch.open -= 1
            self._close(flying.batch)
            self.counts[outcome] += 1
        return flying

    def _point_stored(self, batch: SpillBatch, depth: int) -> None:
        """Note that one component more of the point at `depth` is stored. Point state that is
        stored whole may be evicted early."""
        batch.unstored[depth] -= 1
        if not batch.unstored[depth]:
            size = self._cache.layout.packed_block_bytes
            self._cache.pressure.backed(batch.tokens[: depth * size])

    def tick(self, now: float) -> list[Effect]:
        """Look up what the store has of the sessions that are due, and return the copies that fit
        this tick's budget of bytes."""
        is_waiting = self._looking or self._in_flight
        effects: list[Effect] = self._give_up(now) if is_waiting else []
        while self._queue and self._queue[0][0] <= now:
            due_s, session_id = heappop(self._queue)
            if self._due.get(session_id) != due_s:
                continue
            del self._due[session_id]
            batch = self._batch(session_id, self._idle[session_id])
            if batch is None:
                self.holds.let(session_id)
            else:
                operation_id = self._operations.begin(self)
                batch.until_s = now + FIND_DEADLINE_S + ECHO_S
                self._looking[operation_id] = batch
                effects.append(
                    FindRecords(operation_id, tuple(batch.missing), now + FIND_DEADLINE_S)
                )
        left, resident = self._settings.copy_bytes_a_tick, None
        if self.holds.any_stand:
            left = max(left, HELD_BYTES_A_TICK)
        while self._copying and left > 0 and len(self._in_flight) < self._settings.copies_in_flight:
            batch = self._copying[0]
            if not batch.pieces:
                self._copying.popleft()
                resident = None
                self._done(batch.session_id)
                self.holds.let(batch.session_id)
                batch.is_asked = True
                self._close(batch)
                continue
            if resident is None:  # nothing is evicted within a tick
                resident = self._cache.residents.prefix(batch.tokens)
            for copy in self._copies_of(batch, batch.pieces.popleft(), resident):
                left -= len(copy.slots) * self._names.slot_bytes(copy.component)
                self._in_flight[copy.operation_id] = OpenCopy(copy, batch, now + COPY_DEADLINE_S)
                batch.open += 1
                effects.append(copy)
        return effects

    def next_due(self) -> float | None:
        """Return the instant at which `tick` has something to do; 0: now; None: only an event can
        bring work."""
        if self._copying and len(self._in_flight) < self._settings.copies_in_flight:
            return 0.0
        while self._queue and self._due.get(self._queue[0][1]) != self._queue[0][0]:
            heappop(self._queue)
        due_s = self._queue[0][0] if self._queue else inf
        # Both tables are in the order of their deadlines.
        if self._looking:
            due_s = min(due_s, next(iter(self._looking.values())).until_s)
        if self._in_flight:
            due_s = min(due_s, next(iter(self._in_flight.values())).until_s)
        return None if due_s == inf else due_s

    def _give_up(self, now: float) -> list[Effect]:
        """Give up look-ups and copies that were not answered in time; what comes later is an echo.
        Both tables are in the order of their deadlines."""
        late = list(takewhile(lambda item: item[1].until_s <= now, self._looking.items()))
        for operation_id, batch in late:
            del self._looking[operation_id]
            self._operations.end(operation_id)
            self.holds.let(batch.session_id)
        lost = list(takewhile(lambda item: item[1].until_s <= now, self._in_flight.items()))
        for operation_id, flying in lost:
            del self._in_flight[operation_id]
            self._operations.end(operation_id)
            flying.batch.open -= 1
            self._close(flying.batch)
        if late or lost:
            self.counts["overdue"] += len(late) + len(lost)
        return [DropOperation(operation_id) for operation_id, _ in (*late, *lost)]

    @property
    def is_busy(self) -> bool:
        """`is_busy` tells whether copies are being made or waited for."""
        return bool(self._looking or self._copying or self._in_flight)

    # -- parts ---------------------------------------------------------------------------------

    def _close(self, batch: SpillBatch) -> None:
        if batch.is_asked and not batch.open:
            self.over.append(batch)

    def _done(self, session_id: SessionId) -> None:
        self.counts["sessions"] += 1
        idle = self._idle.get(session_id)
        if idle is not None:
            idle.points.clear()

    def _batch(self, session_id: SessionId, idle: IdleSession) -> SpillBatch | None:
        """Cut what of the session stands on the device into records; None: nothing is there, or it
        is not worth a copy."""
        session = self._cache.sessions.get(session_id)
        if session is None or not session.depth or session.running:
            return None
        tokens = self._cache.residents.tokens_of(session_id)
        digests = self._chains.digests(tokens, session_id)
        value = self._value.session(session.depth, idle.points)
        if value.is_low and session_id not in self.forks:
            self.counts["low_utility"] += 1
            return None
        names, unstored = self._names, Counter[int]()
        ends = names.ends(session.depth)
        pieces = deque(map(names.cell_ending_at, ends))
        by_cell = names.range_ids(ends, digests)
        missing = {id_: cell for cell, ids in zip(pieces, by_cell, strict=True) for id_ in ids}
        # The newest first: it is what the next turn most likely goes on from.
        for depth in sorted(idle.points, reverse=True):
            if names.point_names and depth <= session.depth:
                cell = Cell(depth, depth)
                pieces.append(cell)
                unstored[depth] = len(names.point_names)
                for name in names.point_names:
                    missing[names.point_id(name, depth, digests)] = cell
        return SpillBatch(session_id, tokens, digests, pieces, missing, unstored, value)

    def _copies_of(
        self, batch: SpillBatch, piece: Cell, resident: ResidentPrefix
    ) -> Iterable[StoreCopy]:
        """Yield the copies of one piece: all of its components that are missing, or none if the
        piece was evicted."""
        if piece.end > resident.blocks:
            self.counts["evicted_first"] += 1
            return
        missing, names = batch.missing, self._names
        begin = partial(self._copies.begin, self, piece, digests=batch.digests, of=batch.value)
        if piece.first == piece.end:
            for name, slot in self._point_slots(resident, piece.end).items():
                if names.point_id(name, piece.end, batch.digests) in missing:
                    yield begin(name, (slot,))
            return
        slots: tuple[int, ...] | None = None
        for name in names.range_names:
            if names.range_id(name, piece, batch.digests) in missing:
                if slots is None:  # all range components fill in lock-step: one row for all
                    slots = resident.range_slots(piece.first, piece.end)
                yield begin(name, slots)

    def _point_slots(self, resident: ResidentPrefix, depth: int) -> dict[str, int]:
        """Return the slots of the complete point state at `depth`; none when something of it is
        gone."""
        slots = resident.point_slots(depth)
        if slots is None:
            self.counts["point_gone"] += 1
            return {}
        return slots


# ---- under pressure


TIER = "store"
"""The cache's name for what lies below: one place, whatever tiers it has."""
PRESSED_SESSIONS = 8
PRESS_WAIT_S = 0.5


class SpillCopies(msgspec.Struct, eq=False):
    """`SpillCopies` are the copies of an open spill: those not asked for yet, and those that nobody
    has answered."""

    copies: Iterator[StoreCopy]
    waiting: dict[OperationId, StoreCopy]
    until_s: float
    is_asked: bool = False
    is_bad: bool = False


class PressureRelief:
    """`PressureRelief` acts when the cache is short of room: it copies first, then lets go.

        watermark crossed ── press: the longest idle sessions are copied to the store at once
                          ── relieve: the cache evicts, and names point state to copy (Spill)
        Spill ── Copy, some bytes a tick ── all Kept ── spilled: cheap to bring back, goes next
                                         `─ a NotKept, or a turn took the room ── spill_failed:
                                            the next run evicts without

    The bytes are off the device when a tick's copies are performed: the locks go with the next tick
    and wait for no medium. A spill that is not answered by its deadline has failed; what comes
    later is an echo. Blocks go only after the sessions that were pressed are stored, or after
    `PRESS_WAIT_S`: a turn that needs slots meanwhile evicts on demand and waits for nobody. The
    class owns the open spills' copies; the cache owns the slots and holds them until they are
    reported.
    """

    def __init__(
        self,
        cache: HeteroCache,
        chains: Chains,
        operations: Operations,
        *,
        copies: RecordCopies,
        idle_spills: IdleSpills,
        settings: NodeSettings,
    ) -> None:
        pressure = cache.pressure
        if settings.below:
            pressure.watermarks = msgspec.structs.replace(pressure.watermarks, tier=TIER)
        self._cache = cache
        self._operations = operations
        self._copies = copies
        self._names = copies.names
        self._value = copies.value
        self._chains = chains
        self._idle_spills = idle_spills
        self._settings = settings
        self._tickets: dict[int, SpillCopies] = {}
        self._queue: deque[int] = deque()
        self._by_operation: dict[OperationId, int] = {}
        self._copied: list[int] = []
        """Tickets all of whose bytes were read by the effects of the last tick."""
        self._pressed: set[SessionId] = set()
        self._pressed_until_s = 0.0

    def tick(self, now: float) -> list[Effect]:
        """Have the cache relieved when that is due, and return copies of what is being spilled,
        within the tick's budget of bytes."""
        if self._copied:
            for number in self._copied:
                if number in self._tickets:
                    self._cache.pressure.copied(number)
            self._copied.clear()
        effects: list[Effect] = self._give_up(now) if self._tickets else []
        if self._cache.pressure.is_due and not self._waits(now):
            for directive in self._cache.pressure.relieve(now):
                match directive:
                    case Spill():
                        copies = self._copies_of(directive)
                        until_s = now + COPY_DEADLINE_S
                        self._tickets[directive.ticket] = SpillCopies(copies, {}, until_s)
                        self._queue.append(directive.ticket)
                    case Checkpoint():
                        effects.append(directive)
        left = self._settings.copy_bytes_a_tick
        while (
            self._queue and left > 0 and len(self._by_operation) < self._settings.copies_in_flight
        ):
            number = self._queue[0]
            ticket = self._tickets[number]
            stands = self._cache.pressure.reads(number, now)  # read before anything else happens
            copy = next(ticket.copies, None) if stands else None
            if copy is None:
                ticket.is_bad |= not stands
                self._queue.popleft()
                ticket.is_asked = True
                self._copied.append(number)
                self._report(number)
                continue
            left -= self._names.slot_bytes(copy.component)
            ticket.waiting[copy.operation_id] = copy
            self._by_operation[copy.operation_id] = number
            effects.append(copy)
        return effects

    def completed(self, event: Completion, now: float) -> Iterable[Effect]:
        """Take the answer that a copy was kept, or was not; tell the cache when the spill's last
        one is answered."""
        number = self._by_operation.pop(event.operation_id, None)
        if number is not None:
            self._operations.end(event.operation_id)
            ticket = self._tickets[number]
            copy = ticket.waiting.pop(event.operation_id)
            if isinstance(event, Kept):
                self._copies.kept(copy)
            else:
                ticket.is_bad = True
            self._report(number)
        return ()

    def next_due(self) -> float | None:
        """Return the instant at which `tick` has something to do; 0: now; None: only an event can
        bring work."""
        if self._queue and len(self._by_operation) < self._settings.copies_in_flight:
            return 0.0
        if self._copied:
            return 0.0
        deadline = next(iter(self._tickets.values())).until_s if self._tickets else None
        if self._cache.pressure.is_due:
            due = self._pressed_until_s if self._pressed else 0.0
            return due if deadline is None else min(due, deadline)
        return deadline

    @property
    def is_busy(self) -> bool:
        """`is_busy` tells whether copies are being made or waited for."""
        return bool(self._tickets)

    def check(self) -> None:
        """Raise InvariantViolated unless the cache holds just what is being copied."""
        if set(self._cache.pressure.open_spills) != set(self._tickets):
            raise InvariantViolated("invariant 1: a spill is open that nobody copies, or the other")

    # -- parts ---------------------------------------------------------------------------------

    def _give_up(self, now: float) -> list[Effect]:
        """Fail the spills whose copies were not answered by their deadline, and drop their
        operations."""
        effects: list[Effect] = []
        for number in [n for n, ticket in self._tickets.items() if ticket.until_s <= now]:
            ticket = self._tickets.pop(number)
            for operation_id in ticket.waiting:
                del self._by_operation[operation_id]
                self._operations.end(operation_id)
                effects.append(DropOperation(operation_id))
            if number in self._queue:
                self._queue.remove(number)
            self._cache.pressure.spill_failed(number)
        return effects

    def _waits(self, now: float) -> bool:
        """Return whether sessions are being copied whose blocks would go; press some when none
        are."""
        if not self._cache.pressure.are_blocks_short:
            return False
        if not self._pressed:
            self._pressed = self._idle_spills.press(PRESSED_SESSIONS)
            self._pressed_until_s = now + PRESS_WAIT_S
            return bool(self._pressed)
        if now < self._pressed_until_s and self._idle_spills.is_pending(self._pressed):
            return True
        self._pressed.clear()
        return False

    def _report(self, number: int) -> None:
        """Tell the cache how the spill ended, once nothing of it is under way any more."""
        ticket = self._tickets[number]
        if ticket.waiting or not ticket.is_asked:
            return
        del self._tickets[number]
        if ticket.is_bad:
            self._cache.pressure.spill_failed(number)
        else:
            self._cache.pressure.spilled(number)

    def _copies_of(self, spill: Spill) -> Iterator[StoreCopy]:
        """Yield the spill's copies, lazily: the slots are lent, so each can be read as late as
        there is budget for it, while the ticket stands."""
        for point in spill.points:
            digests = self._chains.peek(point.prefix, point.sessions)
            depth = len(digests)
            session = self._value.session(depth, (depth,))
            for name, slot in point.slots.items():
                point_at = Cell(depth, depth)
                yield self._copies.begin(self, point_at, name, (slot,), digests=digests, of=session)
