"""A source publishes what it may, answers each question once it can, and leaves nothing behind."""

from __future__ import annotations

from ownerserve.kv.ids import Incarnation, TurnId, WorkerId
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
    PeerAnswer,
    PeerQuestion,
    PublishedPiece,
    ReaderRank,
    ReturnLend,
)
from ownerserve.transfer.control.pieces import SizedPiece
from ownerserve.transfer.control.source import AHEAD, HOLD_S, IDLE_S, LENDS_MAX, TransferSource
from ownerserve.transfer.vocabulary import FramePiece

HERE = RoutingUnit(WorkerId("s"), 0, Incarnation(1))
READER = RoutingUnit(WorkerId("t"), 0, Incarnation(1))
OTHER = RoutingUnit(WorkerId("u"), 0, Incarnation(1))
TURN = TurnId("turn")
RANKS = (LentRank(0, "address"),)
PIECE = FramePiece(b"artifact", 0, 4, 0, 2)


class Peers:
    """What is asked of one source, and what it does."""

    def __init__(self) -> None:
        self.source = TransferSource(HERE)
        self.now = 0.0
        self.questions = 0
        self.done: list[SourceEffect] = []

    def tell(self, event: SourceEvent) -> list[SourceEffect]:
        self.done = self.source.handle(event, self.now)
        self.source.check()
        return self.done

    def ask(self, message: PeerQuestion, reader: RoutingUnit = READER) -> list[SourceEffect]:
        self.questions += 1
        return self.tell(PeerAsked(self.questions, reader, message))

    def answers(self) -> list[PeerAnswer]:
        return [effect.answer for effect in self.done if isinstance(effect, AnswerPeer)]

    def lend(self, *pieces: FramePiece, turn_id: TurnId = NO_TURN, ticket: int = 9) -> None:
        """A lend of these pieces, which follows the turn."""
        [opened] = self.ask(lend_of(turn_id=turn_id))
        assert isinstance(opened, OpenLend)
        sized = tuple(SizedPiece(piece, 64) for piece in pieces)
        self.tell(LendOpened(opened.number, ticket, RANKS, sized, turn_id))
        assert self.answers() == [Lent(ticket, RANKS)]

    def checked(self) -> int:
        [check] = [effect.check for effect in self.done if isinstance(effect, CheckTicket)]
        return check

    def stands(self) -> list[PeerAnswer]:
        """The ticket that was just asked for stands."""
        self.tell(TicketStands(9, self.checked()))
        return self.answers()

    def digested(self, *digests: bytes) -> None:
        [made] = [effect for effect in self.done if isinstance(effect, MakeDigests)]
        assert len(made.pieces) == len(digests)
        self.tell(DigestsMade(9, made.batch, tuple((one,) for one in digests)))


def lend_of(nonce: int = 1, turn_id: TurnId = NO_TURN, lender: RoutingUnit = HERE) -> Lend:
    return Lend(Nonce(nonce), lender, (PIECE,), (ReaderRank(0, 0, 8),), turn_id)


def more(have: int = 0, wait_ms: int = 1000, lender: RoutingUnit = HERE) -> More:
    return More(9, lender, have, wait_ms)


def test_what_is_sealed_is_published_once_it_is_digested_and_the_ticket_stood_after() -> None:
    peers = Peers()
    peers.lend(PIECE)
    made = peers.done
    peers.ask(more())
    assert peers.stands() == [], "nothing is digested yet"
    peers.done = made
    peers.digested(b"digest")
    assert peers.answers() == [], "the ticket is asked for first"
    published = PublishedPiece(PIECE, (b"digest",))
    assert peers.stands() == [Grown(0, (published,), is_final=True)]


def test_digests_that_were_made_after_a_ticket_was_asked_for_wait_for_the_next_answer() -> None:
    peers = Peers()
    peers.lend(PIECE)
    made = peers.done
    peers.ask(more())
    before = peers.checked()
    peers.done = made
    peers.digested(b"of what others wrote since")
    peers.tell(TicketStands(9, before))
    assert peers.answers() == []
    peers.tell(TicketOver(9))
    assert peers.answers() == [LendGone()]


def test_a_question_is_answered_by_a_ticket_that_stood_after_it_came() -> None:
    peers = Peers()
    peers.lend(PIECE)
    peers.digested(b"digest")
    before = peers.checked()
    peers.ask(more())
    peers.tell(TicketStands(9, before))
    assert peers.answers() == []
    assert peers.tell(TicketOver(9)) == [EndLend(9), AnswerPeer(2, LendGone())]


def test_a_turn_is_published_as_it_grows_layer_by_layer() -> None:
    peers = Peers()
    peers.lend(turn_id=TURN)
    peers.ask(more())
    assert peers.stands() == []
    first, second = FramePiece(b"artifact", 0, 2, 0, 1), FramePiece(b"artifact", 0, 2, 1, 2)
    peers.tell(TurnGrew(TURN, (SizedPiece(first, 64), SizedPiece(second, 64))))
    peers.digested(b"1", b"2")
    [grown] = peers.stands()
    assert isinstance(grown, Grown) and not grown.is_final
    assert [one.piece for one in grown.pieces] == [first, second]
    peers.ask(more(2))
    assert peers.stands() == []
    peers.tell(TurnOver(TURN))
    assert peers.stands() == [Grown(2, (), is_final=True)]


