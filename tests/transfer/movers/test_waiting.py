"""The book of a mover's reads: each ends once, by its deadline, whatever else runs."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ownerserve.transfer.movers.waiting import GoOn, WaitingReads
from ownerserve.transfer.vocabulary import FramePiece, Read, ReadFailed, ReadFailure
from tests.support.transfer.reading import runs_of


def a_read(number: int, deadline_s: float = 100.0) -> Read:
    piece = FramePiece(bytes(32), 0, 1, 0, 1)
    return Read(number, 1, piece, runs_of([]), None, b"", deadline_s)


def test_reads_are_made_first_come_first_served() -> None:
    reads = WaitingReads()
    for number in (5, 3, 4):
        reads.start(a_read(number))
    taken = []
    while (read := reads.take()) is not None:
        taken.append(read.number)
        assert reads.verdict(0.0) == GoOn()
        reads.finished()
    assert taken == [5, 3, 4]


def test_one_that_runs_is_stopped_by_its_verdict() -> None:
    reads = WaitingReads()
    reads.start(a_read(1, deadline_s=7.0))
    reads.take()
    assert reads.cancel(1) == []
    assert reads.verdict(0.0) == ReadFailed(1, ReadFailure.CANCELLED)
    reads.finished()
    reads.start(a_read(2, deadline_s=7.0))
    reads.take()
    assert reads.verdict(6.9) == GoOn(), "the former read's cancel is not this one's"
    assert reads.verdict(7.0) == ReadFailed(2, ReadFailure.LATE)


def test_those_that_wait_are_late_while_another_runs() -> None:
    reads = WaitingReads()
    for number, deadline_s in ((1, 100.0), (2, 9.0), (3, 5.0), (4, 5.0)):
        reads.start(a_read(number, deadline_s))
    reads.take()
    assert reads.cancel(4) == [ReadFailed(4, ReadFailure.CANCELLED)]
    assert reads.expired(5.0) == [ReadFailed(3, ReadFailure.LATE)]
    assert reads.expired(5.0) == []
    assert reads.cancel_all() == [ReadFailed(2, ReadFailure.CANCELLED)]
    assert reads.verdict(5.0) == ReadFailed(1, ReadFailure.CANCELLED)


class Machine(RuleBasedStateMachine):
    """Reads that come, are cancelled, run and grow late, against a plain list of them."""

    @initialize()
    def begin(self) -> None:
        self.reads = WaitingReads()
        self.now_s = 0.0
        self.next = 0
        self.open: dict[int, float] = {}
        self.running: int | None = None

    def told(self, ends: list[ReadFailed]) -> None:
        for end in ends:
            assert end.number != self.running
            del self.open[end.number]  # once, and only what is open

    @rule(for_s=st.integers(0, 5))
    def start(self, for_s: int) -> None:
        self.next += 1
        self.open[self.next] = self.now_s + for_s
        self.reads.start(a_read(self.next, self.now_s + for_s))

    @rule(by_s=st.integers(0, 3))
    def time_passes(self, by_s: int) -> None:
        self.now_s += by_s
        self.told(self.reads.expired(self.now_s))
        late = {number for number, at_s in self.open.items() if at_s <= self.now_s}
        assert late <= {self.running}

    @rule(number=st.integers(0, 12))
    def cancel(self, number: int) -> None:
        self.told(self.reads.cancel(number))
        assert number not in self.open or number == self.running
        if number == self.running:
            assert self.reads.verdict(self.now_s) == ReadFailed(number, ReadFailure.CANCELLED)

    @precondition(lambda self: self.running is None)
    @rule()
    def take(self) -> None:
        read = self.reads.take()
        assert (read is None) == (not self.open)
        if read is not None:
            self.running = read.number
            assert read.number == min(self.open)

    @precondition(lambda self: self.running is not None)
    @rule()
    def finish(self) -> None:
        verdict = self.reads.verdict(self.now_s)
        assert self.running is not None
        if self.open[self.running] <= self.now_s:
            assert isinstance(verdict, ReadFailed)
        del self.open[self.running]
        self.running = None
        self.reads.finished()

    @invariant()
    def sound(self) -> None:
        if self.next:
            self.reads.check()
            assert len(self.reads) == len(self.open)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=25)
