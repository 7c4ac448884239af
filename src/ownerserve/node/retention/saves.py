"""Saves store what running turns compute in the blocks of an engine that owns them. Pure.

    prompt   |---- cell ----|---- cell ----|-- c --|      a cell goes when a step fills it,
    step 1    ======================                      the rest at the end of the prefill
    step 2                           ================     and at the end of the turn
    points                               ^P1    ^P2       at the step that passes them

An engine keeps window and recurrent state only where it needs it next, so a point is copied by the
step that computes its last token, or pinned there (decoding: nobody knows yet which boundary will
be the last) and copied when the turn ends; it waits for no room. Range state is asked for in order,
from the front, as far as there is room:

    asked for ── blocks held ──> copied ── host memory ──> kept
              `-- copy_bytes --´
              `----------------- buffer_bytes -----------´

A turn whose range state did not fit is late, also when it has ended: its engine may still have the
blocks, and what is left is asked for as copies are answered (`resume`), until it says `lost`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import PrefixChain
from ownerserve.node.vocabulary.events import (
    Completion,
    Computing,
    Copied,
    Effect,
    Kept,
    OperationId,
    Pin,
    StoreCopy,
    TurnEnded,
)
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import (
    Cell,
    RecordNames,
    Tip,
    lead_meta,
    lead_units,
    tip_of,
)
from ownerserve.plan.swa.checkpoints import CheckpointPolicy, TurnSpan
from ownerserve.store.format.model import Meta

LATE_TURNS = 1024
"""Turns that have ended and are late, at most; the one that waits for longest is given up."""


class SaveLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`SaveLimits` bound the bytes of copies. One copy is always let through.

    copy_bytes      asked for and not copied: their blocks are held
    buffer_bytes    asked for and not durable: they are in host memory, or about to be
    """

    copy_bytes: int = 256 << 20
    buffer_bytes: int = 1 << 30


class Capture(msgspec.Struct, frozen=True):
    """A `Capture` says where an engine has a point's state. `exact_end`: only if a step ends there
    (recurrent state is overwritten by the next token; window rows stand until they leave the
    window)."""

    exact_end: bool


class Unsaved(msgspec.Struct, frozen=True):
    """An `Unsaved` describes a record that a turn computed and the store does not have, as a copy
    of it would be."""

    meta: Meta
    component: str
    slots: tuple[int, ...]


class SavingTurn(msgspec.Struct, eq=False):
    """A `SavingTurn` is a turn that the engine computes, or whose copies are not all answered for.

    `session_id` None: nobody asks for what it leaves by a name. `tip`: what it left, once it ended.
    """

    names: RecordNames
    tenant: bytes
    chain: PrefixChain
    prompt: int
    points: frozenset[int]
    """Positions whose point state is kept, whatever room there is."""
    session_id: SessionId | None
    chunk_ends: frozenset[int] = frozenset()
    """Positions whose point state is kept where there is room for copies; known from the turn's
    first step on."""
    stored: set[bytes] = set()
    depths: set[int] = set()
    """The depths of points that were asked for, or are stored."""
    open: int = 0
    """Copies that nobody has answered."""
    tip: Tip | None = None
    junction: int = 0
    """Where the prompt parts from what is stored; 0: not known, or nowhere."""
    end: int = 0
    last: int = 0
    """Blocks that are computed, as far as they were told."""
    cells: int = 0
    """Blocks whose range state was asked for, or is stored."""
    rest: int = 0
    """The depth of the cell that is asked for before it is full; 0: none is."""
    pinned: int = 0
    is_over: bool = False
    is_late: bool = False

    def next_cell(self) -> Cell | None:
        """Return the next cell of which range state is to be asked for; None: there is none now."""
        full = self.cells + self.names.blocks
        if full <= self.last:
            return Cell(self.cells, full)
        return Cell(self.cells, self.rest) if self.rest > self.cells else None

    def ask(self, cell: Cell) -> None:
        """Note that the cell is asked for, or given up."""
        if cell.end - cell.first == self.names.blocks:
            self.cells = cell.end
        else:
            self.rest = 0

    def unsaved(self, cell: Cell) -> list[Unsaved]:
        """Return the range state of the cell that the store does not have."""
        names, digests = self.names, self.chain.digests
        return [
            Unsaved(names.range_meta(name, cell, digests), name, tuple(range(cell.first, cell.end)))
            for name in names.layout.range_names
            if names.range_id(name, cell, digests) not in self.stored
        ]

    def wanted(self) -> Cell:
        """Return all blocks of which range state is to be asked for now; an empty cell where there
        are none."""
        whole = max(0, self.last - self.cells) // self.names.blocks * self.names.blocks
        return Cell(self.cells, max(self.cells + whole, self.rest, self.cells))


