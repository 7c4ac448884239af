"""A lender performs what `transfer.control.source` decides, for one life of a simulated worker.

    asked ── OpenLend ── between two steps of the engine ── a ticket of cache.lends ── Lent
    a prompt that is computed for another: after each step of it more may be read (TurnGrew)
    a turn here that needs the room takes it from the tickets, oldest first (cache.lends)

The production counterparts are node.transfers.source_side, .lending and .turn_lends: same control,
same tickets. What is in host memory is lent too, as from node.transfers.stored_lends, without a
stage. Modelled bytes are never wrong, so that digests take no time. Owns which tickets are peers'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import msgspec

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.sim.engine.sequence import SimSequence
from ownerserve.sim.timeline.heap import Call, TimedCall
from ownerserve.sim.transfer.network import PeerNetwork
from ownerserve.sim.worker.worker import SimWorker
from ownerserve.transfer.control.events import (
    AnswerPeer,
    CheckTicket,
    DigestsMade,
    EndLend,
    LendNotOpened,
    LendOpened,
    MakeDigests,
    OpenLend,
    PeerAsked,
    SourceEvent,
    TicketOver,
    TicketRead,
    TicketStands,
    TurnGrew,
    TurnOver,
    WakeUp,
)
from ownerserve.transfer.control.messages import (
    NO_TURN,
    Lend,
    LendRefusal,
    LentRank,
    PeerAnswer,
    PeerQuestion,
)
from ownerserve.transfer.control.pieces import SizedPiece
from ownerserve.transfer.control.source import TransferSource
from ownerserve.transfer.vocabulary import FramePiece

RANKS = (LentRank(0, "link"),)
FIRST_STORED = 1 << 40
"""Tickets of what is not on the device; the cache's numbers end long before."""
_MADE = (b"modelled",)
_ONE = (_MADE,)

Answered = Callable[[PeerAnswer], None]
"""Hears the answer to a question, where it is given."""


class LendHint(NamedTuple):
    """A hint goes beside a `Lend`, as node.transfers sends one: which prompt its artifact is of, up
    to which unit. The artifact has `bytes` in all, in `cells` equal parts."""

    prompt: Packed
    start: int
    end: int
    cells: int
    bytes: int

    @property
    def tokens(self) -> Packed:
        """Return the units of the prefix that is to be lent."""
        return self.prompt[: self.end * TOKEN_BYTES]

    def size(self, first: int, end: int) -> int:
        """Return the bytes of cells [first, end)."""
        return self.bytes * end // self.cells - self.bytes * first // self.cells


class ExpectedPrompt(msgspec.Struct, eq=False):
    """An expected prompt is one that a sequence here computes for another worker; `began` hears
    when its first step begins. `told` units of it are computed. Of what `lent` says, cells
    [0, covered) were told to who reads under `ticket`."""

    sequence: SimSequence
    began: Call
    lent: LendHint | None = None
    piece: FramePiece | None = None
    ticket: int = 0
    covered: int = 0
    told: int = 0
    has_begun: bool = False
    is_over: bool = False


