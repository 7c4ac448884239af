"""The staging arena: what is abandoned is counted, and used for nothing before it is quiet."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ownerserve.transfer.movers.arena import (
    ALIGN_BYTES,
    ArenaBook,
    ArenaFull,
    Slot,
    StagingMemory,
)
from ownerserve.transfer.movers.digests import RunsMemory


def test_an_abandoned_slot_is_used_again_only_when_it_is_quiet() -> None:
    book = ArenaBook(2 * ALIGN_BYTES)
    assert book.reserve(1, 100) == Slot(1, 0, 100)
    assert book.reserve(2, ALIGN_BYTES) == Slot(2, ALIGN_BYTES, ALIGN_BYTES)
    book.abandon(1, 10.0)
    assert book.reserve(3, 1) == ArenaFull(0, ALIGN_BYTES)
    with pytest.raises(KeyError):
        book.give_back(1)
    numbers = book.numbers(25.0)
    assert (numbers.abandoned_bytes, numbers.oldest_abandoned_s) == (ALIGN_BYTES, 15.0)
    book.quiet(1)
    assert book.reserve(3, 1) == Slot(3, 0, 1)
    numbers = book.numbers(30.0)
    assert (numbers.abandoned_total, numbers.abandoned_bytes) == (1, 0)
    assert numbers.oldest_abandoned_s == 0.0


def test_free_stretches_that_touch_are_one_again() -> None:
    book = ArenaBook(4 * ALIGN_BYTES)
    for number in range(4):
        book.reserve(number, ALIGN_BYTES)
    for number in (0, 2, 1):
        book.give_back(number)
    assert book.reserve(9, 3 * ALIGN_BYTES) == Slot(9, 0, 3 * ALIGN_BYTES)


def test_its_memory_is_registered_once_and_filled_by_slots() -> None:
    registered = []
    memory = StagingMemory(
        4 * ALIGN_BYTES, lambda address, size: registered.append((address, size))
    )
    runs = memory.runs(Slot(1, ALIGN_BYTES, 10))
    assert registered == [(int(runs.addresses[0]) - ALIGN_BYTES, 4 * ALIGN_BYTES)]
    RunsMemory(runs).at(int(runs.addresses[0]), 10)[:] = b"0123456789"
    assert runs.bytes == 10
    memory.close()


class Machine(RuleBasedStateMachine):
    """Slots against a plain table of who has which page."""

    PAGES = 7

    @initialize()
    def begin(self) -> None:
        self.book = ArenaBook(self.PAGES * ALIGN_BYTES)
        self.pages: list[int | None] = [None] * self.PAGES
        self.abandoned: dict[int, float] = {}
        self.now_s = 0.0
        self.next = 0

    def free(self, number: int) -> None:
        self.pages = [None if owner == number else owner for owner in self.pages]

    @rule(pages=st.integers(0, 4), short=st.integers(0, 100))
    def reserve(self, pages: int, short: int) -> None:
        self.next += 1
        size = max(0, pages * ALIGN_BYTES - short)
        need = max(1, -(-size // ALIGN_BYTES))
        slot = self.book.reserve(self.next, size)
        fits = [at for at in range(self.PAGES - need + 1)
                if all(owner is None for owner in self.pages[at : at + need])]  # fmt: skip
        if isinstance(slot, ArenaFull):
            assert not fits
            return
        at = slot.offset // ALIGN_BYTES
        assert at == fits[0]
        self.pages[at : at + need] = [self.next] * need

    @rule(number=st.integers(1, 12))
    def give_back(self, number: int) -> None:
        if number in self.abandoned or number not in self.pages:
            with pytest.raises(KeyError):
                self.book.give_back(number)
            return
        self.book.give_back(number)
        self.free(number)

    @rule(number=st.integers(1, 12), later_s=st.integers(0, 3))
    def abandon(self, number: int, later_s: int) -> None:
        self.now_s += later_s
        if number in self.abandoned or number not in self.pages:
            with pytest.raises(KeyError):
                self.book.abandon(number, self.now_s)
            return
        self.book.abandon(number, self.now_s)
        self.abandoned[number] = self.now_s

    @rule(number=st.integers(1, 12))
    def quiet(self, number: int) -> None:
        if number not in self.abandoned:
            with pytest.raises(KeyError):
                self.book.quiet(number)
            return
        self.book.quiet(number)
        del self.abandoned[number]
        self.free(number)

    @invariant()
    def sound(self) -> None:
        self.book.check()
        numbers = self.book.numbers(self.now_s)
        owners = [owner for owner in self.pages if owner is not None]
        abandoned = sum(owner in self.abandoned for owner in owners)
        assert numbers.abandoned_bytes == abandoned * ALIGN_BYTES
        assert numbers.reserved_bytes == (len(owners) - abandoned) * ALIGN_BYTES
        assert numbers.free_bytes == (self.PAGES - len(owners)) * ALIGN_BYTES
        oldest_s = max((self.now_s - at_s for at_s in self.abandoned.values()), default=0.0)
        assert numbers.oldest_abandoned_s == oldest_s


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=25)
