"""Nodes without engines, whose devices are arrays: real ports, movers and caches between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Component, Layout
from ownerserve.cache.outcomes import Begun, NoRoom, Turn
from ownerserve.kv.frame import Lane, PayloadPart, PayloadSection
from ownerserve.kv.ids import Incarnation, SessionId, TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import Identity, Numerics, pack
from ownerserve.kv.regions import Region
from ownerserve.kv.specs import Coverage
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import RpcAnswer, RpcRequest, Status, StatusIs
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.rpc.server import RpcServer
from ownerserve.node.transfers.lending import Lending
from ownerserve.node.transfers.opening import NodeTransfers, TransferPlace
from ownerserve.node.transfers.ranks import holders_of
from ownerserve.node.transfers.roads import ROADS
from ownerserve.node.vocabulary.chains import Chains, prefix_of
from ownerserve.node.vocabulary.events import PeerPrefix, PeerRecord
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.store.format.model import ReadOutcome, Want

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

    def __init__(
        self,
        name: str,
        *,
        slots: int = 32,
        roads: tuple[str, ...] = ROADS,
        pending_tokens: int = 0,
        life: int = 1000,
        place: TransferPlace | None = None,
    ) -> None:
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
        self.unit = RoutingUnit(WorkerId(name), 0, Incarnation(life))
        place = place or TransferPlace(roads=roads)
        self.transfers = NodeTransfers(
            self.unit, self.lending, SECTIONS, block_tokens=B, place=place
        )
        self._thread = ThreadPoolExecutor(1, "engine")
        self._readers = ThreadPoolExecutor(1, "store-read")
        self.rpc = RpcServer()
        self.transfers.state(holders_of(SECTIONS, spec=IDENTITY.spec_digest, block_tokens=B))
        self.transfers.start(self.between, rpc=self.rpc.address)
        self._pending_tokens = pending_tokens
        self.rpc.start(self.transfers.answering(self._load))
        self.address = LenderAddress(self.unit, self.rpc.address)

    def _load(self, request: RpcRequest) -> Future[RpcAnswer]:
        """What its engine would say of its load; it is asked nothing else."""
        if not isinstance(request, Status):
            return nobody(request)
        answer: Future[RpcAnswer] = Future()
        load = WorkerLoad(
            unit=self.unit,
            as_of=0.0,
            pending_prefill_tokens=self._pending_tokens,
            running_sequences=0,
            waiting_sequences=0,
            kv_bytes_free=0,
            kv_bytes_evictable=0,
            kv_bytes_total=0,
        )
        answer.set_result(StatusIs(load))
        return answer

    def between(self, work: Callable[[], object]) -> Future[object]:
        return self._thread.submit(work)

    def reads(self, wants: Sequence[Want]) -> Future[ReadOutcome]:
        """What a restore's thread reads of peers."""
        return self._readers.submit(self.transfers.peers.read, wants)

    def turn(self, session: SessionId, prompt: list[int]) -> None:
        """A turn of the session has run, and kept its state at the end of its blocks."""
        turn = self.begin(session, prompt)
        self.between(lambda: self.cache.finish(turn, 0.0)).result()

    def begin(self, session: SessionId, prompt: list[int]) -> TurnId:
        """A turn of the session runs, and has computed its prompt."""
        cache, turn = self.cache, TurnId(f"{session}-{len(prompt)}")

        def play() -> None:
            prefix = prefix_of(prompt, B)
            self.chains.hashed(prefix.tokens, session, prefix.hashed)
            begun = cache.begin(Turn(turn, session, prefix.tokens), 0.0)
            assert isinstance(begun, Begun)
            upto = (len(prompt) - 1) // B * B
            assert not isinstance(cache.reserve(turn, len(prompt), 0.0), NoRoom)
            cache.advance(turn, prefix.tokens[begun.restored * 4 : upto * 4], 0.0)
            cache.snapshot(turn, 0.0)
            cache.advance(turn, prefix.tokens[upto * 4 :], 0.0)

        self.between(play).result()
        return turn

    def writes(self, turn: TurnId, tokens: list[int], at: int) -> None:
        """The turn, which has `at` tokens, has computed more: of its answer."""

        def play() -> None:
            assert not isinstance(self.cache.reserve(turn, at + len(tokens), 0.0), NoRoom)
            self.cache.advance(turn, pack(tokens), 0.0)

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
        self._readers.shutdown()
        self.cache.check()


def nobody(request: RpcRequest) -> Future[RpcAnswer]:
    raise RuntimeError("only peers are answered here")


def wanted(
    lender: LenderAddress | None, *, prompt: Sequence[int] = PROMPT, **other: object
) -> PeerPrefix:
    """All that a restore of the prompt could ask for."""
    prefix = prefix_of(list(prompt), B)
    assert prefix.hashed is not None
    digests, cap = prefix.hashed.digests, (len(prompt) - 1) // B
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
