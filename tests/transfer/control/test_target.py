"""A target brings all of it, or ends in time and says why; what somebody may write is nobody's."""

from __future__ import annotations

import pytest

from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.rpc import Cancel, Nonce
from ownerserve.transfer.control.events import (
    ArenaCopied,
    AskPeer,
    BringEnd,
    BringOver,
    BringUnwanted,
    CancelRead,
    CommitRoom,
    CopyFromArena,
    FreeArena,
    FreeRoom,
    HoldRoom,
    PeerAnswered,
    PeerReplaced,
    QuestionLost,
    ReadEnded,
    ReadGoal,
    ReserveRoom,
    RoomCommitted,
    RoomRefused,
    RoomReserved,
    StartRead,
    TellPeer,
)
from ownerserve.transfer.control.messages import (
    Grown,
    Lend,
    LendGone,
    LendRefusal,
    LendRefused,
    Lent,
    LentRank,
    More,
    PublishedPiece,
    ReturnLend,
)
from ownerserve.transfer.control.pieces import PIECE_BYTES
from ownerserve.transfer.control.rooms import READS_MAX
from ownerserve.transfer.control.target import LEND_S, SILENT_S
from ownerserve.transfer.vocabulary import (
    FramePiece,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    ReadQuiet,
    ReadUnproven,
)
from tests.support.transfer_control.one_target import (
    FIRST,
    RANKS,
    RDMA,
    READV,
    RESERVATION,
    SECOND,
    TCP,
    TICKET,
    OneTarget,
    published,
    wanted,
)


def test_what_is_lent_is_read_and_committed_with_its_digests() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),))
    lend = one.one(AskPeer).message
    assert isinstance(lend, Lend) and lend.wanted == (wanted(b"a").piece,)
    one.open(published(b"a", 0, 1), published(b"a", 1, 2))
    first, second = one.of(StartRead)
    assert first.goal is ReadGoal.BLOCKS and first.digest == b"a 0 0"
    one.land(second)
    assert not one.of(CommitRoom)
    one.land(first)
    assert one.one(CommitRoom) == CommitRoom(RESERVATION, {b"a": (b"a 0 0", b"a 1 0")})
    one.tell(RoomCommitted(RESERVATION))
    assert TellPeer(FIRST, ReturnLend(TICKET, FIRST.unit)) in one.done
    assert (one.over().end, one.over().parts) == (BringEnd.BROUGHT, 1)
    assert one.over().read_bytes == {"tcp": 100}
    assert not any(one.target.counts(one.now).values())


def test_parts_come_one_after_another_and_what_came_stays() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), (wanted(b"b"),))
    one.open(published(b"a"), published(b"b"))
    one.land(one.one(StartRead))
    assert one.tell(RoomCommitted(RESERVATION)) == [ReserveRoom(1, 1)]
    one.tell(RoomReserved(1, 1, 71))
    read = one.one(StartRead)
    one.tell(ReadEnded(ReadFailed(read.number, ReadFailure.GONE)))
    assert (one.over().end, one.over().parts) == (BringEnd.GONE, 1)


def test_all_ranks_have_their_bytes_or_none_counts() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), ranks=2)
    ranks = (LentRank(0, "s"), LentRank(1, "s"))
    one.open(published(b"a", ranks=2), ranks=ranks)
    first, second = one.of(StartRead)
    assert (first.rank, second.rank) == ranks
    one.land(first)
    assert not one.of(CommitRoom)
    for _ in range(2):  # that rank's mover is dead
        one.tell(ReadEnded(ReadFailed(second.number, ReadFailure.PEER_LOST)))
        second = one.of(StartRead)[0] if one.of(StartRead) else second
    assert one.over().end is BringEnd.FAILED and one.over().parts == 0
    assert HoldRoom(RESERVATION) in one.done and FreeRoom(RESERVATION) in one.done


@pytest.mark.parametrize("ranks", [(LentRank(0, "s"),), (LentRank(0, "s", 0, 1, "mla"),)])
def test_ranks_that_are_not_all_served_are_a_mismatch(ranks: tuple[LentRank, ...]) -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), ranks=2)
    one.answer(Lent(TICKET, ranks))
    assert one.over().end is BringEnd.MISMATCH
    assert TellPeer(FIRST, ReturnLend(TICKET, FIRST.unit)) in one.done


