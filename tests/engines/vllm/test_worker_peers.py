"""The worker side brings what a peer was said to lend, over real ports and movers: the bytes that
the peer has, or a load that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest

from ownerserve.engines.vllm.worker_commands import BlockPlace, LoadInto, WorkerCommands
from ownerserve.engines.vllm.worker_side.streams import HostStream
from ownerserve.engines.vllm.worker_side.worker import WorkerSide
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.node.storage.backing import open_backing
from ownerserve.node.transfers.bringing import Bringing, BringNews
from ownerserve.node.transfers.opening import TransferPlace
from ownerserve.node.transfers.roads import SHM, TCP
from ownerserve.node.vocabulary.events import PeerRecord
from tests.support.node.lending_nodes import AGENT, PROMPT, SECTIONS, B, Node, cells, wanted
from tests.support.node.storing_node import StoringNode, put_away
from tests.support.waits import until

pytestmark = pytest.mark.engine

PLACE = BlockPlace("dense", ((1,),), 0, 32)
LONG_S = 300.0


class Pages:
    """A codec that notes what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def size(self, place: BlockPlace) -> int:
        return 1

    def cut(
        self, place: BlockPlace, data: memoryview, *, most_bytes: int
    ) -> Iterator[tuple[BlockPlace, memoryview]]:
        yield place, data

    def write(self, place: BlockPlace, data: memoryview) -> None:
        self.written.append(bytes(data))


@pytest.fixture
def near() -> Iterator[StoringNode]:
    node = StoringNode(None)
    yield node
    node.close()


@pytest.fixture
def far() -> Iterator[Node]:
    """The scheduler's process of the engine that brings: it asks peers what they hold."""
    node = Node("far")
    yield node
    node.close()


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def bringing() -> Bringing:
    unit = RoutingUnit(WorkerId("far's worker"), 0, Incarnation(1))
    place = TransferPlace(roads=(SHM.name, TCP.name))
    return Bringing(unit, SECTIONS, block_tokens=B, place=place)


@pytest.fixture
def worker(tmp_path: Path, pages: Pages, bringing: Bringing) -> Iterator[WorkerSide]:
    """The worker's process of the same engine, with a store of its own, in which nothing is."""
    codec: Any = pages
    side = WorkerSide(open_backing(tmp_path, 0), codec, HostStream(), readers=2)
    side.bring_by(bringing)
    yield side
    side.close()


def offered(near: Node | StoringNode, far: Node) -> tuple[LoadInto, list[PeerRecord]]:
    """A load of all that the peer was said to hold, and what that is."""
    prefix = wanted(near.address)
    wants = cells(prefix, frozenset(far.transfers.peers.look(prefix)))
    offers = far.transfers.peers.offered(wants)
    assert offers.keys() == {want.id for want in wants}
    assert not any(offer.prefix.digests for offer in offers.values()), "what only a look needs"
    load = LoadInto("r", 9, tuple(wants), (PLACE,) * len(wants), LONG_S, offers)
    return load, [prefix.records[want.id] for want in wants]


def reported(worker: WorkerSide) -> tuple[str, BringNews]:
    """How the load ended, and what is told with it."""
    until_s = time.monotonic() + LONG_S
    while time.monotonic() < until_s:
        worker.results(WorkerCommands(is_idle=True))
        report = worker.report()
        if report.loads:
            (brought,) = report.brought
            return report.loads[0].reason, brought
    raise AssertionError("a load waits for ever")


def ended(worker: WorkerSide) -> tuple[str, dict[str, int]]:
    """How the load of what a peer had to read first ended, and what was counted."""
    reason, brought = reported(worker)
    assert not brought.timings, "what its media took says nothing of the way"
    return reason, dict(brought.counts)


def test_what_a_peer_was_said_to_lend_is_read_from_there(
    near: StoringNode, far: Node, worker: WorkerSide, pages: Pages
) -> None:
    before = put_away(near)
    load, records = offered(near, far)
    size = sum(len(before[one]) for one in records)
    for _ in range(2):  # each is counted once
        pages.written.clear()
        worker.load(WorkerCommands(loads=(load,)))
        reason, counts = ended(worker)
        assert reason == ""
        assert pages.written == [before[one] for one in records]
        assert counts == {
            "ownerserve_brought:brought": 1,
            "ownerserve_brought_bytes:shm": size,
            "ownerserve_peer_read_bytes:": size,
        }


def test_what_a_peer_had_at_hand_says_how_long_the_way_is(far: Node, worker: WorkerSide) -> None:
    near = Node("near")
    try:
        near.turn(AGENT, PROMPT)
        load, _ = offered(near, far)
        worker.load(WorkerCommands(loads=(load,)))
        reason, brought = reported(worker)
    finally:
        near.close()
    assert reason == ""
    (timing,) = brought.timings
    assert timing.tier is Tier.PEER and timing.ms > 0
    assert timing.bytes == brought.counts["ownerserve_peer_read_bytes:"]


def test_a_peer_that_has_it_no_more_is_a_miss(
    near: StoringNode, far: Node, worker: WorkerSide, pages: Pages
) -> None:
    put_away(near)
    load, _ = offered(near, far)
    near.tiers.remove([want.id for want in load.wants])
    worker.load(WorkerCommands(loads=(load,)))
    assert ended(worker) == ("absent", {"ownerserve_brought:short": 1})
    assert not pages.written


def test_a_load_that_nobody_waits_for_waits_for_no_peer(
    near: StoringNode, far: Node, worker: WorkerSide
) -> None:
    put_away(near)
    load, _ = offered(near, far)
    has_ended, asked = Event(), near.transfers.service.source.state
    near.between(has_ended.wait)  # it lends nothing meanwhile
    try:
        worker.load(WorkerCommands(loads=(load,)))
        until(lambda: asked.counts()["opening"], within_s=60, what="a lend is asked for")
        worker.load(WorkerCommands(drops=(load.operation_id,)))
        stopped = {"ownerserve_brought:stopped": 1}
        assert ended(worker) == ("cancelled", stopped), "it is not waited for until it is late"
    finally:
        has_ended.set()
    until(lambda: not near.used_bytes, within_s=60, what="nothing is lent")


def test_of_two_loads_of_the_same_the_one_that_is_waited_for_comes(
    near: StoringNode, far: Node, worker: WorkerSide, pages: Pages
) -> None:
    """Two requests begin alike, and one of them is given up while both wait for the peer."""
    before = put_away(near)
    load, records = offered(near, far)
    stays = msgspec.structs.replace(load, operation_id=10, request_id="stays")
    has_ended, asked = Event(), near.transfers.service.source.state
    near.between(has_ended.wait)  # it lends nothing meanwhile
    try:
        worker.load(WorkerCommands(loads=(load, stays)))
        until(lambda: asked.counts()["opening"] == 2, within_s=60, what="both lends are asked for")
        worker.load(WorkerCommands(drops=(load.operation_id,)))
    finally:
        has_ended.set()
    reasons = dict[str, str]()
    while len(reasons) < 2:
        worker.results(WorkerCommands(is_idle=True))
        reasons |= {done.request_id: done.reason for done in worker.report().loads}
    assert reasons == {"r": "cancelled", "stays": ""}
    assert set(pages.written) == {before[one] for one in records}