class CopyInFlight(msgspec.Struct, eq=False):
    """A `CopyInFlight` is a copy that is not answered for, and the turns that wait for it."""

    unsaved: Unsaved
    size: int
    turns: list[SavingTurn]
    is_copied: bool = False


class CopyRoom:
    """`CopyRoom` keeps the copies that are not done, as many as `limits` let through."""

    def __init__(self, names: RecordNames, limits: SaveLimits) -> None:
        self.limits = limits
        self.held_bytes = self.open_bytes = 0
        self._names = names
        self._in_flight: dict[OperationId, CopyInFlight] = {}
        self._by_id: dict[bytes, CopyInFlight] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[OperationId]:
        return iter(self._in_flight)

    def turns(self) -> Iterator[SavingTurn]:
        """Yield the turns that wait for copies, each once for every copy."""
        for copy in self._in_flight.values():
            yield from copy.turns

    def size(self, unsaved: Iterable[Unsaved]) -> int:
        """Return the bytes of records."""
        return sum(self._names.payload_bytes(one.component, one.slots) for one in unsaved)

    def fits(self, unsaved: Iterable[Unsaved] = ()) -> bool:
        """Return whether copies of these records may be asked for now: they are under way already,
        or there is room. None: whether there is room at all."""
        fresh = self.size(one for one in unsaved if one.meta.id not in self._by_id)
        if not fresh and unsaved:
            return True
        size, limits, held, open_ = max(1, fresh), self.limits, self.held_bytes, self.open_bytes
        return (not held or held + size <= limits.copy_bytes) and (
            not open_ or open_ + size <= limits.buffer_bytes
        )

    def copies(
        self, running: SavingTurn, unsaved: Iterable[Unsaved], begin: Callable[[], OperationId]
    ) -> Iterator[StoreCopy]:
        """Yield a copy of each of `unsaved` that is not under way already, as an operation that
        `begin` makes; the turn waits for all of them."""
        for one in unsaved:
            running.stored.add(one.meta.id)
            running.open += 1
            under_way = self._by_id.get(one.meta.id)
            if under_way is not None:
                under_way.turns.append(running)
                continue
            copy, operation_id = CopyInFlight(one, self.size([one]), [running]), begin()
            self._in_flight[operation_id] = self._by_id[one.meta.id] = copy
            self.held_bytes += copy.size
            self.open_bytes += copy.size
            yield StoreCopy(operation_id, one.meta, one.component, one.slots)

    def copied(self, operation_id: OperationId) -> None:
        """Note that the copy is made: it holds no blocks any more."""
        copy = self._in_flight.get(operation_id)
        if copy is not None and not copy.is_copied:
            copy.is_copied = True
            self.held_bytes -= copy.size

    def answered(self, operation_id: OperationId) -> CopyInFlight | None:
        """Forget the copy, whose record is durable or given up, and return it; None: it is
        unknown."""
        self.copied(operation_id)
        copy = self._in_flight.pop(operation_id, None)
        if copy is not None:
            del self._by_id[copy.unsaved.meta.id]
            self.open_bytes -= copy.size
        return copy

    def clear(self) -> None:
        """Forget all copies."""
        self._in_flight.clear()
        self._by_id.clear()
        self.held_bytes = self.open_bytes = 0


