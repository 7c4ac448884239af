"""What a node lends and another brings: real ports, movers and caches on two sides of one process,
and memory of bytes that say whose they are. With an engine: engines/hf/test_bringing.py.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event

import msgspec
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import pack
from ownerserve.kv.units import MIB
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    AskLender,
    AskPrefix,
    LenderSays,
    Nonce,
    PrefixIs,
    Reject,
    RpcAnswer,
    RpcRequest,
)
from ownerserve.node.rpc.server import RpcServer
from ownerserve.node.storage.backing import open_backing
from ownerserve.node.transfers.frames import decode_question, decode_reply, encode_message
from ownerserve.node.transfers.lending import SessionHint
from ownerserve.node.transfers.memory import LenderPlaces
from ownerserve.node.transfers.opening import TransferPlace
from ownerserve.node.vocabulary.events import PeerRecord, PrefillOrder
from ownerserve.store.format.model import MissReason, ReadHit, ReadMiss, Want
from ownerserve.store.tiers.backend import Reservation
from ownerserve.transfer.control.events import (
    BringEnd,
    BringOver,
    LendOpened,
    OpenLend,
    WantedArtifact,
)
from ownerserve.transfer.control.messages import Lend, Lent, LentRank, ReaderRank
from ownerserve.transfer.control.source import LendEnd
from ownerserve.transfer.vocabulary import FramePiece
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
from tests.support.node.patience import be_patient
from tests.support.store.samples import Samples
from tests.support.waits import until

WAIT_S = 60.0


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    be_patient(monkeypatch)
    node = Node("near")
    yield node
    node.close()


@pytest.fixture
def far() -> Iterator[Node]:
    node = Node("far")
    yield node
    node.close()


@pytest.mark.parametrize("road", ["readv", "tcp"])
def test_what_one_node_holds_another_reads(near: Node, road: str) -> None:
    far = Node("far", roads=(road,))
    try:
        near.turn(AGENT, PROMPT)
        prefix = wanted(near.address)
        offered = far.transfers.peers.look(prefix)
        held = {prefix.records[id_] for id_ in offered}
        assert {one for one in held if one.first == one.end} == {PeerRecord("swa", 10, 10)}
        assert {(one.first, one.end) for one in held if one.component == "dense"} == {
            (0, 4), (4, 8), (8, 10),
        }  # fmt: skip
        read = far.transfers.peers.read(wants := cells(prefix, offered))
        assert isinstance(read, ReadHit), far.transfers.counts()
        for want, part in zip(wants, read.parts, strict=True):
            assert bytes(part.data) == near.bytes_of(prefix.records[want.id])
        counts = far.transfers.counts()
        assert counts.brings == {"brought": 1} and set(counts.brought_bytes) == {road}
        # A part of a cell, as a prompt that shares only its beginning reads it.
        (first,) = [want for want in wants if prefix.records[want.id] == PeerRecord("dense", 0, 4)]
        part = far.transfers.peers.read([Want(first.id, 1, 3)])
        assert isinstance(part, ReadHit)
        size = SECTIONS["dense"].unit_bytes
        whole = near.bytes_of(PeerRecord("dense", 0, 4))
        assert bytes(part.parts[0].data) == whole[size : 3 * size]
        until(lambda: near.transfers.counts().lends == {"returned": 2}, within_s=WAIT_S)
    finally:
        far.close()
    assert not len(near.cache.lends)


def test_what_was_brought_is_let_go_of_with_its_answer(near: Node, far: Node) -> None:
    near.turn(AGENT, PROMPT)
    prefix = wanted(near.address)
    read = far.transfers.peers.read(cells(prefix, far.transfers.peers.look(prefix)))
    assert isinstance(read, ReadHit)
    memory = weakref.ref(read.parts[0].data.obj)
    del read
    until(lambda: memory() is None, within_s=60, what="the landing is let go of")


def test_what_is_brought_beside_what_is_here_is_given_up_with_it(near: Node, far: Node) -> None:
    near.turn(AGENT, PROMPT)
    prefix = wanted(near.address)
    wants = cells(prefix, far.transfers.peers.look(prefix))
    backing = open_backing(None, MIB)
    assert backing is not None
    has_ended = Event()
    try:
        backing.add_peers(far.transfers.peers)
        room = backing.tiers.reserve(Samples.meta(1, id=wants[0].id), 100)
        assert isinstance(room, Reservation)
        backing.tiers.commit([room])
        near.between(has_ended.wait)  # its engine is in a long step: nothing is lent meanwhile
        ticket = backing.service.submit_read(wants)
        target = far.transfers.service.target.state
        until(lambda: target.counts(0.0)["brings"], within_s=60, what="a bring")
        assert backing.service.cancel(ticket) is not None
        far.transfers.peers.give_up(wants)
        until(lambda: far.transfers.counts().brings, within_s=60, what="its end")
        assert far.transfers.counts().brings == {"stopped": 1}
    finally:
        has_ended.set()
        backing.close()


def test_a_read_that_is_given_up_before_it_comes_to_peers_brings_nothing(
    near: Node, far: Node
) -> None:
    """It waits on its thread for a disk, or for its turn: nobody is told that it goes on."""
    near.turn(AGENT, PROMPT)
    prefix, peers = wanted(near.address), far.transfers.peers
    wants = cells(prefix, peers.look(prefix))
    peers.expect(wants)
    peers.give_up(wants)
    read = peers.read(wants)
    assert isinstance(read, ReadMiss) and read.reason is MissReason.CANCELLED
    assert not far.transfers.counts().brings and not near.transfers.counts().lends
    peers.give_up(wants)  # and one whose read never begins
    peers.expect(wants)  # another turn wants the same
    assert isinstance(peers.read(wants), ReadHit)


def test_a_road_that_is_not_open_gives_way_to_the_next(near: Node, far: Node) -> None:
    near.turn(AGENT, PROMPT)
    prefix = wanted(near.address)
    read = far.transfers.peers.read(cells(prefix, far.transfers.peers.look(prefix)))
    assert isinstance(read, ReadHit)
    counts = far.transfers.counts()
    assert "shm" not in counts.brought_bytes, "these arrays are not shared"
    assert set(counts.read_failures) == {"unable"}, "which is told"


def test_a_fork_reads_its_parents_prefix_and_a_stranger_nothing(near: Node, far: Node) -> None:
    near.turn(AGENT, PROMPT)
    fork = wanted(near.address, session_id=SessionId("b" * 32), parent=AGENT)
    assert len(far.transfers.peers.look(fork)) == 4
    assert not far.transfers.peers.look(wanted(near.address, session_id=SessionId("c" * 32)))


def test_of_a_turn_that_runs_what_it_has_sealed_is_read(near: Node, far: Node) -> None:
    """Of its prompt and of its answer, by the session's name, while it goes on."""
    turn = near.begin(AGENT, PROMPT[: 6 * B + 1])
    prefix = wanted(near.address)
    assert {prefix.records[id_].end for id_ in far.transfers.peers.look(prefix)} == {4, 6}
    near.writes(turn, PROMPT[6 * B + 1 : 8 * B + 1], at=6 * B + 1)
    longer = wanted(near.address, tokens=9 * B)  # as a restore that asks later does
    offered = far.transfers.peers.look(longer)
    read = far.transfers.peers.read(wants := cells(longer, offered))
    assert isinstance(read, ReadHit), far.transfers.counts()
    assert {longer.records[want.id].end for want in wants} == {4, 6, 8}
    for want, part in zip(wants, read.parts, strict=True):
        assert bytes(part.data) == near.bytes_of(longer.records[want.id])
    near.between(lambda: near.cache.finish(turn, 0.0)).result()
    until(lambda: not len(near.cache.lends))


