"""An engine of several ranks without vLLM: real stores, ports, movers and worker sides of each
rank, and what its scheduler's process tells peers and asks of them. Pages are lists of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from ownerserve.cache.layout import Component, Layout
from ownerserve.engines.vllm.scheduler_side.lending import (
    LentShard,
    LentShards,
    RankedTransfers,
)
from ownerserve.engines.vllm.scheduler_side.pending_commands import Tally
from ownerserve.engines.vllm.worker_commands import BlockPlace, LoadInto, WorkerCommands
from ownerserve.engines.vllm.worker_side.lending import RankForms, RankLending
from ownerserve.engines.vllm.worker_side.streams import HostStream
from ownerserve.engines.vllm.worker_side.worker import WorkerSide
from ownerserve.kv.frame import FORMAT, PayloadPart, PayloadSection
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.specs import Coverage
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.node.ownership.inventory import Inventory, Residency
from ownerserve.node.rpc.server import RpcServer
from ownerserve.node.runtime.node_runtime import UNMEASURED
from ownerserve.node.storage.backing import open_backing
from ownerserve.node.transfers.bringing import Bringing
from ownerserve.node.transfers.opening import NodeTransfers, TransferPlace
from ownerserve.node.transfers.ranks import RankHolders, holders_of
from ownerserve.node.transfers.roads import SHM, TCP
from ownerserve.node.transfers.stored_looks import StoredLooks
from ownerserve.node.vocabulary.chains import prefix_of
from ownerserve.node.vocabulary.events import PeerRecord
from ownerserve.node.vocabulary.operations import Operations
from ownerserve.node.vocabulary.records import RecordNames, tip_of
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.cost.prices import Prices
from ownerserve.store.format.model import Meta
from ownerserve.store.tiers.backend import Reservation
from tests.support.node.lending_nodes import AGENT, IDENTITY, PROMPT, B, Node, cells, nobody, wanted

HEADS, LAYERS, DIM, BLOCKS = 4, 3, 4, 10
PARTS = {"dense": ("k", "v"), "swa": ("k",)}
ROWS = {"dense": B, "swa": 7}
RECORDS = (
    PeerRecord("dense", 0, 4), PeerRecord("dense", 4, 8), PeerRecord("dense", 8, 10),
    PeerRecord("swa", 10, 10),
)  # fmt: skip
PLACE = BlockPlace("dense", ((1,),), 0, 32)
LONG_S = 300.0
TRIES = 10


def sections(heads: int) -> dict[str, PayloadSection]:
    return {
        name: PayloadSection(
            name,
            tuple(PayloadPart(part, (LAYERS, ROWS[name], heads, DIM), "float32") for part in parts),
        )
        for name, parts in PARTS.items()
    }


def state_of(record: PeerRecord, heads: range) -> bytes:
    """What those heads of the model have of a record, as the frame lays it out: drawn, the same
    for whoever asks."""
    seed = [record.first, record.end, len(record.component)]
    shape = (LAYERS, ROWS[record.component], HEADS, DIM)
    drawn, units = np.random.default_rng(seed), max(1, record.end - record.first)
    arrays = [drawn.random(shape, np.float32) for _ in range(units * len(PARTS[record.component]))]
    return b"".join(one[:, :, heads.start : heads.stop].tobytes() for one in arrays)


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


class Rank:
    """One worker process's part: a store, a worker side over it, and what it lends."""

    def __init__(self, engine: RankedEngine, directory: Path, rank: int) -> None:
        self.holders = engine.holders(rank)
        self.pages = Pages()
        backing = open_backing(directory, 0)
        assert backing is not None
        self.tiers = backing.tiers
        self.side = WorkerSide(backing, self.pages, HostStream(), readers=2)  # type: ignore[arg-type]
        self.lending: RankLending | None = None
        unit = RoutingUnit(WorkerId(f"{engine.unit.worker}.rank-{rank}"), 0, Incarnation(1))
        place, of = TransferPlace(roads=engine.roads), engine.sections
        if engine.ranks == 1:
            self.bringing: Bringing | RankLending = Bringing(unit, of, block_tokens=B, place=place)
            self.bringing.peers.own = (self.holders,)
        else:
            forms = RankForms({name: engine.names.descriptor(name) for name in of}, of)
            self.bringing = self.lending = RankLending(
                unit, self.holders, self.tiers, forms=forms, place=place, directory=directory
            )
        self.side.bring_by(self.bringing)
        self._is_closed = False

    @property
    def used_bytes(self) -> int:
        """What is taken of its lend memory."""
        assert self.lending is not None
        return self.lending.transfers.counts().stage_used_bytes

    def close(self) -> None:
        """Stop it as vLLM does, with all that it lends and brings."""
        if not self._is_closed:
            self._is_closed = True
            self.side.close()

    def store(self, meta: Meta, payload: bytes) -> None:
        room = self.tiers.reserve(meta, len(payload))
        assert isinstance(room, Reservation)
        room.payload[:] = payload
        self.tiers.commit([room])

    def own_state(self, record: PeerRecord) -> bytes:
        return state_of(record, self.holders[record.component].own_heads)