class LateSaves:
    """`LateSaves` are the turns, running or ended, of which something did not fit and is still to
    be asked for."""

    def __init__(self, saves: Saves) -> None:
        self._saves = saves
        self._turns: dict[TurnId, SavingTurn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn_id: TurnId) -> bool:
        return turn_id in self._turns

    def due(self) -> list[TurnId]:
        """Return the turns to `resume` now, those that have ended first; none while there is no
        room."""
        if not self._turns or not self._saves.room.fits():
            return []
        return sorted(self._turns, key=lambda turn_id: not self._turns[turn_id].is_over)

    def resume(self, turn_id: TurnId) -> list[StoreCopy]:
        """Return the copies of a late turn's next cell; none where there is no room, or nothing
        left. Who has not got its blocks any more says `lost`."""
        running = self._turns.get(turn_id)
        return [] if running is None else self._saves.next_cell(turn_id, running)

    def lost(self, turn_id: TurnId) -> None:
        """Give up what is left of a late turn that has ended, since its blocks are gone; no error
        where nothing is."""
        running = self._turns.pop(turn_id, None)
        if running is not None:
            running.is_late = False
            self._saves.give_up_rest(running)

    def cell(self, turn_id: TurnId) -> Cell | None:
        """Return the blocks of a turn whose range state is still to be asked for; None: of a turn
        that is not late."""
        running = self._turns.get(turn_id)
        return None if running is None else running.wanted()

    @property
    def bytes(self) -> int:
        """`bytes` are those of range state that is still to be asked for, at most."""
        names = self._saves.names
        each = sum(names.slot_bytes(name) for name in names.layout.range_names)
        cells = [running.wanted() for running in self._turns.values()]
        return each * sum(cell.end - cell.first for cell in cells)

    def note(self, turn_id: TurnId, running: SavingTurn) -> None:
        """Note whether the turn is late. Too many of them: the first that has ended is given up."""
        running.is_late = running.next_cell() is not None
        if not running.is_late:
            self._turns.pop(turn_id, None)
            return
        self._turns[turn_id] = running
        over = [late_id for late_id, late in self._turns.items() if late.is_over]
        if len(over) > LATE_TURNS:
            self.lost(over[0])

    def supersede(self, running: SavingTurn) -> None:
        """Let an ended turn of the same session go that is late, where this one, whose prefix holds
        its own, asks for the same."""
        digests = running.chain.digests
        for turn_id, late in [*self._turns.items()] if running.session_id is not None else ():
            is_earlier = late.is_over and late.session_id == running.session_id
            is_like = late.tenant == running.tenant and late.last <= running.last
            own = late.chain.digests[late.last - 1]
            if is_earlier and is_like and digests[late.last - 1] == own:
                del self._turns[turn_id]
                late.is_late, late.tip = False, None

    def turns(self) -> list[SavingTurn]:
        """Return all of them."""
        return [*self._turns.values()]


class Junctions:
    """`Junctions` know where running turns part from what is stored; the turns are `Saves`'."""

    def __init__(
        self, running: Mapping[TurnId, SavingTurn], policy: CheckpointPolicy, block: int
    ) -> None:
        self._running = running
        self._policy = policy
        self._block = block

    def parted(self, turn_id: TurnId, position: int) -> None:
        """Note that up to `position` the turn's prompt is like something that is stored, or on the
        device: the next one that parts there goes on at the point that this turn leaves, if the
        policy wants one."""
        running, at = self._running.get(turn_id), position // self._block * self._block
        if running is None or not running.junction < at < running.prompt:
            return
        running.junction = at
        span = TurnSpan(0, running.prompt, running.prompt, self._block, junctions=(at,))
        running.points = frozenset(self._policy.checkpoints(span))

    def of(self, turn_id: TurnId) -> int:
        """Return the position at which the turn is to leave a point for others that part there; 0:
        there is none."""
        running = self._running.get(turn_id)
        return 0 if running is None or running.junction not in running.points else running.junction