def test_what_nobody_asked_for_is_not_published() -> None:
    peers = Peers()
    peers.lend(turn_id=TURN)
    stranger = SizedPiece(FramePiece(b"another", 0, 1, 0, 1), 64)
    assert peers.tell(TurnGrew(TURN, (stranger,))) == []
    beyond = SizedPiece(FramePiece(b"artifact", 3, 6, 0, 2), 96)
    [made] = peers.tell(TurnGrew(TURN, (beyond,)))
    assert isinstance(made, MakeDigests)
    assert made.pieces == (FramePiece(b"artifact", 3, 4, 0, 2),)


def test_a_long_poll_is_answered_within_its_wait() -> None:
    peers = Peers()
    peers.lend(turn_id=TURN)
    peers.ask(more(wait_ms=60_000))
    assert peers.stands() == []
    assert peers.source.next_deadline() == HOLD_S
    peers.now = HOLD_S
    peers.tell(WakeUp())
    assert peers.stands() == [Grown(0, (), is_final=False)]


def test_a_reader_that_does_not_follow_is_not_digested_for() -> None:
    peers = Peers()
    peers.lend(turn_id=TURN)
    pieces = tuple(SizedPiece(PIECE, 8 << 30) for _ in range(20))  # each of 8 cells of 1 GiB
    peers.tell(TurnGrew(TURN, pieces))
    published = 0
    while any(isinstance(effect, MakeDigests) for effect in peers.done):
        [made] = [effect for effect in peers.done if isinstance(effect, MakeDigests)]
        published += len(made.pieces)
        peers.tell(DigestsMade(9, made.batch, ((b"",),) * len(made.pieces)))
        peers.tell(TicketStands(9, peers.checked()))
    assert published == AHEAD
    peers.ask(more(AHEAD, wait_ms=0))
    assert any(isinstance(effect, MakeDigests) for effect in peers.done)


def test_a_repeated_nonce_gets_the_same_answer() -> None:
    peers = Peers()
    [opened] = peers.ask(lend_of())
    assert isinstance(opened, OpenLend)
    assert peers.ask(lend_of()) == [], "it is under way"
    peers.tell(LendOpened(opened.number, 9, RANKS, ()))
    assert peers.done[0] == AnswerPeer(2, Lent(9, RANKS)), "to whom asked last"
    assert peers.ask(lend_of()) == [AnswerPeer(3, Lent(9, RANKS))]
    [other] = peers.ask(lend_of(nonce=2))
    assert isinstance(other, OpenLend)
    peers.tell(LendNotOpened(other.number, LendRefusal.NOT_HELD))
    refused = LendRefused(LendRefusal.NOT_HELD)
    assert peers.answers() == [refused]
    assert peers.ask(lend_of(nonce=2)) == [AnswerPeer(5, refused)]


def test_cancel_overtakes_all() -> None:
    peers = Peers()
    peers.ask(Cancel(Nonce(1)))
    assert peers.answers() == [Cancelled()]
    peers.ask(lend_of())
    assert peers.answers() == [LendRefused(LendRefusal.CANCELLED)], "it comes before what it undoes"
    [opened] = peers.ask(lend_of(nonce=2))
    assert isinstance(opened, OpenLend)
    peers.ask(Cancel(Nonce(2)))
    done = peers.tell(LendOpened(opened.number, 9, RANKS, ()))
    assert done == [EndLend(9), AnswerPeer(3, LendRefused(LendRefusal.CANCELLED))]
    [third] = peers.ask(lend_of(nonce=3))
    assert isinstance(third, OpenLend)
    peers.tell(LendOpened(third.number, 10, RANKS, ()))
    assert EndLend(10) in peers.ask(Cancel(Nonce(3)))
    assert not peers.source.counts()["lends"]


def test_a_ticket_ends_when_its_reader_is_done_or_silent() -> None:
    peers = Peers()
    peers.lend(PIECE)
    peers.now = 4.0
    peers.tell(TicketRead(9))
    assert peers.source.next_deadline() == 4.0 + IDLE_S
    peers.now = 4.0 + IDLE_S
    assert peers.tell(WakeUp()) == [EndLend(9)]
    peers.ask(more())
    assert peers.answers() == [LendGone()]
    peers.now += 1.0
    [again] = peers.ask(lend_of(nonce=5))
    assert isinstance(again, OpenLend)
    peers.tell(LendOpened(again.number, 11, RANKS, ()))
    peers.ask(ReturnLend(11, HERE))
    assert peers.done == [EndLend(11), AnswerPeer(4, LendReturned())]
    peers.ask(ReturnLend(11, HERE))
    assert peers.answers() == [LendReturned()]
    peers.now += 31.0
    peers.tell(WakeUp())
    assert not any(peers.source.counts().values())


def test_a_ticket_is_its_readers_alone_and_of_this_life() -> None:
    peers = Peers()
    peers.lend(PIECE)
    peers.ask(more(), OTHER)
    assert peers.answers() == [LendGone()]
    later = RoutingUnit(WorkerId("s"), 0, Incarnation(2))
    peers.ask(more(lender=later))
    assert peers.answers() == [LendGone()]
    peers.ask(ReturnLend(9, HERE), OTHER)
    assert EndLend(9) not in peers.done
    peers.ask(lend_of(nonce=7, lender=later))
    assert peers.answers() == [LendRefused(LendRefusal.OTHER_LIFE)]


def test_so_many_lends_stand_at_once() -> None:
    peers = Peers()
    for nonce in range(LENDS_MAX):
        peers.ask(lend_of(nonce=nonce + 1))
    peers.ask(lend_of(nonce=1000))
    assert peers.answers() == [LendRefused(LendRefusal.BUSY)]