class RankedEngine:
    """An engine core of so many tensor-parallel ranks, each with a store below `folder`."""

    def __init__(
        self,
        name: str,
        ranks: int,
        folder: Path,
        *,
        spec: bytes = bytes(32),
        roads: tuple[str, ...] = (SHM.name, TCP.name),
        heads: int = HEADS,
    ) -> None:
        self.ranks, self.roads, self._spec, self._heads = ranks, roads, spec, heads
        self.unit = RoutingUnit(WorkerId(name), 0, Incarnation(1))
        self.sections = sections(max(1, heads // ranks))
        layout = Layout(
            B,
            (
                Component("dense", Coverage.RANGE, self.sections["dense"].unit_bytes, 1),
                Component("swa", Coverage.POINT, self.sections["swa"].unit_bytes, 1),
            ),
        )
        parts = {name: one.parts for name, one in self.sections.items()}
        self.names = RecordNames(IDENTITY, layout, engine=FORMAT, blocks=4, parts=parts)
        directories = [folder / name / f"shard-{rank}-of-{ranks}" for rank in range(ranks)]
        self.workers = [Rank(self, at, rank) for rank, at in enumerate(directories)]
        self._sessions = Residency(self.names, Inventory(), Operations(), can_replay=False)
        self._thread = ThreadPoolExecutor(1, "holding")
        self.transfers = self._told(directories)
        self._rpc = RpcServer()
        self.transfers.start(self.between, rpc=self._rpc.address)
        self._rpc.start(self.transfers.answering(nobody))
        self.address = LenderAddress(self.unit, self._rpc.address)

    def _told(self, directories: Sequence[Path]) -> NodeTransfers | RankedTransfers:
        """What the scheduler's process tells of the stores."""
        place = TransferPlace(roads=self.roads)
        if self.ranks == 1:
            transfers = NodeTransfers(self.unit, None, self.sections, block_tokens=B, place=place)
            transfers.state(self.holders(0))
            shard = LentShard(directories[0])
            transfers.lend_stored(self.names, self._sessions, shard, prices=prices)
            transfers.stopped = shard.close
            return transfers
        bringing = Bringing(self.unit, self.sections, block_tokens=B, place=place)
        bringing.peers.own = tuple(map(self.holders, range(self.ranks)))
        shards = LentShards(directories)
        looks = StoredLooks(self.names, self._sessions, shards, prices=prices)
        return RankedTransfers(bringing, looks, shards)

    def holders(self, rank: int) -> RankHolders:
        return holders_of(
            self.sections,
            spec=self._spec,
            block_tokens=B,
            at=(rank, self.ranks),
            heads=dict.fromkeys(self.sections, self._heads),
        )

    def between(self, work: Callable[[], object]) -> Future[object]:
        return self._thread.submit(work)

    def keep(self) -> None:
        """A turn of the session has left its state in all stores."""
        digests = prefix_of(PROMPT, B).hashed.digests
        for worker in self.workers:
            for one in RECORDS:
                if one.first < one.end:
                    cell = self.names.cell_ending_at(one.end)
                    meta = self.names.range_meta("dense", cell, digests)
                else:
                    meta = self.names.point_meta("swa", one.end, digests)
                worker.store(meta, worker.own_state(one))
        tip = tip_of(self.names, AGENT, BLOCKS, digests=digests, points=(BLOCKS,))
        self.between(partial(self._sessions.copied, tip, 0.0)).result()

    def offered(self, lender: RankedEngine | Node) -> LoadInto | None:
        """A load of all that the lender was said to hold, as it goes to each rank; None: of that
        nothing is read."""
        peers, prefix = self.transfers.peers, wanted(lender.address)
        held = peers.look(prefix)
        if not held:
            return None
        assert {prefix.records[id_] for id_ in held} == {*RECORDS}
        wants = sorted(cells(prefix, frozenset(held)), key=lambda one: _at(prefix.records[one.id]))
        places = (PLACE,) * len(wants)
        return LoadInto("r", 9, tuple(wants), places, LONG_S, peers.offered(wants))

    def load(self, load: LoadInto) -> str:
        """Begin the load at each rank, wait for all, and return how it ended: empty, or the reason
        of one that failed."""
        self.begin(load)
        return self.ended()

    def loads_at_last(self, load: LoadInto) -> bool:
        """Load it anew until all ranks have all of it: on a busy machine a bring may be late."""
        for _ in range(TRIES):
            for worker in self.workers:
                worker.pages.written.clear()
            if not self.load(load):
                return True
        return False

    def begin(self, load: LoadInto) -> None:
        for worker in self.workers:
            worker.side.load(WorkerCommands(loads=(load,)))

    def give_up(self, load: LoadInto) -> None:
        for worker in self.workers:
            worker.side.load(WorkerCommands(drops=(load.operation_id,)))

    def ended(self) -> str:
        """Wait until the load is over at all ranks."""
        tally, until_s = Tally(self.ranks), time.monotonic() + LONG_S
        while time.monotonic() < until_s:
            for worker in self.workers:
                worker.side.results(WorkerCommands(is_idle=True))
                for result in worker.side.report().loads:
                    if (over := tally.over(result)) is not None:
                        return over.reason
        raise AssertionError("a load waits for ever")

    def close(self) -> None:
        self._rpc.stop()
        self.transfers.stop()
        for worker in self.workers:
            worker.close()
        self._thread.shutdown()


def _at(record: PeerRecord) -> tuple[int, str]:
    return RECORDS.index(record), record.component


def prices() -> Prices:
    return CostModel(UNMEASURED).prices()
