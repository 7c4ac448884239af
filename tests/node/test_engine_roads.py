"""Engines of other makers as roads between nodes: what they write comes by way of the arena, and
what they may write late stays there. The engine is the test's; the real ones, between processes:
transfer/movers/test_engines.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.units import MIB
from ownerserve.kv.wire.curve import read_fleet_key, write_fleet_key
from ownerserve.kv.wire.rpc import AskLender, LenderSays, new_nonce
from ownerserve.node.transfers import engines
from ownerserve.node.transfers.frames import decode_reply, encode_message
from ownerserve.node.transfers.memory import LenderPlaces
from ownerserve.node.transfers.opening import TransferPlace
from ownerserve.node.vocabulary.events import PeerRecord
from ownerserve.store.format.model import ReadHit, ReadMiss
from ownerserve.transfer.control.messages import Lend, Lent, ReaderRank
from ownerserve.transfer.movers.arena import ALIGN_BYTES, ArenaNumbers
from ownerserve.transfer.vocabulary import FramePiece
from tests.support.node import standin_engine
from tests.support.node.lending_nodes import (
    AGENT,
    LAYERS,
    PROMPT,
    SECTIONS,
    Node,
    cells,
    wanted,
)
from tests.support.node.standin_engine import TransferEngine
from tests.support.waits import WAIT_S, until

Start = Callable[..., Node]


@pytest.fixture(autouse=True)
def mooncake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    standin_engine.begin()
    monkeypatch.setitem(sys.modules, "mooncake.engine", standin_engine)
    yield
    TransferEngine.goes_on.set()


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Node] = []

    def node(name: str, *roads: str, arena_bytes: int = 4 * MIB) -> Node:
        place = TransferPlace(roads=roads, arena_bytes=arena_bytes)
        started.append(Node(name, place=place))
        return started[-1]

    yield node
    TransferEngine.goes_on.set()
    for one in started:
        one.close()


def bring(near: Node, far: Node) -> ReadHit | ReadMiss:
    """Read at one node all that the other has of the prompt; where it comes, it is the same."""
    prefix = wanted(near.address)
    wants = cells(prefix, far.transfers.peers.look(prefix))
    read = far.transfers.peers.read(wants)
    if isinstance(read, ReadHit):
        for want, part in zip(wants, read.parts, strict=True):
            assert bytes(part.data) == near.bytes_of(prefix.records[want.id])
    return read


def counted(node: Node, of: str, found: dict[str, int]) -> None:
    """A node's threads count so, soon after what they count."""
    until(lambda: getattr(node.transfers.counts(), of) == found, what=f"{of}: {found}")


def arena_of(node: Node) -> ArenaNumbers:
    found = node.transfers.counts().arena
    assert found is not None
    return found


def test_what_comes_by_an_engine_is_copied_out_of_the_arena(start: Start) -> None:
    near, far = start("near", "mooncake"), start("far", "mooncake")
    near.turn(AGENT, PROMPT)
    assert isinstance(bring(near, far), ReadHit), far.transfers.counts()
    counted(far, "brings", {"brought": 1})
    assert set(far.transfers.counts().brought_bytes) == {"mooncake"}
    numbers = arena_of(far)
    assert numbers.free_bytes == numbers.capacity_bytes == 4 * MIB
    assert not numbers.abandoned_total
    counted(near, "lends", {"returned": 1})


def test_what_an_engine_left_unfinished_is_a_miss_and_its_part_of_the_arena_is_used_no_more(
    start: Start,
) -> None:
    near, far = start("near", "mooncake"), start("far", "mooncake")
    near.turn(AGENT, PROMPT)
    TransferEngine.fails = 1000
    assert isinstance(bring(near, far), ReadMiss)
    numbers = arena_of(far)
    assert numbers.abandoned_bytes > 0 and numbers.abandoned_total > 0
    assert numbers.oldest_abandoned_s > 0
    until(lambda: far.transfers.counts().brings.keys() == {"failed"}, what="it is told")


def test_where_an_engine_fails_the_next_road_brings_it(start: Start) -> None:
    near, far = start("near", "mooncake"), start("far", "mooncake", "tcp")
    near.turn(AGENT, PROMPT)
    TransferEngine.fails = 1000
    assert isinstance(bring(near, far), ReadHit), far.transfers.counts()
    until(lambda: set(far.transfers.counts().brought_bytes) == {"tcp"}, what="it is told")
    assert arena_of(far).abandoned_total > 0


def test_a_late_write_stays_in_the_arena_which_is_free_again_once_it_has_ended(
    start: Start,
) -> None:
    near, far = start("near", "mooncake"), start("far", "mooncake")
    near.turn(AGENT, PROMPT)
    TransferEngine.goes_on.clear()
    assert isinstance(bring(near, far), ReadMiss)
    assert arena_of(far).abandoned_bytes > 0
    TransferEngine.goes_on.set()
    until(lambda: not arena_of(far).abandoned_bytes, within_s=60, what="the writer is quiet")
    numbers = arena_of(far)
    assert numbers.free_bytes == numbers.capacity_bytes and numbers.abandoned_total > 0