def test_who_asks_beside_a_turn_that_runs_hears_where_the_last_one_ended(near: Node) -> None:
    """Turns of one session that run at once share what it had before."""
    near.turn(AGENT, PROMPT[: 5 * B + 1])
    near.begin(AGENT, PROMPT)
    said = near.between(lambda: near.lending.prefix(AskPrefix(AGENT, 10 * B))).result()
    assert isinstance(said, PrefixIs) and said.tokens == 10 * B
    assert 5 * B in dict(said.ends)


def test_a_turn_that_has_sealed_less_than_the_last_one_left_hides_nothing(near: Node) -> None:
    near.turn(AGENT, PROMPT)
    near.begin(AGENT, [5] * (2 * B + 1))
    said = near.between(lambda: near.lending.prefix(AskPrefix(AGENT, 10 * B))).result()
    assert isinstance(said, PrefixIs) and said.tokens == 10 * B


def test_another_prompt_of_the_session_is_offered_nothing(near: Node, far: Node) -> None:
    near.turn(AGENT, [5] * (10 * B + 1))
    assert not far.transfers.peers.look(wanted(near.address))
    assert far.transfers.counts().looks == {"parted": 1}


def test_what_went_between_look_and_lend_is_a_miss(near: Node, far: Node) -> None:
    near.turn(AGENT, PROMPT)
    prefix = wanted(near.address)
    offered = far.transfers.peers.look(prefix)

    near.between(lambda: near.cache.sessions.let_go(AGENT)).result()
    for number in range(4):  # others take all the room
        near.turn(SessionId(f"{number:032x}"), [1000 + number] * (10 * B + 1))
    read = far.transfers.peers.read(cells(prefix, offered))
    assert isinstance(read, ReadMiss) and read.reason is MissReason.ABSENT
    assert far.transfers.counts().brings == {"refused": 1}
    assert not far.transfers.peers.has([want.id for want in cells(prefix, offered)])


