"""Saves store what running turns compute in the blocks of an engine that owns them. Pure.

    prompt   |---- cell ----|---- cell ----|-- c --|      a cell goes when a step fills it,
    step 1    ======================                      the rest at the end of the prefill
    step 2                           ================     and at the end of the turn
    points                               ^P1    ^P2       at the step that passes them

An engine keeps window and recurrent state only where it needs it next, so a point is copied by the
step that computes its last token, or pinned there (decoding: nobody knows yet which boundary will
be the last) and copied when the turn ends. Range state is asked for in order, from the front, and
never more than `in_flight_bytes` at once: what does not fit goes with a later step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import PrefixChain
from ownerserve.node.vocabulary.events import (
    Completion,
    Computing,
    Effect,
    Kept,
    OperationId,
    Pin,
    StoreCopy,
    TurnEnded,
)
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import Cell, RecordNames, Tip, tip_of
from ownerserve.plan.swa.checkpoints import CheckpointPolicy, TurnSpan
from ownerserve.store.format.model import Meta

IN_FLIGHT_BYTES = 256 << 20


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
    session_id: SessionId | None
    stored: set[bytes] = set()
    depths: set[int] = set()
    """The depths of points that were asked for, or are stored."""
    open: int = 0
    """Copies that nobody has answered."""
    tip: Tip | None = None
    end: int = 0
    cells: int = 0
    """Blocks whose range state was asked for, or is stored."""
    pinned: int = 0


class Saves:
    """`Saves` keeps all running turns and the copies that are not done, IN_FLIGHT_BYTES of them at
    most."""

    def __init__(
        self,
        names: RecordNames,
        operations: Operations,
        *,
        policy: CheckpointPolicy,
        capture: Capture,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.left: list[Tip] = []
        """Tips of sessions, all of whose copies were answered for; who tells of them empties it."""
        self.names = names
        self._operations = operations
        self._policy = policy
        self._capture = capture
        self._limit = in_flight_bytes
        self._block = names.layout.block_tokens
        self._running: dict[TurnId, SavingTurn] = {}
        self._in_flight: dict[OperationId, tuple[int, SavingTurn]] = {}
        self._bytes = 0

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
        span = TurnSpan(0, prompt, prompt, self._block)
        points = frozenset(self._policy.checkpoints(span))
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
        running.end = event.end
        effects: list[Effect] = []
        for position in self._passed(running, event):
            if position in running.points:
                effects += self._point(running, position)
            elif position > running.prompt:
                running.pinned = position
                effects.append(Pin(event.turn_id, position))
        last = min(event.end // self._block, len(running.chain.digests))
        effects += self._whole_cells(running, last)
        if event.start < running.prompt <= event.end:
            effects += self._rest(running, last)
        return effects

    def ended(self, event: TurnEnded) -> list[Effect]:
        """Return the last copies of a turn that has ended; its first `event.tokens` tokens are
        computed beyond doubt."""
        running = self._running.pop(event.turn_id, None)
        if running is None:
            return []
        last = min(event.tokens // self._block, len(running.chain.digests))
        effects: list[Effect] = []
        if running.pinned and running.pinned == last * self._block:
            effects += self._point(running, running.pinned)
        effects += self._whole_cells(running, last)
        effects += self._rest(running, last)
        if running.session_id is not None and last:
            running.tip = tip_of(
                running.names,
                running.session_id,
                last,
                digests=running.chain.digests,
                points=running.depths | {event.restored // self._block},
                tenant=running.tenant,
            )
        self._answered(running)
        return effects

    def over(self, session_id: SessionId) -> None:
        """Forget the name of the session, which has ended: what its turns leave is told under no
        name."""
        copied = [running for _, running in self._in_flight.values()]
        for running in (*self._running.values(), *copied):
            if running.session_id == session_id:
                running.session_id = running.tip = None

    def give_up(self) -> None:
        """Forget all turns and all copies; later answers to them mean nothing."""
        self._running.clear()
        for operation_id in self._in_flight:
            self._operations.end(operation_id)
        self._in_flight.clear()
        self._bytes = 0

    def again(self, turn_id: TurnId) -> None:
        """Offer the turn's state from the start again: it lost its blocks and will be computed
        again from wherever it is restored."""
        running = self._running.get(turn_id)
        if running is not None:
            running.end = running.cells = running.pinned = 0

    def completed(self, event: Completion, now: float) -> Iterable[Effect]:
        """Take the answer that a copy was kept, or was not; no effect follows."""
        copied = self._in_flight.pop(event.operation_id, None)
        if copied is not None:
            size, running = copied
            self._operations.end(event.operation_id)
            self._bytes -= size
            self.counts["kept" if isinstance(event, Kept) else "not_kept"] += 1
            running.open -= 1
            self._answered(running)
        return ()

    def tokens(self, turn_id: TurnId) -> int | None:
        """Return how many tokens of the turn were told so far; None when it is not one of ours."""
        running = self._running.get(turn_id)
        return None if running is None else running.chain.tokens

    def __contains__(self, turn_id: TurnId) -> bool:
        return turn_id in self._running

    def __len__(self) -> int:
        return len(self._in_flight)

    # -- parts ---------------------------------------------------------------------------------

    def _answered(self, running: SavingTurn) -> None:
        """Tell what an ended turn has left, once no copy of it is open."""
        if running.tip is not None and not running.open:
            self.left.append(running.tip)
            running.tip = None

    def _passed(self, running: SavingTurn, event: Computing) -> Iterator[int]:
        """Yield the boundaries, in tokens, whose point state this step leaves behind and somebody
        may want."""
        if not self.names.layout.point_names:
            return
        block = self._block
        first = event.start // block * block + block
        for position in range(first, event.end + 1, block):
            if position == event.end or not self._capture.exact_end:
                wanted = position in running.points or position + block > event.end
                if wanted:
                    yield position

    def _point(self, running: SavingTurn, position: int) -> Iterator[StoreCopy]:
        names, depth, digests = running.names, position // self._block, running.chain.digests
        running.depths.add(depth)
        for name in names.layout.point_names:
            id_ = names.point_id(name, depth, digests)
            if id_ not in running.stored:
                meta = names.point_meta(name, depth, digests)
                yield self._copy(running, Unsaved(meta, name, (position,)))

    def _whole_cells(self, running: SavingTurn, last: int) -> Iterator[StoreCopy]:
        """Yield copies of the cells that are full at depth `last`, in order, as far as there is
        room for copies."""
        names = self.names
        while running.cells + names.blocks <= last:
            cell = Cell(running.cells, running.cells + names.blocks)
            unsaved = list(self._cell(running, cell))
            size = sum(names.payload_bytes(one.component, one.slots) for one in unsaved)
            if self._bytes and self._bytes + size > self._limit:
                return
            yield from (self._copy(running, one) for one in unsaved)
            running.cells = cell.end

    def _rest(self, running: SavingTurn, last: int) -> Iterator[StoreCopy]:
        """Yield copies of the cell that is begun at depth `last`; it is written again, whole, when
        it is full."""
        if last - running.cells >= self.names.blocks:
            self.counts["shed"] += 1
        elif running.cells < last:
            for one in self._cell(running, Cell(running.cells, last)):
                yield self._copy(running, one)

    def _cell(self, running: SavingTurn, cell: Cell) -> Iterator[Unsaved]:
        names, digests = running.names, running.chain.digests
        for name in names.layout.range_names:
            if names.range_id(name, cell, digests) not in running.stored:
                meta = names.range_meta(name, cell, digests)
                yield Unsaved(meta, name, tuple(range(cell.first, cell.end)))

    def _copy(self, running: SavingTurn, unsaved: Unsaved) -> StoreCopy:
        size = self.names.payload_bytes(unsaved.component, unsaved.slots)
        operation_id = self._operations.begin(self)
        running.stored.add(unsaved.meta.id)
        running.open += 1
        self._in_flight[operation_id] = size, running
        self._bytes += size
        return StoreCopy(operation_id, unsaved.meta, unsaved.component, unsaved.slots)