class Saves:
    """`Saves` keeps all running turns; `late` those that are late, `room` the copies that are not
    done."""

    def __init__(
        self,
        names: RecordNames,
        operations: Operations,
        *,
        policy: CheckpointPolicy,
        capture: Capture,
        limits: SaveLimits | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """`counts` are copies by what came of them, and `shed`: turns of which something was given
        up."""
        self.unsaved: Counter[str] = Counter()
        """`unsaved` are the tokens and the bytes that were computed and given up."""
        self.left: list[Tip] = []
        """Tips of sessions, all of whose copies were answered for; who tells of them empties it."""
        self.names = names
        self.room = CopyRoom(names, limits or SaveLimits())
        self.late = LateSaves(self)
        self._operations = operations
        self._policy = policy
        self._capture = capture
        self._block = names.layout.block_tokens
        self._running: dict[TurnId, SavingTurn] = {}
        self.junctions = Junctions(self._running, policy, self._block)

    # -- events --------------------------------------------------------------------------------

    def arrived(
        self,
        turn_id: TurnId,
        chain: PrefixChain,
        *,
        prompt: int,
        session_id: SessionId | None,
        tenant: bytes,
    ) -> None:
        """Begin with a turn whose prompt is `chain`, `prompt` tokens long; what it computes is
        stored from now on, for `tenant`."""
        self.late.lost(turn_id)
        points = frozenset(self._policy.checkpoints(TurnSpan(0, prompt, prompt, self._block)))
        names = self.names.of(tenant)
        self._running[turn_id] = SavingTurn(names, tenant, chain, prompt, points, session_id)

    def known(self, turn_id: TurnId, ids: set[bytes]) -> None:
        """Note that records `ids` stand in the store, so that the turn does not copy them."""
        running = self._running.get(turn_id)
        if running is not None:
            running.stored |= ids

    def doubt(self, turn_id: TurnId) -> None:
        """Offer everything of the turn again, since something of it was said to be stored and could
        not be read."""
        running = self._running.get(turn_id)
        if running is not None:
            running.stored.clear()

    def computing(self, event: Computing) -> list[Effect]:
        """Return the copies and pins for a step: what of its state is to be copied once it is
        done."""
        running = self._running.get(event.turn_id)
        if running is None:
            return []
        if event.added:
            running.chain.extend(event.added)
        if not running.end:
            prompt = running.prompt
            span = TurnSpan(min(event.start, prompt), prompt, prompt, self._block)
            running.chunk_ends = frozenset(self._policy.chunk_ends(span)) - running.points
        running.end = event.end
        effects: list[Effect] = []
        for position in self._passed(running, event):
            if position in running.points:
                effects += self._point(running, position)
            elif position > running.prompt:
                running.pinned = position
                effects.append(Pin(event.turn_id, position))
            elif self.room.fits(self._unsaved_point(running, position)):
                effects += self._point(running, position)
        effects += self._lead(running, event)
        running.last = min(event.end // self._block, len(running.chain.digests))
        if event.start < running.prompt <= event.end:
            running.rest = running.last
        effects += self._range(event.turn_id, running)
        return effects

    def ended(self, event: TurnEnded) -> list[Effect]:
        """Return the last copies of a turn that has ended, as far as there is room; its first
        `event.tokens` tokens are computed beyond doubt. It may be late from now on (`late`)."""
        running = self._running.pop(event.turn_id, None)
        if running is None:
            return []
        running.is_over = True
        last = running.last = running.rest = min(
            event.tokens // self._block, len(running.chain.digests)
        )
        effects: list[Effect] = []
        if running.pinned and running.pinned == last * self._block:
            effects += self._point(running, running.pinned)
        self.late.supersede(running)
        effects += self._range(event.turn_id, running)
        # A step that is still under way may have filled a cell: that is what is stored of it.
        depth = max(last, running.cells)
        if running.session_id is not None and depth:
            running.tip = tip_of(
                running.names,
                running.session_id,
                depth,
                digests=running.chain.digests,
                points=running.depths | {event.restored // self._block},
                tenant=running.tenant,
            )
        self._answered(running)
        return effects

    def over(self, session_id: SessionId) -> None:
        """Forget the name of the session, which has ended: what its turns leave is told under no
        name."""
        for running in (*self._running.values(), *self.late.turns(), *self.room.turns()):
            if running.session_id == session_id:
                running.session_id = running.tip = None

    def give_up(self) -> None:
        """Forget all turns and all copies; later answers to them mean nothing."""
        for running in self.late.turns():
            self.give_up_rest(running)
        self._running.clear()
        self.late = LateSaves(self)
        for operation_id in self.room:
            self._operations.end(operation_id)
        self.room.clear()

    def again(self, turn_id: TurnId) -> None:
        """Offer the turn's state from the start again: it lost its blocks and will be computed
        again from wherever it is restored."""
        running = self._running.get(turn_id)
        if running is not None:
            running.end = running.last = running.cells = running.rest = running.pinned = 0
            self.late.note(turn_id, running)

    def completed(self, event: Completion, now: float) -> Iterable[Effect]:
        """Take the word that a copy is made, was kept, or was not; no effect follows."""
        if isinstance(event, Copied):
            self.room.copied(event.operation_id)
        elif (copy := self.room.answered(event.operation_id)) is not None:
            self._operations.end(event.operation_id)
            self._told(copy, event)
        return ()

    def tokens(self, turn_id: TurnId) -> int | None:
        """Return how many tokens of the turn were told so far; None when it is not one of ours."""
        running = self._running.get(turn_id)
        return None if running is None else running.chain.tokens

    def __contains__(self, turn_id: TurnId) -> bool:
        return turn_id in self._running

    def __len__(self) -> int:
        return len(self.room)

    # -- for `late` ----------------------------------------------------------------------------

    def next_cell(self, turn_id: TurnId, running: SavingTurn) -> list[StoreCopy]:
        """Return the copies of the turn's next cell of which any are needed; none where there is no
        room for them, or no cell is left."""
        copies: list[StoreCopy] = []
        while not copies and (cell := running.next_cell()) is not None:
            unsaved = running.unsaved(cell)
            if unsaved and not self.room.fits(unsaved):
                break
            running.ask(cell)
            copies += self.room.copies(running, unsaved, self._begin)
        self.late.note(turn_id, running)
        self._answered(running)
        return copies

    def give_up_rest(self, running: SavingTurn) -> None:
        """Count as given up what is left of an ended turn."""
        self.counts["shed"] += 1
        while (cell := running.next_cell()) is not None:
            size = self.room.size(running.unsaved(cell))
            self.unsaved["bytes"] += size
            self.unsaved["tokens"] += (cell.end - cell.first) * self._block if size else 0
            running.ask(cell)
        self._answered(running)

    # -- parts ---------------------------------------------------------------------------------

    def _told(self, copy: CopyInFlight, event: Completion) -> None:
        """Tell the turns that waited for a copy what came of it."""
        kept = isinstance(event, Kept)
        self.counts["kept" if kept else "not_kept"] += 1
        unsaved = copy.unsaved
        if not kept:
            self.unsaved["bytes"] += copy.size
            if unsaved.component in self.names.range_names[:1]:
                self.unsaved["tokens"] += len(unsaved.slots) * self._block
        for running in copy.turns:
            running.open -= 1
            if not kept:
                running.stored.discard(unsaved.meta.id)
            self._answered(running)

    def _answered(self, running: SavingTurn) -> None:
        """Tell what an ended turn has left, once no copy of it is open or still to be asked for."""
        if running.tip is not None and not running.open and not running.is_late:
            self.left.append(running.tip)
            running.tip = None

    def _passed(self, running: SavingTurn, event: Computing) -> Iterator[int]:
        """Yield the boundaries, in tokens, whose point state this step leaves behind and somebody
        may want."""
        if not self.names.layout.point_names:
            return
        block, chunk_ends = self._block, running.chunk_ends
        first = event.start // block * block + block
        if self._capture.exact_end:
            at = event.end // block * block
            if at < first or at != event.end:
                return
            chunks = any(event.start < chunk_end <= at for chunk_end in chunk_ends)
            if at in running.points or at > running.prompt or chunks:
                yield at
            return
        for position in range(first, event.end + 1, block):
            is_last = position + block > event.end and position > running.prompt
            if is_last or position in running.points or position in chunk_ends:
                yield position

    def _unsaved_point(self, running: SavingTurn, position: int) -> list[Unsaved]:
        """Return the state of a point that the store does not have."""
        names, depth, digests = running.names, position // self._block, running.chain.digests
        return [
            Unsaved(names.point_meta(name, depth, digests), name, (position,))
            for name in names.layout.point_names
            if names.point_id(name, depth, digests) not in running.stored
        ]

    def _lead(self, running: SavingTurn, event: Computing) -> Iterator[StoreCopy]:
        """Yield the copies of the rows before the window where a prompt ends, as far as this step
        has them, if there is room. Where it begins so late that it has too few, they are copied in
        the step before it too, with the point at its end."""
        tokens, prompt = self._policy.lead_tokens, running.prompt
        end = min(event.end, prompt) // self._block * self._block
        if not tokens or event.start >= prompt or prompt - event.end >= tokens:
            return
        depth, names, digests = end // self._block, running.names, running.chain.digests
        units = lead_units(names, depth, tokens=min(tokens, end - event.start))
        if not units:
            return
        cell = Cell(depth - units, depth)
        meta = lead_meta(names, cell, digests)
        if meta.id in running.stored:
            return
        unsaved = Unsaved(meta, meta.component, tuple(range(cell.first, cell.end)))
        if self.room.fits([unsaved, *self._unsaved_point(running, end)]):
            yield from self._point(running, end)
            yield from self.room.copies(running, [unsaved], self._begin)

    def _point(self, running: SavingTurn, position: int) -> Iterator[StoreCopy]:
        """Yield the copies of a point. Those of turn ends and junctions wait for no room: their
        blocks are gone in the next step."""
        running.depths.add(position // self._block)
        yield from self.room.copies(running, self._unsaved_point(running, position), self._begin)

    def _range(self, turn_id: TurnId, running: SavingTurn) -> Iterator[StoreCopy]:
        """Yield copies of the cells that are not asked for yet, in order, as far as there is room:
        those that are full, and the one that is begun where it is asked for. The latter is written
        again, whole, when it is full."""
        while copies := self.next_cell(turn_id, running):
            yield from copies

    def _begin(self) -> OperationId:
        return self._operations.begin(self)
