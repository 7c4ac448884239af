"""One target and whatever may happen to it, in any order, drawn and shrunk by Hypothesis: slots
that somebody writes are nobody else's, each bring is told its end once, and nothing is left."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ownerserve.transfer.control.events import (
    ArenaCopied,
    AskPeer,
    BringOver,
    BringUnwanted,
    CommitRoom,
    CopyFromArena,
    FreeArena,
    FreeRoom,
    HoldRoom,
    PeerAnswered,
    QuestionLost,
    ReadEnded,
    ReadGoal,
    ReserveRoom,
    RoomCommitted,
    RoomRefused,
    RoomReserved,
    StartRead,
    TargetEvent,
    WakeUp,
)
from ownerserve.transfer.control.messages import Grown, Lend, LendGone, Lent, More
from ownerserve.transfer.vocabulary import (
    ReadFailed,
    ReadFailure,
    ReadLanded,
    ReadQuiet,
    ReadUnproven,
    Road,
)
from tests.support.examples import examples
from tests.support.transfer_control.one_target import (
    RANKS,
    RDMA,
    READV,
    TCP,
    OneTarget,
    bring_of,
    published,
    wanted,
)

UNITS = 2
KEPT = 3
"""Of questions that were asked so long ago no answer comes any more."""
FAILURES = st.sampled_from(list(ReadFailure))


class TargetMachine(RuleBasedStateMachine):
    """Keeps what its runtime would: rooms, reads, what is being written."""

    def __init__(self) -> None:
        super().__init__()
        self.one = OneTarget()
        self.numbers = 0
        self.open: set[int] = set()  # brings
        self.asked: dict[int, AskPeer] = {}
        self.reserving: list[ReserveRoom] = []
        self.rooms: set[int] = set()
        self.held: set[int] = set()
        self.committing: list[int] = []
        self.reads: dict[int, StartRead] = {}  # that have not ended, or may write on
        self.unproven: set[int] = set()
        self.copying: dict[int, int] = {}
        self.arenas: set[int] = set()

    def tell(self, event: TargetEvent) -> None:
        for effect in self.one.tell(event):
            match effect:
                case AskPeer(question):
                    self.asked[question] = effect
                    self.asked.pop(question - KEPT, None)
                case ReserveRoom():
                    self.reserving.append(effect)
                case StartRead(number):
                    assert effect.reservation in self.rooms - self.held
                    self.reads[number] = effect
                    if effect.goal is ReadGoal.ARENA:
                        self.arenas.add(number)
                    else:
                        assert effect.road != "rdma"
                case CopyFromArena(number, reservation):
                    assert number in self.arenas and reservation in self.rooms - self.held
                    self.copying[number] = reservation
                case FreeArena(number):
                    assert number not in self.reads and number not in self.copying
                    self.arenas.remove(number)
                case CommitRoom(reservation):
                    assert reservation not in self.held and not self.writers(reservation)
                    self.committing.append(reservation)
                case HoldRoom(reservation):
                    assert reservation in self.rooms - self.held
                    assert reservation not in self.committing
                    self.held.add(reservation)
                case FreeRoom(reservation):
                    assert not self.writers(reservation), "freed while somebody writes"
                    self.held.remove(reservation)
                    self.rooms.remove(reservation)
                case BringOver(number):
                    self.open.remove(number)

    def writers(self, reservation: int) -> list[int]:
        into = [
            number
            for number, read in self.reads.items()
            if read.reservation == reservation and read.goal is ReadGoal.BLOCKS
        ]
        return into + [number for number, room in self.copying.items() if room == reservation]

    @rule(
        roads=st.permutations([TCP, READV, RDMA]),
        compute_s=st.sampled_from([0.5, 50.0]),
        parts=st.integers(1, 3),
    )
    def want(self, roads: list[Road], compute_s: float, parts: int) -> None:
        self.numbers += 1
        self.open.add(self.numbers)
        artifacts = [(wanted(b"%d" % part, UNITS),) for part in range(parts)]
        self.tell(bring_of(artifacts, roads, compute_s=compute_s, number=self.numbers))

    @precondition(lambda self: self.asked)
    @rule(
        data=st.data(),
        is_final=st.sampled_from([False, False, True]),
        count=st.integers(0, 3 * UNITS),
    )
    def answer(self, data: st.DataObject, is_final: bool, count: int) -> None:
        """A peer answers, perhaps again, perhaps what it was asked long ago."""
        question = data.draw(st.sampled_from(sorted(self.asked, reverse=True)))
        message = self.asked[question].message
        if isinstance(message, Lend):
            ticket = len(message.wanted) * UNITS  # so many there are to come
            self.tell(PeerAnswered(question, Lent(ticket, RANKS)))
        elif isinstance(message, More):
            units = range(message.have, min(message.have + count, message.ticket))
            pieces = [(b"%d" % (unit // UNITS), unit % UNITS) for unit in units]
            said = tuple(published(name, unit, unit + 1) for name, unit in pieces)
            self.tell(PeerAnswered(question, Grown(message.have, said, is_final)))

    @precondition(lambda self: self.asked)
    @rule(how=st.sampled_from(["lost", "gone", "", "", ""]))
    def go_wrong(self, how: str) -> None:
        question = max(self.asked)
        if how:
            self.tell(
                QuestionLost(question) if how == "lost" else PeerAnswered(question, LendGone())
            )

    @precondition(lambda self: self.reserving)
    @rule(has_room=st.sampled_from([True, True, True, False]))
    def reserve(self, has_room: bool) -> None:
        asked = self.reserving.pop(0)
        if not has_room:
            self.tell(RoomRefused(asked.number, asked.part))
            return
        self.numbers += 1
        self.rooms.add(self.numbers)
        self.tell(RoomReserved(asked.number, asked.part, self.numbers))

    @precondition(lambda self: self.reads.keys() - self.unproven)
    @rule(data=st.data(), reason=FAILURES, lands=st.sampled_from([True, True, True, False]))
    def end_read(self, data: st.DataObject, reason: ReadFailure, lands: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.reads.keys() - self.unproven)))
        if not lands and self.reads[number].goal is ReadGoal.ARENA:
            self.unproven.add(number)
            self.tell(ReadEnded(ReadUnproven(number, reason)))
            return
        del self.reads[number]
        end = ReadLanded(number, 25) if lands else ReadFailed(number, reason)
        self.tell(ReadEnded(end))

    @precondition(lambda self: self.unproven)
    @rule()
    def fall_quiet(self) -> None:
        number = min(self.unproven)
        self.unproven.remove(number)
        del self.reads[number]
        self.tell(ReadEnded(ReadQuiet(number)))

    @precondition(lambda self: self.copying)
    @rule()
    def copy(self) -> None:
        number = min(self.copying)
        del self.copying[number]
        self.tell(ArenaCopied(number))

    @precondition(lambda self: self.committing)
    @rule()
    def commit(self) -> None:
        reservation = self.committing.pop(0)
        self.rooms.remove(reservation)
        self.tell(RoomCommitted(reservation))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def call_off(self, data: st.DataObject) -> None:
        if data.draw(st.booleans()):
            self.tell(BringUnwanted(data.draw(st.sampled_from(sorted(self.open)))))

    @rule(seconds=st.sampled_from([0.01, 0.01, 0.01, 0.3, 3.0]))
    def wait(self, seconds: float) -> None:
        until = self.one.now + seconds
        while self.one.target.next_deadline() <= until:
            self.one.now = max(self.one.now, self.one.target.next_deadline())
            self.tell(WakeUp())
        self.one.now = until

    @invariant()
    def agrees(self) -> None:
        counts = self.one.target.counts(self.one.now)
        assert counts["brings"] == len(self.open) and counts["held"] == len(self.held)
        assert counts["rooms"] == len(self.rooms) + len(self.reserving)

    def teardown(self) -> None:
        """Everything that was begun ends: then all is over, and nothing is left."""
        while self.reserving or self.reads or self.copying or self.committing or self.open:
            while self.reserving:
                self.reserve(True)
            while self.unproven:
                self.fall_quiet()
            for number in sorted(self.reads):
                del self.reads[number]
                self.tell(ReadEnded(ReadFailed(number, ReadFailure.CANCELLED)))
            while self.copying:
                self.copy()
            while self.committing:
                self.commit()
            self.wait(3.0)
        assert not any(self.one.target.counts(self.one.now).values())
        assert not self.rooms and not self.arenas


TargetMachine.TestCase.settings = settings(
    max_examples=examples(25),
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestTargetMachine = TargetMachine.TestCase
