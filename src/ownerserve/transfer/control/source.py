"""A source lends: it publishes what may be read under a ticket, and answers for it. Pure.

    asked       by                                  then
    OPENING     LendOpened                          LENT: Lent
                LendNotOpened                       LendRefused
                Cancel                              ended as soon as it is opened
    LENT        ReturnLend, Cancel                  RETURNED: EndLend
                5 s without a read or a More        EXPIRED: EndLend
                TicketOver                          REVOKED: EndLend; a turn needed the room

What may be read goes through a queue of each lend, in order:

    grown ── MakeDigests ──> made ── CheckTicket, TicketStands ──> published ── Grown ──> known

- Nothing is published before its digest was made and the ticket, asked after that, stood: a digest
  of blocks that were used again meanwhile matches wrong bytes.
- A `More` is answered only after the ticket, asked after the More came, stood: a reader whose reads
  nobody sees counts on it.
- A nonce repeated gets the same answer, and after a Cancel always `cancelled`.
- At most `LENDS_MAX` lends are open, each with `HELD_MAX` held questions at most, which are
  answered within their wait, or `HOLD_S`.
- No more than `AHEAD` pieces are digested beyond what the reader knows.

RETURNED, EXPIRED and REVOKED leave nothing behind: a More then finds no ticket.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from enum import StrEnum
from math import inf

import msgspec

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.rpc import Cancel, Cancelled, Nonce
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
    SourceEffect,
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
    Grown,
    Lend,
    LendGone,
    LendRefusal,
    LendRefused,
    LendReturned,
    Lent,
    LentRank,
    More,
    PublishedPiece,
    ReturnLend,
)
from ownerserve.transfer.control.pieces import PIECE_BYTES, SizedPiece, clip, cut
from ownerserve.transfer.vocabulary import FramePiece

IDLE_S = 5.0
"""A ticket ends so long after its last read or More."""
HOLD_S = 1.0
"""A More waits so long at most, so that who asks hears of a live peer twice before 2 s are over."""
LENDS_MAX, HELD_MAX = 256, 4
"""Lends that are open at once, and questions that wait for more of one of them."""
AHEAD, BATCH = 64, 16
"""Pieces that are digested beyond what the reader knows, and at once."""
REMEMBERED, REMEMBERED_S = 4096, 30.0
"""Nonces whose answer is kept, and how long; longer than any message is under way."""

ReaderNonce = tuple[RoutingUnit, Nonce]
"""A reader and the nonce under which it asked: each reader draws its own."""


class LendEnd(StrEnum):
    """A `LendEnd` says how a lend came to its end. Labels of metrics."""

    RETURNED = "returned"
    EXPIRED = "expired"
    REVOKED = "revoked"
    CANCELLED = "cancelled"


class HeldMore(msgspec.Struct, frozen=True, gc=False):
    """A `HeldMore` waits for its answer until `due_s`; only a ticket asked by `check` or later
    counts for it."""

    question: int
    have: int
    due_s: float
    check: int


class OpenedLend(msgspec.Struct, eq=False):
    """An `OpenedLend` is one ticket, and what goes through its queue.

    `checks` counts how often the ticket was asked, and `stood` is the last answer. `batch` is being
    digested; once it is (`digests`), only a ticket asked by `made_check` or later counts for it.
    """

    nonce: ReaderNonce
    ticket: int
    wanted: dict[bytes, FramePiece]
    ranks: tuple[LentRank, ...]
    turn_id: TurnId
    until_s: float
    published: list[PublishedPiece] = []
    known: int = 0
    grown: deque[FramePiece] = msgspec.field(default_factory=deque)
    batch: tuple[FramePiece, ...] = ()
    batches: int = 0
    digests: tuple[tuple[bytes, ...], ...] | None = None
    made_check: int = 0
    held: list[HeldMore] = []
    checks: int = 0
    stood: int = 0

    @property
    def is_final(self) -> bool:
        """Tell whether nothing will be published any more."""
        return self.turn_id == NO_TURN and not self.grown and not self.batch


class OpeningLend(msgspec.Struct, eq=False):
    """An `OpeningLend` waits for the engine; its answer goes to `question`, who asked last."""

    nonce: ReaderNonce
    question: int
    lend: Lend
    is_cancelled: bool = False


class TransferSource:
    """A `TransferSource` is one life of a unit as one that lends. It owns the lends between their
    first word and their end; the tickets and the blocks are the cache's. What it lends is read in
    pieces of `piece_bytes` at most."""

    def __init__(self, unit: RoutingUnit, *, piece_bytes: int = PIECE_BYTES) -> None:
        self.unit = unit
        self._piece_bytes = piece_bytes
        self.ends: Counter[LendEnd | LendRefusal] = Counter()
        """How often a lend ended, or came to nothing, by how: metric labels."""
        self._numbers = 0
        self._opening: dict[int, OpeningLend] = {}
        self._by_nonce: dict[ReaderNonce, int] = {}  # which of `_opening` it is
        self._lends: dict[int, OpenedLend] = {}  # by ticket
        self._following: dict[TurnId, list[OpenedLend]] = {}
        self._told: dict[ReaderNonce, tuple[Lent | LendRefused, float]] = {}  # oldest first

    def handle(self, event: SourceEvent, now: float) -> list[SourceEffect]:
        """Take one event, and return what is to be done of it, in order."""
        match event:
            case PeerAsked():
                return self._asked(event, now)
            case LendOpened():
                return self._opened(event, now)
            case LendNotOpened(number, reason):
                return self._not_opened(number, reason, now)
            case TurnGrew(turn_id, pieces):
                effects: list[SourceEffect] = []
                for lend in self._following.get(turn_id, ()):
                    self._grow(lend, pieces)
                    effects += self._go_on(lend)
                return effects
            case TurnOver(turn_id):
                return self._turn_over(turn_id)
            case DigestsMade():
                return self._digested(event)
            case TicketStands(ticket, check):
                return self._stands(ticket, check, now)
            case TicketOver(ticket):
                over = self._lends.get(ticket)
                return [] if over is None else self._end(over, LendEnd.REVOKED)
            case TicketRead(ticket):
                if ticket in self._lends:
                    self._lends[ticket].until_s = now + IDLE_S
                return []
            case WakeUp():
                return self._overdue(now)

    def next_deadline(self) -> float:
        """Return the instant at which a `WakeUp` has something to do; inf: there is none."""
        first = min((lend.until_s for lend in self._lends.values()), default=inf)
        for lend in self._lends.values():
            if not self._is_asking(lend):
                first = min([first, *(held.due_s for held in lend.held)])
        for _, told_s in self._told.values():
            return min(first, told_s + REMEMBERED_S)
        return first

    # -- what peers ask ------------------------------------------------------------------------

    def _asked(self, event: PeerAsked, now: float) -> list[SourceEffect]:
        match event.message:
            case Lend() as lend:
                return self._lend_asked(event, lend, now)
            case More() as more:
                return self._more_asked(event, more, now)
            case ReturnLend():
                found = self._find(event.reader, event.message)
                effects = [] if found is None else self._end(found, LendEnd.RETURNED)
                return [*effects, AnswerPeer(event.question, LendReturned())]
            case Cancel(nonce):
                effects = self._cancel((event.reader, nonce), now)
                return [*effects, AnswerPeer(event.question, Cancelled())]

    def _lend_asked(self, event: PeerAsked, lend: Lend, now: float) -> list[SourceEffect]:
        nonce = (event.reader, lend.nonce)
        told = self._told.get(nonce)
        if told is not None:
            return [AnswerPeer(event.question, told[0])]
        if nonce in self._by_nonce:
            self._opening[self._by_nonce[nonce]].question = event.question
            return []
        if lend.lender != self.unit:
            return [self._refuse(event.question, LendRefusal.OTHER_LIFE)]
        if len(self._opening) + len(self._lends) >= LENDS_MAX:
            self._tell(nonce, LendRefused(LendRefusal.BUSY), now)
            return [self._refuse(event.question, LendRefusal.BUSY)]
        self._numbers += 1
        self._opening[self._numbers] = OpeningLend(nonce, event.question, lend)
        self._by_nonce[nonce] = self._numbers
        return [OpenLend(self._numbers, event.reader, lend, IDLE_S)]

    def _refuse(self, question: int, reason: LendRefusal) -> AnswerPeer:
        self.ends[reason] += 1
        return AnswerPeer(question, LendRefused(reason))

    def _find(self, reader: RoutingUnit, message: More | ReturnLend) -> OpenedLend | None:
        """Return the lend that a reader names, which is its own, of this life."""
        lend = self._lends.get(message.ticket)
        if lend is None or not self._is_of(lend, reader, message.lender):
            return None
        return lend

    def _is_of(self, lend: OpenedLend, reader: RoutingUnit, lender: RoutingUnit) -> bool:
        return lender == self.unit and lend.nonce[0] == reader

    def _more_asked(self, event: PeerAsked, more: More, now: float) -> list[SourceEffect]:
        lend = self._find(event.reader, more)
        if lend is None:
            return [AnswerPeer(event.question, LendGone())]
        lend.until_s = now + IDLE_S
        lend.known = max(lend.known, min(more.have, len(lend.published)))
        due_s = now + min(more.wait_ms / 1000, HOLD_S)
        held = HeldMore(event.question, more.have, due_s, self._next_check(lend))
        lend.held = [*lend.held[1 - HELD_MAX :], held]  # who asked first of too many has asked anew
        return [self._check(lend), *self._go_on(lend)]

    def _cancel(self, nonce: ReaderNonce, now: float) -> list[SourceEffect]:
        """Undo what was asked under a nonce, and have it refused from now on."""
        effects: list[SourceEffect] = []
        opening = self._opening.get(self._by_nonce.get(nonce, 0))
        if opening is not None:
            opening.is_cancelled = True
        told = self._told.pop(nonce, None)
        if told is not None and isinstance(told[0], Lent) and told[0].ticket in self._lends:
            effects = self._end(self._lends[told[0].ticket], LendEnd.CANCELLED)
        self._tell(nonce, LendRefused(LendRefusal.CANCELLED), now)
        return effects

    # -- a lend begins -------------------------------------------------------------------------

    def _opened(self, event: LendOpened, now: float) -> list[SourceEffect]:
        opening = self._opening.pop(event.number)
        del self._by_nonce[opening.nonce]
        if self._is_cancelled(opening):
            self.ends[LendEnd.CANCELLED] += 1
            refused = LendRefused(LendRefusal.CANCELLED)
            return [EndLend(event.ticket), AnswerPeer(opening.question, refused)]
        lend = OpenedLend(
            nonce=opening.nonce,
            ticket=event.ticket,
            wanted={piece.artifact: piece for piece in opening.lend.wanted},
            ranks=event.ranks,
            turn_id=event.follows,
            until_s=now + IDLE_S,
        )
        self._lends[event.ticket] = lend
        if event.follows != NO_TURN:
            self._following.setdefault(event.follows, []).append(lend)
        lent = Lent(event.ticket, event.ranks)
        self._tell(opening.nonce, lent, now)
        self._grow(lend, event.pieces)
        return [AnswerPeer(opening.question, lent), *self._go_on(lend)]

    def _is_cancelled(self, opening: OpeningLend) -> bool:
        return opening.is_cancelled

    def _not_opened(self, number: int, reason: LendRefusal, now: float) -> list[SourceEffect]:
        opening = self._opening.pop(number)
        del self._by_nonce[opening.nonce]
        if opening.is_cancelled:
            reason = LendRefusal.CANCELLED
        self._tell(opening.nonce, LendRefused(reason), now)
        return [self._refuse(opening.question, reason)]

    def _tell(self, nonce: ReaderNonce, answer: Lent | LendRefused, now: float) -> None:
        """Keep the answer for who asks again."""
        self._told.pop(nonce, None)
        self._told[nonce] = (answer, now)
        if len(self._told) > REMEMBERED:
            del self._told[next(iter(self._told))]

    # -- what may be read ----------------------------------------------------------------------

    def _grow(self, lend: OpenedLend, pieces: Iterable[SizedPiece]) -> None:
        """Queue what is wanted of these pieces, cut for reading."""
        for sized in pieces:
            wanted = lend.wanted.get(sized.piece.artifact)
            inside = None if wanted is None else clip(sized, wanted)
            if inside is not None:
                lend.grown.extend(cut(inside, self._piece_bytes))

    def _turn_over(self, turn_id: TurnId) -> list[SourceEffect]:
        effects: list[SourceEffect] = []
        for lend in self._following.pop(turn_id, ()):
            lend.turn_id = NO_TURN
            effects += self._go_on(lend)
        return effects

    def _go_on(self, lend: OpenedLend) -> list[SourceEffect]:
        """Begin the next batch of digests, as far as the reader follows; ask for the ticket where a
        reader can be answered."""
        effects: list[SourceEffect] = []
        room = min(BATCH, lend.known + AHEAD - len(lend.published))
        if not lend.batch and lend.grown and room > 0:
            count = min(room, len(lend.grown))
            lend.batch = tuple(lend.grown.popleft() for _ in range(count))
            lend.batches += 1
            effects.append(MakeDigests(lend.ticket, lend.batches, lend.batch))
        has_answer = any(self._has_answer(lend, held) for held in lend.held)
        if has_answer and not self._is_asking(lend):
            effects.append(self._check(lend))
        return effects

    def _digested(self, event: DigestsMade) -> list[SourceEffect]:
        lend = self._lends.get(event.ticket)
        if lend is None or event.batch != lend.batches or lend.digests is not None:
            return []
        lend.digests, lend.made_check = event.digests, self._next_check(lend)
        return [self._check(lend)]

    def _next_check(self, lend: OpenedLend) -> int:
        """Return the number of the first check that comes after what is there now."""
        return lend.checks + 1

    def _check(self, lend: OpenedLend) -> CheckTicket:
        lend.checks += 1
        return CheckTicket(lend.ticket, lend.checks)

    def _is_asking(self, lend: OpenedLend) -> bool:
        return lend.checks > lend.stood

    def _stands(self, ticket: int, check: int, now: float) -> list[SourceEffect]:
        lend = self._lends.get(ticket)
        if lend is None:
            return []
        lend.stood = max(lend.stood, check)
        if lend.digests is not None and self._is_after(check, lend):
            digested = zip(lend.batch, lend.digests, strict=True)
            lend.published += [PublishedPiece(piece, digests) for piece, digests in digested]
            lend.batch, lend.digests = (), None
        answered = [
            held
            for held in lend.held
            if self._counts_for(check, held) and (self._has_answer(lend, held) or held.due_s <= now)
        ]
        lend.held = [held for held in lend.held if held not in answered]
        answers = [AnswerPeer(held.question, self._grown(lend, held)) for held in answered]
        return [*answers, *self._go_on(lend)]

    def _is_after(self, check: int, lend: OpenedLend) -> bool:
        """Tell whether the ticket was asked after the batch's digests were made."""
        return check >= lend.made_check

    def _counts_for(self, check: int, held: HeldMore) -> bool:
        """Tell whether the ticket was asked after the question came."""
        return check >= held.check

    def _has_answer(self, lend: OpenedLend, held: HeldMore) -> bool:
        return held.have < len(lend.published) or lend.is_final

    def _grown(self, lend: OpenedLend, held: HeldMore) -> Grown:
        pieces = tuple(lend.published[held.have : held.have + AHEAD])
        is_last = held.have + len(pieces) >= len(lend.published)
        return Grown(held.have, pieces, lend.is_final and is_last)

    # -- a lend ends ---------------------------------------------------------------------------

    def _overdue(self, now: float) -> list[SourceEffect]:
        effects: list[SourceEffect] = []
        for lend in list(self._lends.values()):
            if self._is_idle(lend, now):
                effects += self._end(lend, LendEnd.EXPIRED)
            elif not self._is_asking(lend) and any(held.due_s <= now for held in lend.held):
                effects.append(self._check(lend))
        for nonce, (_, told_s) in list(self._told.items()):
            if told_s + REMEMBERED_S > now:
                break
            del self._told[nonce]
        return effects

    def _is_idle(self, lend: OpenedLend, now: float) -> bool:
        return lend.until_s <= now

    def _end(self, lend: OpenedLend, end: LendEnd) -> list[SourceEffect]:
        """End a lend and forget it; who waits is told. One whose ticket is over is ended too: the
        cache lets go of what it kept."""
        self.ends[end] += 1
        del self._lends[lend.ticket]
        if lend.turn_id != NO_TURN:
            followers = self._following[lend.turn_id]
            followers.remove(lend)
            if not followers:
                del self._following[lend.turn_id]
        gone = [AnswerPeer(held.question, LendGone()) for held in lend.held]
        return [EndLend(lend.ticket), *gone]

    # -- what the checks read ------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Count lends that wait for the engine, open lends, held questions, nonces."""
        held = sum(len(lend.held) for lend in self._lends.values())
        return {
            "opening": len(self._opening),
            "lends": len(self._lends),
            "held": held,
            "nonces": len(self._told),
        }

    def check(self) -> None:
        """Raise InvariantViolated unless invariants 13 and 15 hold."""
        followers = [lend for lends in self._following.values() for lend in lends]
        if {id(one) for one in followers} != {
            id(one) for one in self._lends.values() if one.turn_id != NO_TURN
        }:
            raise InvariantViolated("invariant 15: a lend follows no turn, or is over and follows")
        if sorted(self._by_nonce.values()) != sorted(self._opening):
            raise InvariantViolated("invariant 15: a nonce for which nothing was begun")
        if len(self._opening) + len(self._lends) > LENDS_MAX or len(self._told) > REMEMBERED:
            raise InvariantViolated("invariant 15: more lends or nonces than may be")
        for lend in self._lends.values():
            if len(lend.published) + len(lend.batch) > lend.known + AHEAD:
                raise InvariantViolated("invariant 15: digested beyond what the reader follows")
            if lend.digests is not None and lend.stood >= lend.made_check:
                raise InvariantViolated("invariant 13: digests that stood are not published")
