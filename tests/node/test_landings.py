"""What peers lend comes into memory that is bounded, and kept for who may still write there."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.node.transfers.landing import Landing
from ownerserve.node.transfers.landings import Landings, LandingsFull
from ownerserve.node.transfers.lenders import Lenders, no_engine
from ownerserve.node.transfers.memory import LenderPlaces
from ownerserve.node.transfers.opening import TransferPlace
from ownerserve.node.transfers.peers import Peers
from ownerserve.node.transfers.service import TransferService
from ownerserve.node.transfers.source_side import SourceSide
from ownerserve.node.transfers.target_side import TargetSide
from ownerserve.store.format.model import MissReason, ReadHit, ReadMiss
from ownerserve.transfer.control.events import WantedArtifact
from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.vocabulary import (
    Ended,
    FramePiece,
    Read,
    ReadFailed,
    ReadFailure,
    Road,
)
from tests.support.node.lending_nodes import (
    AGENT,
    LAYERS,
    PROMPT,
    SECTIONS,
    B,
    Node,
    cells,
    wanted,
)
from tests.support.waits import until

STUCK = Road("stuck", is_fenced=True, is_signed=True)
HERE = RoutingUnit(WorkerId("far"), 0, Incarnation(1))


@pytest.fixture
def near() -> Iterator[Node]:
    node = Node("near")
    node.turn(AGENT, PROMPT)
    yield node
    node.close()


class StuckMover:
    """A mover whose thread is in the kernel: no read ends before `ends`."""

    name, is_fenced, is_signed = STUCK.name, STUCK.is_fenced, STUCK.is_signed

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._ended: list[Ended] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK)

    def start(self, read: Read) -> None:
        self.begun.append(read.number)

    def cancel(self, number: int) -> None: ...

    def ends(self) -> None:
        self._ended = [ReadFailed(number, ReadFailure.CANCELLED) for number in self.begun]
        os.eventfd_write(self._event, 1)

    def ended(self) -> list[Ended]:
        told, self._ended = self._ended, []
        if told:
            os.eventfd_read(self._event)
        return told

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        os.close(self._event)


class StuckRoads:
    """One road, by which nothing comes."""

    kinds, arena = (STUCK,), None

    def __init__(self) -> None:
        self.mover = StuckMover()

    def open(self, road: str, address: str, memory: LenderPlaces | None) -> StuckMover:
        return self.mover


def test_what_is_given_up_amid_a_stuck_read_is_held_until_that_has_ended(near: Node) -> None:
    roads, landings = StuckRoads(), Landings(SECTIONS)

    def sides(loop: asyncio.AbstractEventLoop) -> tuple[SourceSide, TargetSide]:
        source = SourceSide(HERE, Lenders(None), no_engine, digests=Xxh3(), loop=loop)
        return source, TargetSide(HERE, landings, roads, key=None, loop=loop)

    service = TransferService(sides)
    peers = Peers(service, SECTIONS, B)
    service.start()
    try:
        prefix = wanted(near.address)
        wants = cells(prefix, peers.look(prefix))
        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(peers.read, wants)
            until(lambda: roads.mover.begun, what="a read is begun")
            assert landings.numbers(time.monotonic()).coming_bytes > 0
            peers.give_up(wants)
            read = reading.result(60)
        assert isinstance(read, ReadMiss) and read.reason is MissReason.CANCELLED
        until(lambda: landings.numbers(time.monotonic()).held_bytes, what="its memory is held")
        held = landings.numbers(time.monotonic())
        assert not held.coming_bytes
        older = landings.numbers(time.monotonic()).oldest_held_s
        assert older > held.oldest_held_s >= 0
        roads.mover.ends()
        until(lambda: not landings.numbers(time.monotonic()).held_bytes, what="it is let go of")
        assert landings.numbers(time.monotonic()).oldest_held_s == 0
    finally:
        service.stop()


def test_what_finds_no_room_is_not_brought_and_its_lend_is_returned(near: Node) -> None:
    size = sum(section.payload_bytes for section in SECTIONS.values())
    far = Node("far", place=TransferPlace(landing_bytes=size))
    try:
        prefix = wanted(near.address)
        wants = cells(prefix, far.transfers.peers.look(prefix))
        assert isinstance(far.transfers.peers.read(wants), ReadMiss)
        counts = far.transfers.counts()
        assert (counts.brings, counts.read_bytes) == ({"no_room": 1}, 0)
        until(lambda: near.transfers.counts().lends == {"returned": 1}, what="the lend's end")
        assert counts.landings.coming_bytes == counts.landings.held_bytes == 0
    finally:
        far.close()


def test_what_has_come_takes_of_what_comes_next_until_its_reader_has_let_go_of_it(
    near: Node,
) -> None:
    """Else parts that wait for their turn's room on the device would fill the host's memory."""
    size = 10 * SECTIONS["dense"].payload_bytes + SECTIONS["swa"].payload_bytes
    far = Node("far", place=TransferPlace(landing_bytes=size))
    try:
        peers, landings = far.transfers.peers, lambda: far.transfers.counts().landings
        prefix = wanted(near.address)
        wants = cells(prefix, peers.look(prefix))
        read = peers.read(wants)
        assert isinstance(read, ReadHit)
        assert (landings().coming_bytes, landings().landed_bytes) == (0, size)
        views = [part.data for part in read.parts]
        del read
        assert isinstance(peers.read(wants), ReadMiss), "the bytes are there"
        assert far.transfers.counts().brings == {"brought": 1, "no_room": 1}
        views.clear()
        until(lambda: landings().landed_bytes == 0, what="it is let go of")
        peers.look(prefix)
        assert isinstance(peers.read(wants), ReadHit)
    finally:
        far.close()


def test_memory_that_the_machine_has_not_is_no_room() -> None:
    whole = FramePiece(bytes(32), 0, 1 << 44, 0, LAYERS)
    part = (WantedArtifact("dense", whole, 1),)
    assert Landings(SECTIONS).reserve(1, part, into=None, now_s=0.0) == LandingsFull(0, 0)


def test_what_is_held_takes_of_what_comes_next() -> None:
    piece = FramePiece(bytes(32), 0, 1, 0, LAYERS)
    part = (WantedArtifact("dense", piece, SECTIONS["dense"].payload_bytes),)
    landings = Landings(SECTIONS, part[0].bytes)
    assert isinstance(landings.reserve(1, part, into=None, now_s=0.0), Landing)
    landings.hold(1, 1.0)
    full = LandingsFull(part[0].bytes, part[0].bytes)
    assert landings.reserve(2, part, into=None, now_s=2.0) == full
    landings.free(1)
    assert isinstance(landings.reserve(2, part, into=None, now_s=3.0), Landing)
