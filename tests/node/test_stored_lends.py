"""What a node lends of its host memory and its disk: real ports, movers and stores on two sides of
one process. With an engine: engines/hf/test_bringing_stored.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event

import pytest

from ownerserve.node.vocabulary.events import PeerRecord
from ownerserve.store.format.model import MissReason, ReadHit, ReadMiss, ReadOutcome, Want
from tests.support.node.lending_nodes import (
    AGENT,
    PROMPT,
    SECTIONS,
    B,
    Node,
    cells,
    wanted,
)
from tests.support.node.storing_node import StoringNode, put_away
from tests.support.waits import until


@pytest.fixture
def far() -> Iterator[Node]:
    node = Node("far")
    yield node
    node.close()


@pytest.fixture
def near() -> Iterator[StoringNode]:
    node = StoringNode(None)
    yield node
    node.close()


@pytest.mark.parametrize("road", ["shm", "readv", "tcp"])
@pytest.mark.parametrize("tier", ["host memory", "disk"])
def test_what_was_put_away_is_found_and_read(road: str, tier: str, tmp_path: Path) -> None:
    far = Node("far", roads=(road,))
    near = StoringNode(tmp_path / "kv" if tier == "disk" else None)
    try:
        before = put_away(near)
        prefix = wanted(near.address)
        offered = far.transfers.peers.look(prefix)
        assert {prefix.records[id_] for id_ in offered} == before.keys()
        read = far.transfers.peers.read(wants := cells(prefix, offered))
        assert isinstance(read, ReadHit), far.transfers.counts()
        for want, part in zip(wants, read.parts, strict=True):
            assert bytes(part.data) == before[prefix.records[want.id]]
        # A part of a record, as a prompt that shares only its beginning reads it.
        (cell,) = [w for w in wants if prefix.records[w.id] == PeerRecord("dense", 0, 4)]
        part = far.transfers.peers.read([Want(cell.id, 1, 3)])
        size = SECTIONS["dense"].unit_bytes
        assert isinstance(part, ReadHit)
        assert bytes(part.parts[0].data) == before[PeerRecord("dense", 0, 4)][size : 3 * size]
        until(lambda: far.transfers.counts().brings == {"brought": 2}, what="both are counted")
        assert set(far.transfers.counts().brought_bytes) == {road}
        until(lambda: near.used_bytes == 0, within_s=60, what="room is back")
        until(lambda: near.transfers.counts().lends == {"returned": 2}, what="both are back")
    finally:
        far.close()
        near.close()


def test_the_device_is_lent_where_it_has_as_much(near: StoringNode, far: Node) -> None:
    near.turn(AGENT, PROMPT)
    near.copy()
    prefix = wanted(near.address)
    offered = far.transfers.peers.look(prefix)
    assert set(offered.values()) == {0.0}, "nothing is read first"
    assert isinstance(far.transfers.peers.read(cells(prefix, offered)), ReadHit)
    assert near.transfers.counts().staged_bytes == 0


def test_a_disk_is_told_to_take_longer_than_host_memory(tmp_path: Path, far: Node) -> None:
    ready = dict[str, float]()
    for life, folder in enumerate((None, tmp_path / "kv")):
        near = StoringNode(folder, life=life + 1)
        try:
            put_away(near)
            (ready["disk" if folder else "host memory"],) = set(
                far.transfers.peers.look(wanted(near.address)).values()
            )
        finally:
            near.close()
    assert 0.0 < ready["host memory"] < ready["disk"]


def test_a_copy_of_a_text_that_was_edited_since_is_not_told(near: StoringNode, far: Node) -> None:
    near.turn(AGENT, PROMPT)
    near.copy()
    near.turn(AGENT, [*PROMPT[: 2 * B], *([5] * (3 * B + 1))])
    prefix = wanted(near.address)
    told = far.transfers.peers.look(prefix)
    assert [prefix.records[id_] for id_ in told] == [PeerRecord("dense", 0, 2)], (
        "what is on the device is another prompt's, but for the beginning that both have"
    )
    assert isinstance(far.transfers.peers.read(cells(prefix, told)), ReadHit)
    assert near.transfers.counts().staged_bytes == 0


def test_a_record_that_went_meanwhile_is_a_miss(near: StoringNode, far: Node) -> None:
    put_away(near)
    prefix = wanted(near.address)
    offered = cells(prefix, far.transfers.peers.look(prefix))
    near.tiers.remove([offered[1].id])
    read = far.transfers.peers.read(offered)
    assert isinstance(read, ReadMiss) and read.reason is MissReason.ABSENT
    until(lambda: far.transfers.counts().brings == {"short": 1}, what="it is counted")
    until(lambda: near.used_bytes == 0, within_s=60, what="room is back")
    assert near.transfers.counts().failed_stagings == 1
    other = Node("other")
    try:
        told = other.transfers.peers.look(prefix)
        assert {prefix.records[id_] for id_ in told} == {PeerRecord("dense", 0, 4)}, "what is left"
    finally:
        other.close()


def test_who_has_no_room_for_it_says_so(far: Node) -> None:
    near = StoringNode(None, stage_bytes=8192)
    try:
        put_away(near)
        prefix = wanted(near.address)
        read = far.transfers.peers.read(cells(prefix, far.transfers.peers.look(prefix)))
        assert isinstance(read, ReadMiss)
        until(lambda: near.transfers.counts().lends == {"no_room": 1}, what="it is counted")
        assert near.used_bytes == 0
    finally:
        near.close()


def test_a_node_without_lend_memory_tells_of_its_device_alone(far: Node) -> None:
    near = StoringNode(None, stage_bytes=0)
    try:
        put_away(near)
        assert not far.transfers.peers.look(wanted(near.address))
    finally:
        near.close()


def test_room_is_nobody_elses_while_a_record_is_being_read_into_it(
    near: StoringNode, far: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_away(near)
    prefix = wanted(near.address)
    wants = cells(prefix, far.transfers.peers.look(prefix))
    is_reading, may_go = Event(), Event()
    read_own = near.tiers.read_own

    def slow(wants: Sequence[Want]) -> ReadOutcome:
        is_reading.set()
        assert may_go.wait(300)
        return read_own(wants)

    monkeypatch.setattr(near.tiers, "read_own", slow)
    reading = far.reads(wants)
    try:
        assert is_reading.wait(300)
        far.transfers.peers.give_up(wants)
        assert isinstance(reading.result(300), ReadMiss)
        until(lambda: near.transfers.counts().lends, within_s=60, what="the lend has ended")
        near.between(lambda: None).result()  # behind what that does to its books
        assert near.used_bytes > 0, "its writer has not"
    finally:
        may_go.set()
    until(lambda: near.used_bytes == 0, within_s=60, what="room is back")


def test_a_store_that_raises_costs_a_lend_and_no_thread(
    near: StoringNode, far: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_away(near)
    prefix = wanted(near.address)
    wants = cells(prefix, far.transfers.peers.look(prefix))

    def broken(wants: Sequence[Want]) -> ReadOutcome:
        raise RuntimeError("a mistake of ours")

    with monkeypatch.context() as once:
        once.setattr(near.tiers, "read_own", broken)
        assert isinstance(far.transfers.peers.read(wants), ReadMiss)
    assert "is not read" in caplog.text and near.transfers.counts().failed_stagings == 1
    far.transfers.peers.look(prefix)  # what was missed is offered anew
    assert isinstance(far.transfers.peers.read(wants), ReadHit)
