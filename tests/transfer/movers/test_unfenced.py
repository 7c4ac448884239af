"""A mover over an engine that can't be fenced: what ends amid a batch is unproven, and quiet only
when the engine says that all of it landed. The engine is the test's.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator
from threading import Event

import numpy as np
import pytest

from ownerserve.kv.units import MIB
from ownerserve.transfer.movers.arena import ALIGN_BYTES, ArenaBook, Slot, StagingMemory
from ownerserve.transfer.movers.digests import Xxh3, digest_of
from ownerserve.transfer.movers.unfenced import (
    BATCH_BYTES,
    DESCRIPTORS_MAX,
    Batch,
    BatchState,
    BatchUnderWay,
    UnfencedMover,
)
from ownerserve.transfer.vocabulary import (
    Ended,
    FramePiece,
    Read,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    ReadQuiet,
    ReadUnproven,
    Runs,
)
from tests.support.transfer.reading import LONG_S, runs_of, slices
from tests.support.waits import WAIT_S, until

SOON_S = 0.05
AMID_S = 3.0
"""The deadline of a read that is late amid a batch: by then the engine has been called, on a busy
machine too.
"""


class Told:
    """A batch of the test's engine, which is in the state that the test says."""

    def __init__(self, batch: Batch, state: BatchState) -> None:
        self.batch, self.state = batch, state

    def look(self) -> BatchState:
        return self.state

    def land(self) -> None:
        for goal, source in zip(self.batch.goals, self.batch.sources, strict=True):
            ctypes.memmove(int(goal[0]), int(source[0]), int(goal[1]))
        self.state = BatchState.LANDED


class ToldEngine:
    """An engine that reads this process's memory: at once, or when the test says so."""

    def __init__(self) -> None:
        self.begun: list[Told] = []
        self.state = BatchState.LANDED
        self.refuses: ReadFailure | None = None
        self.raises: Exception | None = None
        self.go_on, self.is_called = Event(), Event()
        self.go_on.set()

    def begin(self, batch: Batch, /) -> BatchUnderWay | ReadFailure:
        self.is_called.set()
        assert self.go_on.wait(WAIT_S)
        if self.raises is not None:
            raise self.raises
        if self.refuses is not None:
            return self.refuses
        told = Told(batch, self.state)
        self.begun.append(told)
        if told.state is BatchState.LANDED:
            told.land()
        return told


class Scene:
    def __init__(self, size: int = MIB) -> None:
        self.engine = ToldEngine()
        self.arena = StagingMemory(4 * size)
        self.book = ArenaBook(4 * size)
        self.source = np.arange(size, dtype=np.uint64).view(np.uint8)[:size]
        self.mover = UnfencedMover("test", self.engine, arena=self.arena, digests=Xxh3())
        self.ends: list[Ended] = []
        self.numbers = 0

    def read(self, *, for_s: float = LONG_S, cuts: list[tuple[int, int]] | None = None) -> int:
        self.numbers += 1
        slot = self.book.reserve(self.numbers, len(self.source))
        assert isinstance(slot, Slot)
        return self.into(self.arena.runs(slot), for_s=for_s, cuts=cuts)

    def into(
        self, goal: Runs, *, for_s: float = LONG_S, cuts: list[tuple[int, int]] | None = None
    ) -> int:
        base = int(self.source.ctypes.data)
        runs = [(base + at, length) for at, length in cuts or [(0, len(self.source))]]
        piece, digest = FramePiece(bytes(32), 0, 1, 0, 1), digest_of(runs_of(runs), Xxh3())
        deadline_s = time.monotonic() + for_s
        self.mover.start(
            Read(self.numbers, 1, piece, goal, runs_of(runs), digest, deadline_s)
        )  # fmt: skip
        return self.numbers

    def until_told(self, count: int) -> list[Ended]:
        def told() -> bool:
            self.ends += self.mover.ended()
            return len(self.ends) >= count

        until(told, what="the ends")
        return self.ends


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.engine.go_on.set()
    scene.mover.close()


def test_a_read_that_is_late_amid_a_batch_is_unproven_and_quiet_when_it_landed(
    scene: Scene,
) -> None:
    scene.engine.state = BatchState.UNDER_WAY
    number = scene.read(for_s=AMID_S)
    assert scene.until_told(1) == [ReadUnproven(number, ReadFailure.LATE)]
    scene.engine.begun[0].land()
    assert scene.until_told(2)[1:] == [ReadQuiet(number)]


def test_one_that_is_cancelled_amid_is_unproven_and_the_next_one_goes_on(scene: Scene) -> None:
    scene.engine.state = BatchState.UNDER_WAY
    first = scene.read()
    until(lambda: bool(scene.engine.begun), what="a batch")
    scene.mover.cancel(first)
    assert scene.until_told(1) == [ReadUnproven(first, ReadFailure.CANCELLED)]
    scene.engine.state = BatchState.LANDED
    second = scene.read()
    assert scene.until_told(2)[1:] == [ReadLanded(second, MIB)]


