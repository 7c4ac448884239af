"""What a node lends and another brings: real ports, movers and caches on two sides of one process,
and memory of bytes that say whose they are. With an engine: engines/hf/test_bringing.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Begun, NoRoom, Turn
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.frame import Lane, PayloadPart, PayloadSection
from ownerserve.kv.ids import Incarnation, SessionId, TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import Identity, Numerics
from ownerserve.kv.regions import Region
from ownerserve.kv.specs import Coverage
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import AskLender, Nonce, RpcAnswer, RpcRequest
from ownerserve.node.rpc.server import RpcServer
from ownerserve.node.transfers.lending import Lending, SessionHint
from ownerserve.node.transfers.memory import LenderPlaces
from ownerserve.node.transfers.opening import NodeTransfers, TransferPlace
from ownerserve.node.transfers.roads import ROADS
from ownerserve.node.vocabulary.chains import Chains, prefix_of
from ownerserve.node.vocabulary.events import PeerPrefix, PeerRecord
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.store.format.model import MissReason, ReadHit, ReadMiss, Want
from ownerserve.transfer.control.events import LendOpened, OpenLend
from ownerserve.transfer.control.messages import Lend, ReaderRank
from ownerserve.transfer.vocabulary import FramePiece

B, LAYERS, HEADS = 16, 3, 2
SECTIONS = {
    "dense": PayloadSection(
        "dense", tuple(PayloadPart(n, (LAYERS, B, HEADS, 4), "float32") for n in ("k", "v"))
    ),
    "swa": PayloadSection("swa", (PayloadPart("k", (LAYERS, 7, HEADS, 4), "float32"),)),
}
LAYOUT = Layout(
    B,
    (
        Component("dense", Coverage.RANGE, SECTIONS["dense"].unit_bytes, 1),
        Component("swa", Coverage.POINT, SECTIONS["swa"].unit_bytes, 1),
    ),
    state_bytes=64,
)
IDENTITY = Identity(
    model_id="toy", weights="w", tokenizer="t", spec_digest=bytes(32),
    numerics=Numerics("float32"), tenant_salt=bytes(32),
)  # fmt: skip
NAMES = RecordNames(IDENTITY, LAYOUT, engine="payload/1", blocks=4)
AGENT = SessionId("a" * 32)
PROMPT = list(range(7, 7 + 10 * B + 1))
COMPUTE_MS = 60_000.0


def region(section: PayloadSection, memory: np.ndarray, slots: int) -> Region:
    lanes = []
    for part, offsets in zip(section.parts, section.offsets(), strict=True):
        strides = tuple(4 * int(np.prod(part.shape[at + 1 :])) for at in range(1, len(part.shape)))
        lanes.append(
            tuple(
                Lane(memory.ctypes.data + at, section.unit_bytes, part.shape[1:], strides, 4)
                for at in offsets
            )
        )
    return Region(section, tuple(lanes), slots, memory.ctypes.data, memory.nbytes)


class Node:
    """A node whose device is two arrays; `between` runs what an engine's thread would."""

    def __init__(self, name: str, *, slots: int = 32, roads: tuple[str, ...] = ROADS) -> None:
        self.cache = HeteroCache(LAYOUT, {"dense": slots, "swa": slots}, 4)
        self.chains = Chains.of(NAMES)
        self.memory = {
            of: np.random.default_rng(hash(name) % 1000).integers(
                0, 256, slots * section.unit_bytes, dtype=np.uint8
            )
            for of, section in SECTIONS.items()
        }
        told = tuple(region(SECTIONS[of], memory, slots) for of, memory in self.memory.items())
        self.lending = Lending(self.cache, NAMES, self.chains, regions=lambda: told)
        self.unit = RoutingUnit(WorkerId(name), 0, Incarnation(1000))
        self.transfers = NodeTransfers(
            self.unit, self.lending, SECTIONS, block_tokens=B, place=TransferPlace(roads=roads)
        )
        self._thread = ThreadPoolExecutor(1, "engine")
        self.transfers.start(self.between)
        self.rpc = RpcServer()
        self.rpc.start(self.transfers.answering(nobody))
        self.address = LenderAddress(self.unit, self.rpc.address)

    def between(self, work: Callable[[], object]) -> Future[object]:
        return self._thread.submit(work)

    def turn(self, session: SessionId, prompt: list[int]) -> None:
        """A turn of the session has run, and kept its state at the end of its blocks."""

        def play() -> None:
            cache, turn = self.cache, TurnId(f"{session}-{len(prompt)}")
            prefix = prefix_of(prompt, B)
            self.chains.hashed(prefix.tokens, session, prefix.hashed)
            begun = cache.begin(Turn(turn, session, prefix.tokens), 0.0)
            assert isinstance(begun, Begun)
            upto = (len(prompt) - 1) // B * B
            assert not isinstance(cache.reserve(turn, len(prompt), 0.0), NoRoom)
            cache.advance(turn, prefix.tokens[begun.restored * 4 : upto * 4], 0.0)
            cache.snapshot(turn, 0.0)
            cache.advance(turn, prefix.tokens[upto * 4 :], 0.0)
            cache.finish(turn, 0.0)

        self.between(play).result()

    def bytes_of(self, record: PeerRecord) -> bytes:
        """What the device has of a record of the prompt."""
        prefix = self.cache.residents.prefix(prefix_of(PROMPT, B).tokens)
        if record.first < record.end:
            slots: tuple[int, ...] = prefix.range_slots(record.first, record.end)
        else:
            point = prefix.point_slots(record.end)
            assert point is not None
            slots = (point[record.component],)
        size = SECTIONS[record.component].unit_bytes
        memory = self.memory[record.component]
        return b"".join(memory[slot * size : (slot + 1) * size].tobytes() for slot in slots)

    def close(self) -> None:
        self.rpc.stop()
        self.transfers.stop()
        self._thread.shutdown()
        self.cache.check()