def test_another_life_of_the_unit_lends_nothing(near: Node, far: Node) -> None:
    near.turn(AGENT, PROMPT)
    other = RoutingUnit(near.unit.worker, 0, Incarnation(999))
    prefix = wanted(LenderAddress(other, near.rpc.address))
    offered = far.transfers.peers.look(prefix)
    assert isinstance(far.transfers.peers.read(cells(prefix, offered)), ReadMiss)


def test_nothing_stays_open_to_a_workers_former_lives(far: Node) -> None:
    """A worker begins again and again: who reads it has as much open as after the first time."""
    open_then = list[int]()
    for life in range(1, 5):
        near = Node("near", life=life)
        try:
            near.turn(AGENT, PROMPT)
            prefix = wanted(near.address)
            read = far.transfers.peers.read(cells(prefix, far.transfers.peers.look(prefix)))
            assert isinstance(read, ReadHit), far.transfers.counts()
            open_then.append(len(list(Path("/proc/self/fd").iterdir())))
        finally:
            near.close()
    assert open_then[-1] <= open_then[0] + 2, open_then


class SilentLender:
    """A worker that lends, and says nothing more: `more` is set once it is asked for more."""

    def __init__(self) -> None:
        self.more = Event()
        self.rpc = RpcServer()
        self.rpc.start(self._answer)

    def _answer(self, request: RpcRequest) -> Future[RpcAnswer]:
        said: Future[RpcAnswer] = Future()
        if isinstance(request, AskPrefix):
            said.set_result(PrefixIs(0))
        elif isinstance(request, AskLender) and isinstance(decode_question(request.frame), Lend):
            lent = Lent(7, (LentRank(0, "127.0.0.1:9"),))
            said.set_result(LenderSays(encode_message(lent), b""))
        else:
            self.more.set()
        return said

    def address(self, rank: int, life: int) -> LenderAddress:
        """Where a life of a data-parallel rank of it is reached."""
        return LenderAddress(
            RoutingUnit(WorkerId("near"), rank, Incarnation(life)), self.rpc.address
        )


@pytest.fixture
def silent() -> Iterator[SilentLender]:
    lender = SilentLender()
    yield lender
    lender.rpc.stop()


HINT = SessionHint(AGENT, None, 10 * B)
WANTED_PART = (
    WantedArtifact(
        "dense", FramePiece(bytes(32), 0, 4, 0, LAYERS), 4 * SECTIONS["dense"].payload_bytes
    ),
)


def bring(far: Node, lender: LenderAddress) -> Future[BringOver]:
    """A bring that may take as long as it likes."""
    return far.transfers.service.bring(
        (WANTED_PART,), lender, HINT, landed=lambda part, landing: None, compute_ms=1e6
    )


def test_who_has_begun_anew_is_waited_for_no_longer(far: Node, silent: SilentLender) -> None:
    """Its next life is met: what waits for the former one ends as gone, and not after the seconds
    that a silent peer has."""
    begun = bring(far, silent.address(0, 1))
    assert silent.more.wait(WAIT_S)
    far.transfers.service.look(silent.address(0, 2), HINT, compute_ms=1e6)
    assert begun.result(WAIT_S).end is BringEnd.GONE


def test_another_rank_of_a_worker_is_no_new_life_of_the_one_that_is_read(
    far: Node, silent: SilentLender
) -> None:
    begun = bring(far, silent.address(0, 1))
    assert silent.more.wait(WAIT_S)
    assert far.transfers.service.look(silent.address(1, 2), HINT, compute_ms=1e6)
    assert not begun.done()
    assert begun.result(WAIT_S).end is BringEnd.SILENT, "as a peer that says nothing more"