def test_what_the_engine_says_has_failed_is_never_quiet(scene: Scene) -> None:
    scene.engine.state = BatchState.UNDER_WAY
    late = scene.read(for_s=AMID_S)
    scene.until_told(1)
    scene.engine.begun[0].state = BatchState.FAILED
    scene.engine.state = BatchState.FAILED
    failed = scene.read()
    assert scene.until_told(2)[1:] == [ReadUnproven(failed, ReadFailure.PEER_LOST)]
    scene.engine.state = BatchState.LANDED
    last = scene.read()
    assert scene.until_told(3)[2:] == [ReadLanded(last, MIB)]
    scene.mover.close()
    assert scene.mover.ended() == []
    assert late not in [end.number for end in scene.ends if isinstance(end, ReadQuiet)]


def test_a_goal_beside_the_arena_is_refused_before_the_engine_hears_of_it(scene: Scene) -> None:
    scene.engine.refuses = ReadFailure.REFUSED  # it writes nothing even if it is asked
    begin = int(scene.arena.runs(Slot(0, 0, 1)).addresses[0])
    end = begin + scene.arena.capacity_bytes
    for goal in ([(begin - 1, MIB)], [(end - MIB + 1, MIB)], [(begin, MIB - 1), (end, 1)]):
        scene.numbers += 1
        number = scene.into(runs_of(goal))
        assert scene.until_told(number)[-1:] == [ReadFailed(number, ReadFailure.UNABLE)]
    assert not scene.engine.is_called.is_set()


def test_a_call_that_does_not_return_holds_no_deadline_up(scene: Scene) -> None:
    scene.engine.go_on.clear()
    first = scene.read(for_s=AMID_S)
    until(scene.engine.is_called.is_set, what="the call")
    second = scene.read(for_s=SOON_S)
    assert set(scene.until_told(2)) == {
        ReadUnproven(first, ReadFailure.LATE),
        ReadFailed(second, ReadFailure.LATE),
    }
    third = scene.read(for_s=SOON_S)
    assert scene.until_told(3)[2:] == [ReadFailed(third, ReadFailure.LATE)], "it was not begun"
    scene.engine.go_on.set()
    assert scene.until_told(4)[3:] == [ReadQuiet(first)]
    scene.read()
    assert isinstance(scene.until_told(5)[4], ReadLanded)
    assert len(scene.engine.begun) == 2, "those between were not begun: who came behind them was"


def test_what_was_not_begun_has_failed_and_is_quiet_if_that_is_said_too_late(scene: Scene) -> None:
    scene.engine.refuses = ReadFailure.REFUSED
    first = scene.read()
    assert scene.until_told(1) == [ReadFailed(first, ReadFailure.REFUSED)]
    scene.engine.go_on.clear()
    second = scene.read(for_s=AMID_S)
    assert scene.until_told(2)[1:] == [ReadUnproven(second, ReadFailure.LATE)]
    scene.engine.go_on.set()
    assert scene.until_told(3)[2:] == [ReadQuiet(second)]


def test_whatever_the_engine_raises_may_have_begun(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.engine.raises = OSError("whatever")
    with caplog.at_level(logging.CRITICAL, "ownerserve.transfer"):
        number = scene.read()
        assert scene.until_told(1) == [ReadUnproven(number, ReadFailure.PEER_LOST)]


def test_bytes_that_do_not_match_their_digest_are_corrupt(scene: Scene) -> None:
    scene.engine.state = BatchState.UNDER_WAY
    number = scene.read()
    until(lambda: bool(scene.engine.begun), what="a batch")
    scene.source[7] ^= 1
    scene.engine.begun[0].land()
    assert scene.until_told(1) == [ReadFailed(number, ReadFailure.CORRUPT)]


def test_batches_are_of_so_many_descriptors_and_bytes() -> None:
    scene = Scene(BATCH_BYTES + ALIGN_BYTES)
    total = len(scene.source)
    one = scene.read()
    few = scene.read(cuts=slices(total, 16 * 1024))
    assert scene.until_told(2) == [ReadLanded(one, total), ReadLanded(few, total)]
    batches = [told.batch for told in scene.engine.begun]
    assert [int(batch.goals[:, 1].sum()) for batch in batches[:2]] == [BATCH_BYTES, ALIGN_BYTES]
    assert max(len(batch.goals) for batch in batches) == DESCRIPTORS_MAX
    scene.mover.close()


def test_a_mover_without_an_engine_says_why() -> None:
    scene = Scene()
    scene.mover.close()
    scene.mover = UnfencedMover("test", ReadFailure.UNABLE, arena=scene.arena, digests=Xxh3())
    number = scene.read()
    assert scene.until_told(1) == [ReadFailed(number, ReadFailure.UNABLE)]
    scene.mover.close()