def nobody(request: RpcRequest) -> Future[RpcAnswer]:
    raise RuntimeError("only peers are answered here")


@pytest.fixture
def near() -> Iterator[Node]:
    node = Node("near")
    yield node
    node.close()


@pytest.fixture
def far() -> Iterator[Node]:
    node = Node("far")
    yield node
    node.close()


def wanted(lender: LenderAddress, **other: object) -> PeerPrefix:
    """All that a restore of the prompt could ask for."""
    prefix = prefix_of(PROMPT, B)
    assert prefix.hashed is not None
    digests, cap = prefix.hashed.digests, (len(PROMPT) - 1) // B
    records = dict[bytes, PeerRecord]()
    for end in range(1, cap + 1):
        first = NAMES.cell_ending_at(end).first
        (id_,) = NAMES.range_ids([end], digests)[0]
        records[id_] = PeerRecord("dense", first, end)
        records[NAMES.point_id("swa", end, digests)] = PeerRecord("swa", end, end)
    told = {
        "lender": lender, "session_id": AGENT, "parent": None, "tokens": cap * B,
        "digests": digests, "records": records, "grid_blocks": NAMES.blocks,
        "compute_ms": COMPUTE_MS, "turn_id": TurnId("t"), **other,
    }  # fmt: skip
    return PeerPrefix(**told)  # type: ignore[arg-type]


def cells(prefix: PeerPrefix, offered: frozenset[bytes]) -> list[Want]:
    """Wants of all that was offered: whole cells, what is left, and the point."""
    ids = sorted(offered, key=lambda id_: (prefix.records[id_].first, prefix.records[id_].end))
    return [Want(id_, 0, None) for id_ in ids]


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
    finally:
        far.close()
    assert near.transfers.counts().lends == {"returned": 2}
    assert not len(near.cache.lends)


def test_a_road_that_is_not_open_gives_way_to_the_next(near: Node, far: Node) -> None:
    near.turn(AGENT, PROMPT)
    prefix = wanted(near.address)
    read = far.transfers.peers.read(cells(prefix, far.transfers.peers.look(prefix)))
    assert isinstance(read, ReadHit)
    assert "shm" not in far.transfers.counts().brought_bytes, "these arrays are not shared"


def test_a_fork_reads_its_parents_prefix_and_a_stranger_nothing(near: Node, far: Node) -> None:
    near.turn(AGENT, PROMPT)
    fork = wanted(near.address, session_id=SessionId("b" * 32), parent=AGENT)
    assert len(far.transfers.peers.look(fork)) == 4
    assert not far.transfers.peers.look(wanted(near.address, session_id=SessionId("c" * 32)))


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


def test_lies_about_memory_are_refused() -> None:
    for lie in (b"", b"\xc1", b"\x93\x01\x02\x03"):
        with pytest.raises(InvalidInput):
            LenderPlaces(lie)


def test_an_unreadable_question_is_refused(near: Node) -> None:
    far = RoutingUnit(WorkerId("far"), 0, Incarnation(1))
    answer = near.transfers.service.ask(AskLender(b"\xff", far)).result(30)
    assert type(answer).__name__ == "Reject"


def test_who_is_not_there_costs_a_look(far: Node) -> None:
    gone = LenderAddress(RoutingUnit(WorkerId("gone"), 0, Incarnation(1)), "tcp://127.0.0.1:9")
    assert not far.transfers.peers.look(wanted(gone, compute_ms=1.0))
    assert far.transfers.counts().looks == {"silent": 1}


def test_roads_are_named_right() -> None:
    with pytest.raises(InvalidInput, match="transfer-roads"):
        TransferPlace(roads=("rail",)).check()
    with pytest.raises(InvalidInput, match="transfer-roads"):
        TransferPlace(roads=()).check()
