"""A mover between simulated nodes, by address or signed: it copies a bit of a read at a time,
breaks now and then, and ends each read once."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ownerserve.node.transfers.memory import LenderPlaces
from ownerserve.transfer.movers.digests import Xxh3, digest_of
from ownerserve.transfer.vocabulary import (
    Ended,
    Read,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    Road,
    Runs,
)

if TYPE_CHECKING:
    from tests.support.node.schedules.node import SimNode

READV = Road("readv", is_fenced=True, is_signed=False)
TCP = Road("tcp", is_fenced=True, is_signed=True)
CHUNK_BYTES = 2048


class SimRoads:
    """What `NodeRoads` is; an address is a node's name."""

    arena = None

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.kinds = node.world.draw.choice(((READV, TCP), (TCP,), (READV,)))

    def open(self, road: str, address: str, memory: LenderPlaces | None) -> SimMover | None:
        if road == READV.name and memory is None:
            return None
        source = self._node.world.at(address.partition(":")[0])
        kind = READV if road == READV.name else TCP
        return None if source is None else SimMover(self._node, source, kind)


class SimMover:
    """A `Mover` from one life of a node."""

    def __init__(self, reader: SimNode, source: SimNode, road: Road) -> None:
        self.name, self.is_fenced, self.is_signed = road.name, True, road.is_signed
        self._reader, self._source = reader, source
        self._loop = reader.world.loop
        self._number = self._loop.number()
        self._ended: list[Ended] = []
        self._going: dict[int, Read] = {}

    def fileno(self) -> int:
        return self._number

    def start(self, read: Read) -> None:
        self._going[read.number] = read
        self._loop.call_at(read.deadline_s, self._fail, read, ReadFailure.LATE)
        self._later(read, 0, None)

    def cancel(self, number: int) -> None:
        if number in self._going:
            self._fail(self._going[number], ReadFailure.CANCELLED)

    def ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        for read in list(self._going.values()):
            self._fail(read, ReadFailure.CANCELLED)

    # -- one read ------------------------------------------------------------------------------

    def _later(self, read: Read, at: int, source: Runs | None) -> None:
        world = self._reader.world
        delay_s = 0.0005 if world.is_well else world.draw.choice((0.0, 0.001, 0.001, 0.02))
        self._loop.call_later(delay_s, self._copy, read, at, source)

    def _copy(self, read: Read, at: int, source: Runs | None) -> None:
        if read.number not in self._going:
            return
        world = self._reader.world
        if self._source.is_dead or (not world.is_well and world.draw.random() < world.breaking):
            self._fail(read, ReadFailure.PEER_LOST)
            return
        if self.is_signed and self._source.is_frozen:
            self._loop.call_later(0.05, self._copy, read, at, source)
            return
        if source is None:
            lending = self._source.lending
            source = lending.runs(read.ticket, read.piece) if self.is_signed else read.source
        if source is None:
            self._fail(read, ReadFailure.REFUSED)
            return
        end = min(at + CHUNK_BYTES, read.goal.bytes)
        for length, near, far in _stretches(read.goal, source, at, end):
            ctypes.memmove(near, far, length)
        if end < read.goal.bytes:
            self._later(read, end, source)
            return
        if self.is_signed and not self._source.stands(read.ticket):
            self._fail(read, ReadFailure.GONE)
        elif digest_of(read.goal, Xxh3()) != read.digest:
            world.counts["corrupt"] += 1
            self._fail(read, ReadFailure.CORRUPT)
        else:
            self._end(read, ReadLanded(read.number, read.goal.bytes))

    def _fail(self, read: Read, reason: ReadFailure) -> None:
        if read.number in self._going:
            self._end(read, ReadFailed(read.number, reason))

    def _end(self, read: Read, ended: Ended) -> None:
        del self._going[read.number]
        self._ended.append(ended)
        self._loop.ring(self._number)


def _stretches(near: Runs, far: Runs, at: int, end: int) -> list[tuple[int, int, int]]:
    """Bytes [at, end) of both: (length, near address, far address)."""
    cuts = np.unique([at, end, *near.lengths.cumsum(), *far.lengths.cumsum()])
    cuts = cuts[(cuts >= at) & (cuts <= end)]
    return [
        (int(high - low), _address(near, int(low)), _address(far, int(low)))
        for low, high in pairwise(cuts)
    ]


def _address(runs: Runs, at: int) -> int:
    ends = runs.lengths.cumsum()
    index = int(np.searchsorted(ends, at, side="right"))
    return int(runs.addresses[index] + at - (ends[index] - runs.lengths[index]))