@pytest.mark.parametrize(
    "said",
    [
        published(b"b"),
        published(b"a", 1, 3),
        published(b"a", ranks=2),
        PublishedPiece(FramePiece(b"a", 0, 1, 1, 2), (b"",)),
        PublishedPiece(FramePiece(b"a", 0, 2, 0, 1, 0, 1), (b"",)),
    ],
)
def test_pieces_that_nobody_asked_for_end_the_bring(said: PublishedPiece) -> None:
    one = OneTarget()
    one.want((wanted(b"a"),))
    one.answer(Lent(TICKET, RANKS))
    one.answer(Grown(0, (said,), True))
    assert one.over().end is BringEnd.MISMATCH
    assert one.tell(RoomReserved(1, 0, RESERVATION)) == [
        HoldRoom(RESERVATION),
        FreeRoom(RESERVATION),
    ]


def test_a_piece_that_is_told_twice_ends_the_bring() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),))
    one.answer(Lent(TICKET, RANKS))
    one.answer(Grown(0, (published(b"a"), published(b"a", 1, 2)), True))
    assert one.over().end is BringEnd.MISMATCH


def test_reads_that_the_peer_did_not_see_wait_for_a_ticket_that_stood_after_them() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), roads=(READV,))
    one.answer(Lent(TICKET, RANKS))
    one.answer(Grown(0, (published(b"a"),), False))
    held = one.one(AskPeer)
    one.tell(RoomReserved(1, 0, RESERVATION))
    one.land(one.one(StartRead))
    assert not one.of(CommitRoom)
    confirm = one.one(AskPeer)
    assert isinstance(confirm.message, More) and confirm.message.wait_ms == 0
    assert confirm.question != held.question
    one.answer(Grown(1, (), False))
    assert one.of(CommitRoom)


def test_a_ticket_that_stood_before_an_unseen_read_says_nothing_of_it() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), roads=(READV, TCP))
    one.answer(Lent(TICKET, RANKS))
    one.answer(Grown(0, (published(b"a", 0, 1), published(b"a", 1, 2)), False))
    held = one.one(AskPeer)
    one.tell(RoomReserved(1, 0, RESERVATION))
    first, second = one.of(StartRead)
    one.land(first)
    one.tell(PeerAnswered(held.question, Grown(2, (), False)))
    one.tell(ReadEnded(ReadFailed(second.number, ReadFailure.UNABLE)))
    assert one.one(StartRead).road == "tcp"
    one.land(one.one(StartRead))
    assert not one.of(CommitRoom), "the first read was after that question"
    one.answer(Grown(2, (), False))
    assert one.of(CommitRoom)


def test_a_ticket_that_is_over_by_then_brings_nothing() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), roads=(READV,))
    one.open(published(b"a"))
    one.land(one.one(StartRead))
    one.answer(LendGone())
    assert one.over().end is BringEnd.GONE
    assert FreeRoom(RESERVATION) in one.done


def test_a_room_is_held_until_its_last_reader_has_stopped() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),))
    one.open(published(b"a", 0, 1), published(b"a", 1, 2))
    first, second = one.of(StartRead)
    one.now = 1.0
    one.tell(BringUnwanted(1))
    assert one.over().end is BringEnd.UNWANTED, "nobody waits for the reader"
    assert one.of(CancelRead) == [CancelRead(first.number), CancelRead(second.number)]
    assert HoldRoom(RESERVATION) in one.done and not one.of(FreeRoom)
    one.now = 3.0
    assert one.target.counts(one.now)["held_s"] == 2.0
    one.tell(ReadEnded(ReadFailed(first.number, ReadFailure.CANCELLED)))
    assert not one.done
    assert one.land(second) == [FreeRoom(RESERVATION)], "which came too late"


def test_who_is_not_fenced_writes_into_an_arena_and_its_end_is_waited_for() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), roads=(RDMA,))
    one.open(published(b"a", 0, 1), published(b"a", 1, 2))
    first, second = one.of(StartRead)
    assert first.goal is second.goal is ReadGoal.ARENA
    one.tell(ReadEnded(ReadUnproven(first.number, ReadFailure.LATE)))
    again = one.one(StartRead)
    one.tell(ReadEnded(ReadUnproven(again.number, ReadFailure.LATE)))
    assert one.over().end is BringEnd.FAILED and one.over().failures == {ReadFailure.LATE: 2}
    assert FreeRoom(RESERVATION) in one.done, "no device writes there"
    assert not one.of(FreeArena)
    assert one.tell(ReadEnded(ReadQuiet(first.number))) == [FreeArena(first.number)]
    assert one.tell(ReadEnded(ReadQuiet(first.number))) == []
    assert one.land(second) == [FreeArena(second.number)]
    assert one.target.counts(one.now)["unproven"] == 1


