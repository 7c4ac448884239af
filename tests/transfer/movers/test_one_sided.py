"""A one-sided mover stops between two chunks: its copier is the test's, and so is its clock."""

from __future__ import annotations

import logging
import select
from threading import Event

import numpy as np
import pytest

from ownerserve.kv.clock import ManualClock
from ownerserve.transfer.movers.cuts import Cuts
from ownerserve.transfer.movers.digests import Xxh3, digest_of
from ownerserve.transfer.movers.one_sided import TELL_S, ChunkCopied, OneSidedMover
from ownerserve.transfer.vocabulary import (
    Ended,
    FramePiece,
    Read,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    Runs,
)
from tests.support.transfer.reading import runs_of
from tests.support.waits import WAIT_S, until

CHUNK = 1000


class GatedCopier:
    """A copier of this process's own memory that waits at each chunk until the test lets it on."""

    def __init__(self, *, gated: bool = True) -> None:
        self.at_chunk, self.go_on = Event(), Event()
        self.copied = 0
        self.gated = gated
        self.ends_after = 1 << 30
        self.closed = False

    def locate(self, source: Runs) -> Runs | ReadFailure:
        return source

    def copy(self, cuts: Cuts, first: int, end: int, /) -> ChunkCopied | ReadFailure:
        if self.gated:
            self.at_chunk.set()
            assert self.go_on.wait(WAIT_S)
            self.go_on.clear()
        self.copied += 1
        return ChunkCopied()

    def lives(self) -> bool:
        return self.copied < self.ends_after

    def close(self) -> None:
        self.closed = True


class Scene:
    """A mover over a gated copier, and ten chunks that lie where they shall go."""

    def __init__(self, *, gated: bool = True) -> None:
        self.clock = ManualClock()
        self.copier = GatedCopier(gated=gated)
        self.mover = OneSidedMover(
            "test", self.copier, digests=Xxh3(), clock=self.clock, chunk_bytes=CHUNK
        )
        self.memory = np.arange(10 * CHUNK, dtype=np.uint8)
        self.runs = runs_of([(int(self.memory.ctypes.data), 10 * CHUNK)])
        self.ends: list[Ended] = []

    def start(self, number: int, *, deadline_s: float = 100.0) -> None:
        piece = FramePiece(bytes(32), 0, 1, 0, 1)
        digest = digest_of(self.runs, Xxh3())
        self.mover.start(Read(number, 1, piece, self.runs, self.runs, digest, deadline_s))

    def at_a_chunk(self) -> None:
        assert self.copier.at_chunk.wait(WAIT_S)
        self.copier.at_chunk.clear()

    def one_chunk(self) -> None:
        self.copier.go_on.set()

    def is_readable(self) -> bool:
        return bool(select.select([self.mover.fileno()], [], [], 0)[0])

    def until_ended(self, count: int) -> list[Ended]:
        def told() -> bool:
            self.ends += self.mover.ended()
            return len(self.ends) >= count

        until(told, what="the ends")
        return self.ends


def test_a_deadline_that_passes_amid_stops_the_read_after_its_chunk() -> None:
    scene = Scene()
    scene.start(1, deadline_s=5.0)
    scene.at_a_chunk()
    scene.clock.advance(5.0)
    assert scene.mover.ended() == [], "a chunk is being written: no end yet"
    scene.one_chunk()
    assert scene.until_ended(1) == [ReadFailed(1, ReadFailure.LATE)]
    scene.mover.close()
    assert scene.copier.copied == 1
    assert scene.copier.closed


def test_one_that_waits_is_late_while_another_is_copied() -> None:
    scene = Scene()
    scene.start(1)
    scene.start(2, deadline_s=5.0)
    scene.at_a_chunk()
    scene.clock.advance(5.0)
    scene.one_chunk()
    scene.at_a_chunk()
    assert scene.until_ended(1) == [ReadFailed(2, ReadFailure.LATE)]
    scene.mover.cancel(1)
    scene.one_chunk()
    scene.until_ended(2)
    scene.mover.close()


def test_a_cancel_amid_stops_the_read_after_its_chunk() -> None:
    scene = Scene()
    scene.start(1)
    scene.at_a_chunk()
    scene.mover.cancel(1)
    scene.one_chunk()
    assert scene.until_ended(1) == [ReadFailed(1, ReadFailure.CANCELLED)]
    scene.mover.close()
    assert scene.copier.copied == 1


def test_a_peer_that_ended_while_it_was_read_is_lost_though_all_bytes_came() -> None:
    scene = Scene(gated=False)
    scene.copier.ends_after = 10
    scene.start(1)
    assert scene.until_ended(1) == [ReadFailed(1, ReadFailure.PEER_LOST)]
    scene.mover.close()


def test_a_read_that_breaks_the_copier_ends_and_the_next_one_lands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(gated=False)
    scene.copier.locate = {}.__getitem__  # type: ignore[method-assign, assignment]
    with caplog.at_level(logging.CRITICAL, "ownerserve.transfer"):
        scene.start(1)
        assert scene.until_ended(1) == [ReadFailed(1, ReadFailure.UNABLE)]
    del scene.copier.locate
    scene.start(2)
    assert scene.until_ended(2)[1] == ReadLanded(2, 10 * CHUNK)
    scene.mover.close()


def test_what_landed_is_told_within_a_millisecond_while_more_is_under_way() -> None:
    scene = Scene()
    scene.start(1)
    scene.start(2)
    for _ in range(10):
        scene.at_a_chunk()
        scene.one_chunk()
    scene.at_a_chunk()  # the second one's first: the first one has landed
    assert not scene.is_readable()
    scene.clock.advance(TELL_S)
    scene.one_chunk()
    scene.at_a_chunk()
    assert scene.is_readable()
    assert scene.mover.ended() == [ReadLanded(1, 10 * CHUNK)]
    assert not scene.is_readable()
    for _ in range(8):
        scene.one_chunk()
        scene.at_a_chunk()
    scene.one_chunk()
    assert scene.until_ended(1) == [ReadLanded(2, 10 * CHUNK)]
    scene.mover.close()


def test_where_there_is_no_road_each_read_says_why_and_nothing_runs() -> None:
    mover = OneSidedMover("test", ReadFailure.UNABLE, digests=Xxh3())
    none = runs_of([])
    mover.start(Read(7, 1, FramePiece(bytes(32), 0, 1, 0, 1), none, none, b"", 1e9))
    assert mover.ended() == [ReadFailed(7, ReadFailure.UNABLE)]
    mover.close()
