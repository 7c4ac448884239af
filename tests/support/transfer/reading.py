"""The reading side of a test: goals full of poison, a mover, and what came of its reads."""

from __future__ import annotations

import ctypes
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ownerserve.transfer.movers.arena import ArenaBook, Slot, StagingMemory
from ownerserve.transfer.movers.digests import Digests, Xxh3
from ownerserve.transfer.movers.port import Mover
from ownerserve.transfer.vocabulary import (
    Ended,
    FramePiece,
    Read,
    ReadLanded,
    ReadQuiet,
    Runs,
)
from tests.support.transfer.lending import LendingProcess, contents
from tests.support.transfer.roads import Opening, RoadUnderTest
from tests.support.waits import WAIT_S

POISON = 0xA5
"""What goals are full of when nobody may write there."""
LONG_S = 3600.0
"""A deadline that no test reaches."""


def runs_of(pairs: Sequence[tuple[int, int]]) -> Runs:
    """Runs of (address, bytes)."""
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return Runs(table[:, 0].copy(), table[:, 1].copy())


def slices(total: int, length: int) -> list[tuple[int, int]]:
    """[0, total) in pieces of `length`, the last one shorter: (offset, bytes)."""
    return [(at, min(length, total - at)) for at in range(0, total, length)]


class Goals:
    """Memory for goals, poisoned. An ArenaBook says which part is whose."""

    def __init__(self, size: int) -> None:
        self.memory = StagingMemory(size)
        base = int(self.memory.runs(Slot(0, 0, size)).addresses[0])
        self.bytes: NDArray[np.uint8] = np.frombuffer(
            (ctypes.c_ubyte * size).from_address(base), np.uint8
        )
        self.bytes[:] = POISON
        self.book = ArenaBook(size)

    def runs(self, slot: Slot, cuts: Sequence[tuple[int, int]]) -> Runs:
        """The runs of a read whose goal is cut so, inside the slot: (offset, bytes)."""
        base = int(self.bytes.ctypes.data) + slot.offset
        return runs_of([(base + offset, length) for offset, length in cuts])

    def held(self, slot: Slot, cuts: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
        """A copy of what those runs hold, in their order."""
        return np.concatenate(
            [
                np.zeros(0, np.uint8),
                *(self.bytes[slot.offset + at : slot.offset + at + n] for at, n in cuts),
            ]
        )

    def all_of(self, slot: Slot) -> NDArray[np.uint8]:
        """A view of the slot."""
        return self.bytes[slot.offset : slot.offset + slot.bytes]

    def poison(self, slot: Slot) -> None:
        self.all_of(slot)[:] = POISON

    def is_poisoned(self, slot: Slot) -> bool:
        return bool((self.all_of(slot) == POISON).all())

    def late_beside(self, slots: Sequence[Slot]) -> int:
        """How many bytes are not poisoned beside those slots."""
        late = self.bytes != POISON
        for slot in slots:
            late[slot.offset : slot.offset + slot.bytes] = False
        return int(late.sum())


class Begun(NamedTuple):
    """A read that was started: what it should bring, and where."""

    number: int
    ticket: int
    seed: int
    slot: Slot
    cuts: list[tuple[int, int]]


class Reader:
    """A reader of one lending process, by one mover."""

    def __init__(
        self,
        road: RoadUnderTest,
        lending: LendingProcess,
        *,
        goals: Goals,
        digests: Digests | None = None,
    ) -> None:
        opened = lending.opened
        opening = Opening(opened.name, opened.shared, opened.road)
        self.lending = lending
        self.goals = goals
        self.mover: Mover = road.open(opening, digests or Xxh3(), arena=goals.memory)
        self.ends: dict[int, Ended] = {}
        self.quiet: set[int] = set()
        self._next = 0
        self._closed = False

    @property
    def last_number(self) -> int:
        """The highest number given to a read."""
        return self._next

    def skip_to(self, number: int) -> None:
        """Give no number to a read that is not above this one."""
        self._next = number

    def read(
        self,
        runs: Sequence[tuple[int, int]],
        *,
        cuts: Sequence[tuple[int, int]] | None = None,
        for_s: float = LONG_S,
    ) -> Begun:
        """Lend a piece of those runs of the pool, and start to read it; its goal is cut as `cuts`
        say, or is one run."""
        begun, read = self.prepare(runs, cuts=cuts, for_s=for_s)
        self.mover.start(read)
        return begun

    def prepare(
        self,
        runs: Sequence[tuple[int, int]],
        *,
        cuts: Sequence[tuple[int, int]] | None = None,
        for_s: float = LONG_S,
        key: bytes | None = None,
    ) -> tuple[Begun, Read]:
        """Lend a piece, and say how it would be read."""
        self._next += 1
        ticket, piece, lent = self.lending.lend(runs, seed=self._next, key=key)
        total = sum(length for _, length in runs)
        return self.of(piece, ticket, source=runs_of(lent.runs), digest=lent.digest,
                       seed=self._next, cuts=list(cuts or [(0, total)]), for_s=for_s)  # fmt: skip

    def of(
        self,
        piece: FramePiece,
        ticket: int,
        *,
        source: Runs,
        digest: bytes,
        seed: int,
        cuts: list[tuple[int, int]],
        for_s: float,
    ) -> tuple[Begun, Read]:
        """How that piece would be read, into a slot of its own that is full of poison."""
        self._next += 1
        number = self._next
        slot = self.goals.book.reserve(number, max((at + n for at, n in cuts), default=0))
        assert isinstance(slot, Slot), "the test's goals are too small"
        assert self.goals.is_poisoned(slot), "late bytes"
        begun = Begun(number, ticket, seed, slot, cuts)
        goal = self.goals.runs(slot, cuts)
        deadline_s = time.monotonic() + for_s
        return begun, Read(number, ticket, piece, goal, source, digest, deadline_s)

    def end_of(self, number: int) -> Ended:
        """Wait for the end of a read; each is told once."""
        self.look(lambda: number in self.ends)
        return self.ends[number]

    def quiet_of(self, number: int) -> None:
        """Wait until the writer of a read that ended unproven has stopped."""
        self.look(lambda: number in self.quiet)

    def look(self, holds: Callable[[], bool]) -> None:
        """Take in what the mover tells until `holds()`."""
        until_s = time.monotonic() + WAIT_S
        self._take()
        while not holds():
            left_s = until_s - time.monotonic()
            assert left_s > 0 and not self._closed, "no end came"
            ready, _, _ = select.select([self.mover.fileno()], [], [], left_s)
            if ready:
                self._take()

    def _take(self) -> None:
        for end in self.mover.ended():
            if isinstance(end, ReadQuiet):
                assert end.number not in self.quiet
                self.quiet.add(end.number)
            else:
                assert end.number not in self.ends, "an end was told twice"
                self.ends[end.number] = end

    def counts(self, begun: Begun, *, signed: bool) -> bool:
        """Whether the read counts: it landed, and its ticket stood after that."""
        landed = isinstance(self.ends[begun.number], ReadLanded)
        return landed and (signed or self.lending.stands(begun.ticket))

    def is_right(self, begun: Begun) -> bool:
        """Whether the goal holds what was lent."""
        held = self.goals.held(begun.slot, begun.cuts)
        return bool(np.array_equal(held, contents(begun.seed, len(held))))

    def wait_for_first_bytes(self, begun: Begun) -> None:
        """Wait until the read has begun to write, or is over."""
        first = self.goals.all_of(begun.slot)[:4096]
        until_s = time.monotonic() + WAIT_S
        while bool((first == POISON).all()) and begun.number not in self.ends:
            self._take()
            assert time.monotonic() < until_s

    def close(self) -> None:
        """Close the mover; takes in what it still tells."""
        self.mover.close()
        self._take()
        self._closed = True


def the_end_of(mover: Mover) -> Ended:
    """Wait for the end of a mover's only read."""
    ready, _, _ = select.select([mover.fileno()], [], [], WAIT_S)
    assert ready, "no end came"
    (end,) = mover.ended()
    return end


def open_files() -> int:
    """Count this process's descriptors."""
    return len(list(Path("/proc/self/fd").iterdir()))


def own_threads() -> set[int]:
    """The kernel's ids of this process's threads."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def python_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}