def test_what_is_copied_from_an_arena_is_written_by_us() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), roads=(RDMA,))
    one.open(published(b"a"))
    read = one.one(StartRead)
    assert one.land(read) == [CopyFromArena(read.number, RESERVATION)]
    one.tell(BringUnwanted(1))
    assert not one.of(FreeRoom)
    done = one.tell(ArenaCopied(read.number))
    assert done == [FreeArena(read.number), FreeRoom(RESERVATION)]


def test_a_road_that_is_closed_is_left_for_the_next_one() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), roads=(READV, TCP))
    one.open(published(b"a"))
    read = one.one(StartRead)
    one.tell(ReadEnded(ReadFailed(read.number, ReadFailure.UNABLE)))
    assert one.one(StartRead).road == "tcp"
    one.tell(ReadEnded(ReadFailed(one.one(StartRead).number, ReadFailure.UNABLE)))
    assert one.over().end is BringEnd.UNABLE


@pytest.mark.parametrize("reason", [ReadFailure.LATE, ReadFailure.PEER_LOST])
def test_a_road_whose_writer_may_write_on_is_left_for_the_next_one(reason: ReadFailure) -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), roads=(RDMA, TCP))
    one.open(published(b"a"))
    read = one.one(StartRead)
    assert read.road == "rdma"
    one.tell(ReadEnded(ReadUnproven(read.number, reason)))
    again = one.one(StartRead)
    assert again.road == "tcp" and again.goal is ReadGoal.BLOCKS
    one.land(again)
    assert one.of(CommitRoom), "nothing of it is written by the other road"


def test_a_piece_is_tried_so_often() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),))
    one.open(published(b"a"))
    one.tell(ReadEnded(ReadFailed(one.one(StartRead).number, ReadFailure.CORRUPT)))
    one.tell(ReadEnded(ReadFailed(one.one(StartRead).number, ReadFailure.CORRUPT)))
    assert one.over().end is BringEnd.FAILED
    assert one.over().failures == {ReadFailure.CORRUPT: 2}


def test_reads_have_credit() -> None:
    one = OneTarget()
    one.want((wanted(b"a", units=50),))
    one.open(*(published(b"a", unit, unit + 1) for unit in range(50)))
    reads = one.of(StartRead)
    assert len(reads) == READS_MAX
    one.land(reads[0])
    assert len(one.of(StartRead)) == 1


def test_a_large_read_goes_alone() -> None:
    one = OneTarget()
    one.want((wanted(b"a", size=200 << 20),))
    one.open(published(b"a", 0, 1), published(b"a", 1, 2))
    one.land(one.one(StartRead))
    one.land(one.one(StartRead))
    assert one.of(CommitRoom)


@pytest.mark.parametrize(("compute_s", "waited_s"), [(1.0, 0.5), (4.0, 2.0), (600.0, 5.0)])
def test_a_lend_is_waited_for_as_long_as_it_may_spare(compute_s: float, waited_s: float) -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), compute_s=compute_s)
    one.wait(waited_s - 0.01)
    assert SECOND not in [asked.peer for asked in one.of(AskPeer)]
    one.wait(0.02)
    assert SECOND in [asked.peer for asked in one.of(AskPeer)]


def test_who_does_not_answer_in_time_is_called_off_and_the_next_one_asked() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), compute_s=1.0)
    one.wait(LEND_S)
    first, again, second = one.of(AskPeer)
    assert first.question == again.question and first.peer == FIRST
    assert TellPeer(FIRST, Cancel(Nonce(5))) in one.done and second.peer == SECOND
    one.wait(LEND_S)
    assert one.over().end is BringEnd.SLOW, "by now it would have been computed"
    one.want((wanted(b"a"),), compute_s=1.0, number=2)
    assert one.over().end is BringEnd.NO_PEER, "neither is asked again so soon"
    one.wait(1.0)
    one.want((wanted(b"a"),), compute_s=1.0, number=3)
    assert one.one(AskPeer).peer == FIRST


def test_a_refusal_and_a_lost_question_lead_to_the_next_peer() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),))
    one.tell(QuestionLost(one.one(AskPeer).question))
    assert one.one(AskPeer).peer == SECOND
    one.answer(LendRefused(LendRefusal.NOT_HELD))
    assert one.over().end is BringEnd.REFUSED