class SimLender:
    """A lender is one life of a worker as one that lends. `freed(now)` is called when a lend has
    ended, so that there may be room."""

    def __init__(
        self, worker: SimWorker, network: PeerNetwork, freed: Callable[[float], None]
    ) -> None:
        self.unit: RoutingUnit = worker.unit
        self.host = worker.host
        self.is_alive = True
        self.state = TransferSource(self.unit, piece_bytes=network.piece_bytes)
        self._network = network
        self._worker = worker
        self._machine = worker.machine
        self._lends = worker.cache.lends
        self._freed = freed
        self._hint: LendHint | None = None
        """What came beside the `Lend` that is being asked."""
        self._waiting: dict[int, Answered] = {}
        self._questions = 0
        self._tickets: set[int] = set()
        self._stored = FIRST_STORED
        self._coming: dict[TurnId, ExpectedPrompt] = {}
        self._events: deque[SourceEvent] = deque()
        self._timer: TimedCall | None = None
        self._lends.room.revoked = self._revoked

    # -- what peers ask ------------------------------------------------------------------------

    def look(self, prompt: Packed, told: Callable[[int], None], now: float) -> None:
        """Tell how many units of a prompt could be lent, between two steps of the engine."""
        self._worker.between_steps(lambda at_s: told(held_units(self._worker, prompt)), now)

    def asked(
        self,
        reader: RoutingUnit,
        message: PeerQuestion,
        *,
        hint: LendHint | None,
        answered: Answered | None,
        now: float,
    ) -> None:
        """Take a peer's question."""
        self._questions += 1
        if answered is not None:
            self._waiting[self._questions] = answered
        if hint is not None and isinstance(message, Lend):
            self._hint = hint
        self._take(PeerAsked(self._questions, reader, message), now)
        self._hint = None

    def read(self, ticket: int, now: float) -> bool:
        """Tell whether the ticket stands, so that what was read until now counts."""
        if not self._touch(ticket, now):
            return False
        self._take(TicketRead(ticket), now)
        return True

    # -- a prompt that is computed for another -------------------------------------------------

    def expect(self, sequence: SimSequence, began: Call) -> None:
        """Lend what a sequence that is submitted here computes, from now on."""
        coming = self._coming[sequence.turn_id] = ExpectedPrompt(sequence, began)
        self._worker.watched[sequence.turn_id] = lambda now: self._computed(coming, now)

    def forget(self, turn_id: TurnId, now: float) -> None:
        """Lend it no more: nothing is added to what was told."""
        coming = self._coming.pop(turn_id, None)
        if coming is not None:
            self._worker.watched.pop(turn_id, None)
            if coming.ticket and not coming.is_over:
                self._take(TurnOver(turn_id), now)

    def _computed(self, coming: ExpectedPrompt, now: float) -> None:
        """Tell what a step has added, and that the turn is over when it is."""
        sequence = coming.sequence
        is_done = sequence.left <= 0
        if not coming.has_begun and sequence.begun_s >= 0.0:
            coming.has_begun = True
            coming.began(now)
        if sequence.told == coming.told and not is_done:
            return  # the step was others'
        coming.told = sequence.told
        if coming.ticket and not coming.is_over:
            pieces = self._grown(coming, is_done=is_done)
            if pieces:
                self._take(TurnGrew(sequence.turn_id, pieces), now)
            if is_done:
                self._take(TurnOver(sequence.turn_id), now)
        if is_done:
            coming.is_over = True
            self._worker.watched.pop(sequence.turn_id, None)

    def _grown(self, coming: ExpectedPrompt, *, is_done: bool) -> tuple[SizedPiece, ...]:
        """Return what is sealed and was not told, as far as the ticket covers it. The last cell has
        the point state too, and is told when the prompt is whole."""
        lent, piece, turn_id = coming.lent, coming.piece, coming.sequence.turn_id
        assert lent is not None and piece is not None, "it is read"
        if is_done:
            cells = lent.cells if self._is_here(lent) else 0
        else:
            if turn_id not in self._machine.cache.running:
                return ()  # preempted: it begins again
            self._lends.follow(coming.ticket, turn_id)
            sealed = max(0, coming.sequence.told - lent.start) // self._block * self._block
            cells = min(sealed * lent.cells // max(1, lent.end - lent.start), lent.cells - 1)
        if cells <= coming.covered or not self._lends.stands(coming.ticket):
            return ()
        first, coming.covered = coming.covered, cells
        grown = msgspec.structs.replace(piece, first_unit=first, end_unit=cells)
        return (SizedPiece(grown, lent.size(first, cells)),)

    # -- effects -------------------------------------------------------------------------------

    def _take(self, event: SourceEvent, now: float) -> None:
        """Have the control take an event, and all that follows."""
        if not self.is_alive:
            return
        self._events.append(event)
        if len(self._events) > 1:
            return  # whoever performs now comes to it
        while self._events:
            for effect in self.state.handle(self._events[0], now):
                self._perform(effect, now)
            self._events.popleft()
        if self._timer is None or self._timer.call is None or isinstance(event, PeerAsked):
            self._arm(now)  # all else only puts off what is due: no ticket stands without a timer

    def _perform(self, effect: object, now: float) -> None:
        match effect:
            case OpenLend():
                hint = self._hint
                self._worker.between_steps(lambda at_s: self._open(effect, hint, at_s), now)
            case EndLend(ticket):
                self._end(ticket, now)
            case MakeDigests(ticket, batch, pieces):
                made: SourceEvent = TicketOver(ticket)
                if self._stands(ticket):
                    made = DigestsMade(ticket, batch, _ONE * len(pieces))
                self._events.append(made)
            case CheckTicket(ticket, check):
                is_there = self._touch(ticket, now)
                self._events.append(TicketStands(ticket, check) if is_there else TicketOver(ticket))
            case AnswerPeer(question, answer):
                answered = self._waiting.pop(question, None)
                if answered is not None:
                    answered(answer)

    def _open(self, effect: OpenLend, hint: LendHint | None, now: float) -> None:
        refused = LendNotOpened(effect.number, LendRefusal.NOT_HELD)
        if hint is None:
            self._take(refused, now)
            return
        [piece] = effect.lend.wanted
        coming = self._coming.get(effect.lend.turn_id)
        if coming is not None and not coming.is_over:
            self._take(self._open_turn(effect, coming, hint, piece=piece, now=now), now)
            return
        if self._is_here(hint):
            ticket = self._lends.lend((hint.tokens,), now, idle_s=effect.idle_s)
        elif effect.lend.turn_id == NO_TURN and self._is_stored(hint):
            self._stored += 1
            ticket = self._stored
        else:
            self._take(refused, now)
            return
        self._tickets.add(ticket)
        self._take(LendOpened(effect.number, ticket, RANKS, (SizedPiece(piece, hint.bytes),)), now)

    def _open_turn(
        self,
        effect: OpenLend,
        coming: ExpectedPrompt,
        hint: LendHint,
        *,
        piece: FramePiece,
        now: float,
    ) -> LendOpened:
        """Lend what of the prompt is computed by now, and more with each step."""
        turn_id = coming.sequence.turn_id
        coming.lent, coming.piece, coming.covered = hint, piece, 0
        coming.ticket = self._lends.lend((), now, idle_s=effect.idle_s)
        self._tickets.add(coming.ticket)
        pieces = self._grown(coming, is_done=False)
        return LendOpened(effect.number, coming.ticket, RANKS, pieces, follows=turn_id)

    def _end(self, ticket: int, now: float) -> None:
        self._tickets.discard(ticket)
        if ticket < FIRST_STORED:
            self._lends.end(ticket)
            self._freed(now)

    def _revoked(self, ticket: int) -> None:
        """Hear, amid a plan of the engine, that a turn takes a lend's room; its reader is told once
        that is made."""
        heap = self._worker.heap
        heap.at(heap.now, lambda now: self._take(TicketOver(ticket), now))

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _block(self) -> int:
        return self._machine.cache.layout.block_tokens

    def _stands(self, ticket: int) -> bool:
        return ticket in self._tickets and (ticket >= FIRST_STORED or self._lends.stands(ticket))

    def _touch(self, ticket: int, now: float) -> bool:
        """Tell whether the ticket stands, and put off its end."""
        if ticket >= FIRST_STORED:
            return ticket in self._tickets
        return self._lends.read(ticket, now)

    def _is_here(self, hint: LendHint) -> bool:
        """Tell whether the device has all of it, with the point to go on from at its end."""
        cache = self._machine.cache
        if not cache.layout.point_names:
            return cache.residents.blocks(hint.tokens) * self._block >= hint.end
        points = cache.match(hint.prompt).points
        return any(point.position == hint.end and not point.lacks for point in points)

    def _is_stored(self, hint: LendHint) -> bool:
        return self._machine.node.stored_units(hint.prompt) >= hint.end

    def _arm(self, now: float) -> None:
        if not self._tickets:
            return  # what is remembered of former lends is forgotten when there are others
        due_s, timer = self.state.next_deadline(), self._timer
        if timer is not None and timer.call is not None:
            if timer.when_s <= due_s:
                return  # it is asked again then
            timer.cancel()
        self._timer = None if due_s == inf else self._network.heap.at(max(now, due_s), self._wake)

    def _wake(self, now: float) -> None:
        if self.is_alive and self.state.next_deadline() <= now:
            self._take(WakeUp(), now)
        elif self.is_alive:
            self._arm(now)

    def die(self) -> None:
        """End with the life: nobody is answered any more."""
        self.is_alive = False
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Raise InvariantViolated unless each peer's ticket is one that the control knows."""
        if not self.is_alive:
            return
        self.state.check()
        standing = sum(self._stands(ticket) for ticket in self._tickets)
        if standing > self.state.counts()["lends"]:
            raise InvariantViolated("invariant 15: a lend that nobody ends")


def held_units(worker: SimWorker, prompt: Packed) -> int:
    """Return the units of a prompt that the worker can send, or that need not be sent as they are
    there."""
    match = worker.cache.match(prompt)
    complete = next((point.position for point in match.points if not point.lacks), 0)
    return max(complete, worker.machine.node.stored_units(prompt))