def test_an_arena_without_room_gives_way_to_the_next_road(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engines, "LEAST_ARENA_BYTES", ALIGN_BYTES)
    near = start("near", "mooncake")
    far = start("far", "mooncake", "tcp", arena_bytes=ALIGN_BYTES)
    near.turn(AGENT, PROMPT)
    with caplog.at_level(logging.WARNING, "ownerserve.transfer"):
        assert isinstance(bring(near, far), ReadHit)
    until(lambda: far.transfers.counts().brought_bytes.get("tcp", 0) > 0, what="it is told")
    assert arena_of(far).refused_total > 0
    assert "no room for a read by mooncake" in caplog.text


def test_who_has_no_engine_open_is_read_by_the_next_road(start: Start) -> None:
    near, far = start("near", "tcp"), start("far", "mooncake", "tcp")
    near.turn(AGENT, PROMPT)
    assert isinstance(bring(near, far), ReadHit)
    until(lambda: set(far.transfers.counts().brought_bytes) == {"tcp"}, what="it is told")


def test_readers_of_other_hosts_are_told_where_a_lend_lies_if_there_is_an_engine(
    start: Start,
) -> None:
    for roads in (("mooncake",), ("tcp",)):
        near = start("near", *roads)
        near.turn(AGENT, PROMPT)
        records = wanted(near.address).records
        (id_,) = [id_ for id_, one in records.items() if one == PeerRecord("dense", 0, 4)]
        piece = FramePiece(id_, 0, 4, 0, LAYERS)
        lend = Lend(new_nonce(), near.unit, (piece,), (ReaderRank(0, 0, 0),))
        reader = RoutingUnit(WorkerId("far"), 0, Incarnation(1))
        asked = AskLender(encode_message(lend), reader, AGENT, None, 160, "another host")
        said = near.transfers.service.ask(asked).result(WAIT_S)
        assert isinstance(said, LenderSays) and isinstance(decode_reply(said.frame), Lent)
        if roads == ("tcp",):
            assert not said.memory
            continue
        places = LenderPlaces(said.memory)
        runs = places.runs(piece)
        assert runs is not None and runs.bytes == 4 * SECTIONS["dense"].payload_bytes
        assert places.engines.keys() == {"mooncake"}


def test_an_engine_answers_readers_while_something_is_lent(start: Start) -> None:
    near, far = start("near", "mooncake"), start("far", "mooncake")
    told: list[str] = []
    near.lending.lends = lambda: told.append("lends")
    near.lending.rests = lambda: told.append("rests")
    near.turn(AGENT, PROMPT)
    assert isinstance(bring(near, far), ReadHit)
    until(lambda: "rests" in told, within_s=60, what="nothing is lent any more")
    assert told[0] == "lends" and told[-1] == "rests"


def test_a_road_that_is_not_installed_is_told_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for road, module in (("mooncake", "mooncake.engine"), ("nixl", "nixl._api")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(InvalidInput, match=rf"pip install .ownerserve\[{road}\]"):
            TransferPlace(roads=(road,)).check()


@pytest.mark.parametrize(
    ("place", "names"),
    [
        (TransferPlace(host="0.0.0.0", roads=("mooncake",)), "transfer-host"),
        (TransferPlace(roads=("mooncake",), arena_bytes=1), "transfer-arena"),
        (TransferPlace(digest="md5"), "transfer-digest"),
        (TransferPlace(interface="nosuch0"), "transfer-interface"),
        (TransferPlace(digest="blake3"), "curve-key-file"),
    ],
)
def test_a_place_that_can_t_be_is_told_before_a_port_is_taken(
    place: TransferPlace, names: str
) -> None:
    with pytest.raises(InvalidInput, match=names):
        place.check()


def test_a_fleet_that_verifies_by_its_key_takes_no_other_digest(tmp_path: Path) -> None:
    write_fleet_key(tmp_path / "fleet.key", field="out")
    key = read_fleet_key(tmp_path / "fleet.key")
    near, far, other = (
        Node(name, place=TransferPlace(key=key, roads=("tcp",), digest=digest))
        for name, digest in (("near", "blake3"), ("far", "blake3"), ("other", "xxh3"))
    )
    try:
        near.turn(AGENT, PROMPT)
        assert isinstance(bring(near, far), ReadHit), far.transfers.counts()
        assert isinstance(bring(near, other), ReadMiss)
        counted(other, "brings", {"failed": 1})
    finally:
        for one in (near, far, other):
            one.close()