def test_a_peer_whose_life_is_over_is_not_waited_for() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),))
    one.open(published(b"a"))
    one.tell(PeerReplaced(FIRST.unit))
    assert one.over().end is BringEnd.GONE
    assert one.tell(PeerReplaced(RoutingUnit(WorkerId("x"), 0, Incarnation(1)))) == []


def test_a_silent_peer_is_waited_for_two_seconds() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),))
    one.answer(Lent(TICKET, RANKS))
    assert one.one(AskPeer).message == More(TICKET, FIRST.unit, 0, 1000)
    one.wait(SILENT_S - 0.1)
    assert not one.of(BringOver) and one.of(AskPeer), "it is asked again"
    one.wait(0.2)
    assert one.over().end is BringEnd.SILENT


def test_a_bring_ends_when_computing_would_be_faster() -> None:
    one = OneTarget()
    one.want((wanted(b"a", units=10, size=1000),), compute_s=1.0)
    one.open(*(published(b"a", unit, unit + 1) for unit in range(10)))
    reads = one.of(StartRead)
    for read in reads[:4]:
        one.now += 0.05
        one.land(read)
    one.wait(0.15)
    assert not one.of(BringOver), "0.35 s for 4 of 10"
    one.wait(0.1)
    assert one.over().end is BringEnd.SLOW


def test_a_piece_that_could_not_be_cut_small_is_not_judged_before_it_lands() -> None:
    one = OneTarget()
    size = 4 * PIECE_BYTES
    one.want((wanted(b"a", units=2, size=size),), compute_s=1.0)
    one.open(published(b"a", 0, 1), published(b"a", 1, 2))
    first, second = one.of(StartRead)
    one.wait(0.45)
    one.land(first)
    one.wait(0.45)
    assert not one.of(BringOver), "half of it in 0.45 s: all of it in 0.9"
    one.wait(0.15)
    assert one.over().end is BringEnd.SLOW
    assert CancelRead(second.number) in one.done


def test_a_peer_that_has_less_ends_the_bring_at_once() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), (wanted(b"b"),))
    one.open(published(b"a"), published(b"b", 0, 1))
    one.land(one.one(StartRead))
    one.tell(RoomCommitted(RESERVATION))
    one.tell(RoomReserved(1, 1, 71))
    assert (one.over().end, one.over().parts) == (BringEnd.SHORT, 1)


def test_who_has_no_room_ends_the_bring() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),))
    one.answer(Lent(TICKET, RANKS))
    one.tell(RoomRefused(1, 0))
    assert one.over().end is BringEnd.NO_ROOM
    assert TellPeer(FIRST, ReturnLend(TICKET, FIRST.unit)) in one.done
    assert not any(one.target.counts(one.now).values())


def test_what_the_cache_is_taking_is_not_taken_back() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),), (wanted(b"b"),))
    one.open(published(b"a"), published(b"b"))
    one.land(one.one(StartRead))
    assert one.tell(BringUnwanted(1)) == []
    one.tell(RoomCommitted(RESERVATION))
    assert (one.over().end, one.over().parts) == (BringEnd.UNWANTED, 1)


def test_late_and_doubled_words_change_nothing() -> None:
    one = OneTarget()
    one.want((wanted(b"a"),))
    lend = one.one(AskPeer)
    one.open(published(b"a"))
    read = one.one(StartRead)
    one.tell(QuestionLost(lend.question))
    assert not one.done
    one.land(read)
    assert one.land(read) == []
    assert one.tell(ReadEnded(ReadLanded(99, 1))) == []


def test_a_question_that_is_asked_again_is_waited_for_again() -> None:
    """A frozen peer's memory can be read by its address: bytes come, and no answer does."""
    one = OneTarget()
    one.want((wanted(b"a", units=40),), roads=(READV,))
    one.answer(Lent(TICKET, RANKS))
    said = tuple(published(b"a", unit, unit + 1) for unit in range(40))
    one.answer(Grown(0, said, False))
    one.tell(RoomReserved(1, 0, RESERVATION))
    for read in one.of(StartRead)[:6]:
        asked = [effect for effect in one.wait(1.0) if isinstance(effect, AskPeer)]
        assert all(effect.until_s > one.now for effect in asked)
        one.land(read)
    one.wait(SILENT_S)
    assert one.over().end is BringEnd.SILENT