def test_a_lent_prefix_is_not_used_again_while_it_is_read(near: Node) -> None:
    near.turn(AGENT, PROMPT)
    prefix = wanted(near.address)
    point = next(id_ for id_, one in prefix.records.items() if one == PeerRecord("swa", 10, 10))
    cell = next(id_ for id_, one in prefix.records.items() if one == PeerRecord("dense", 4, 8))
    pieces = (FramePiece(cell, 0, 4, 0, LAYERS), FramePiece(point, 0, 1, 0, LAYERS))
    reader = RoutingUnit(WorkerId("far"), 0, Incarnation(1))
    lend = Lend(Nonce(1), near.unit, pieces, (ReaderRank(0, 0, 0),))
    asked, hint = OpenLend(1, reader, lend, 1e6), SessionHint(AGENT, None, 10 * B)
    opened = near.between(lambda: near.lending.open(asked, hint, time.monotonic())).result()
    assert isinstance(opened, LendOpened)
    before = [near.bytes_of(prefix.records[id_]) for id_ in (cell, point)]

    near.between(lambda: near.cache.sessions.let_go(AGENT)).result()
    for number in range(3):  # others take all the room that is left
        near.turn(SessionId(f"{number:032x}"), [1000 + number] * (8 * B + 1))
    assert near.lending.stands(opened.ticket)
    assert [near.bytes_of(prefix.records[id_]) for id_ in (cell, point)] == before

    near.between(lambda: near.lending.end(opened.ticket)).result()
    assert not near.lending.stands(opened.ticket)
    assert near.lending.runs(opened.ticket, pieces[0]) is None
    assert not near.lending.memory(opened.ticket)


def test_of_a_lend_whose_room_a_turn_takes_its_lender_hears_at_once(near: Node) -> None:
    """Its reader may be frozen, and ask nothing more."""
    near.turn(AGENT, PROMPT)
    cell = next(
        id_ for id_, one in wanted(near.address).records.items() if one == PeerRecord("dense", 4, 8)
    )
    pieces = (FramePiece(cell, 0, 4, 0, LAYERS),)
    lend = Lend(Nonce(1), near.unit, pieces, (ReaderRank(0, 0, 0),))
    frame, reader = encode_message(lend), RoutingUnit(WorkerId("far"), 0, Incarnation(1))
    asked = AskLender(frame, reader, session_id=AGENT, tokens=10 * B)
    said = near.transfers.service.ask(asked).result(WAIT_S)
    assert isinstance(said, LenderSays) and isinstance(decode_reply(said.frame), Lent)
    near.between(lambda: near.cache.lends.room.revoke_for(1, time.monotonic())).result()
    source = near.transfers.service.source
    until(lambda: source.state.ends[LendEnd.REVOKED] == 1, what="the lend has ended")


def test_lies_about_memory_are_refused() -> None:
    for lie in (b"", b"\xc1", b"\x93\x01\x02\x03"):
        with pytest.raises(InvalidInput):
            LenderPlaces(lie)


def test_an_unreadable_question_is_refused(near: Node) -> None:
    far = RoutingUnit(WorkerId("far"), 0, Incarnation(1))
    answer = near.transfers.service.ask(AskLender(b"\xff", far)).result(30)
    assert type(answer).__name__ == "Reject"


def test_who_speaks_the_former_version_is_answered_as_malformed(near: Node) -> None:
    lend = Lend(Nonce(1), near.unit, (), (ReaderRank(0, 0, 0),))
    version, *message = msgspec.msgpack.decode(encode_message(lend))
    former = msgspec.msgpack.encode([version - 1, *message])
    with pytest.raises(InvalidInput, match=f"speak version {version}"):
        decode_question(former)
    asked = AskLender(former, RoutingUnit(WorkerId("far"), 0, Incarnation(1)))
    answer = near.transfers.service.ask(asked).result(WAIT_S)
    assert answer == Reject(WorkerRefusal.MALFORMED)


@pytest.mark.parametrize("address", ["tcp://", "nobody", "curve://127.0.0.1:9"])
def test_an_address_that_is_none_costs_a_look(far: Node, address: str) -> None:
    nobody = LenderAddress(far.unit, address)
    assert not far.transfers.peers.look(wanted(nobody))
    assert not far.transfers.peers.look(wanted(nobody, order=PrefillOrder(nobody, pack(PROMPT))))
    counts = far.transfers.counts()
    assert (counts.looks, counts.orders) == ({"silent": 2}, {"refused": 1})


def test_who_is_not_there_costs_a_look(far: Node) -> None:
    gone = LenderAddress(RoutingUnit(WorkerId("gone"), 0, Incarnation(1)), "tcp://127.0.0.1:9")
    assert not far.transfers.peers.look(wanted(gone, compute_ms=1.0))
    assert far.transfers.counts().looks == {"silent": 1}


def test_roads_are_named_right() -> None:
    with pytest.raises(InvalidInput, match="transfer-roads"):
        TransferPlace(roads=("rail",)).check()
    with pytest.raises(InvalidInput, match="transfer-roads"):
        TransferPlace(roads=()).check()
