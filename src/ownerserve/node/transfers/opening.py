"""A node's transfers are opened here: the port where a node is read, the thread on which it lends
and brings, and the tier that its peers are. Wiring only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from typing import cast

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.addresses import parse_endpoint
from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.listening import LOOPBACK
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.units import GIB
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import (
    AskLender,
    AskPrefix,
    AskSession,
    EndPrefill,
    HandOver,
    Prefill,
    RpcAnswer,
    RpcRequest,
    Take,
)
from ownerserve.node.transfers.lenders import Lenders, OnEngine, no_engine
from ownerserve.node.transfers.lending import Lending
from ownerserve.node.transfers.moves import LeavingSessions, MovingEngine, MovingNode, Takes
from ownerserve.node.transfers.peers import Peers
from ownerserve.node.transfers.prefills import PrefillEngine, Prefills
from ownerserve.node.transfers.roads import EVERYWHERE, READV, ROADS, NodeRoads
from ownerserve.node.transfers.service import TransferService
from ownerserve.node.transfers.source_side import SourceSide
from ownerserve.node.transfers.stage import LendStage
from ownerserve.node.transfers.stored_lends import (
    LENT_TIERS,
    LentStore,
    StoredLends,
    StoredSessions,
)
from ownerserve.node.transfers.target_side import TargetSide
from ownerserve.node.transfers.turn_lends import TurnLends
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.plan.cost.prices import Prices
from ownerserve.transfer.control.events import SourceEvent
from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.movers.rights import permit_readers
from ownerserve.transfer.movers.tcp.handshake import transfer_key
from ownerserve.transfer.movers.tcp.server import TcpServer
from ownerserve.transfer.vocabulary import FramePiece, Runs

Answerer = Callable[[RpcRequest], "Future[RpcAnswer]"]

STAGE_BYTES = GIB
"""A part of a restore (NodeSettings.part_tokens) of 128 KiB a token; pages take room once they are
written, and give it back."""


class TransferPlace(msgspec.Struct, frozen=True):
    """A `TransferPlace` is where a node is read: an address of this machine, a port (0: a free
    one), and the fleet's key, without which it is on loopback. It reads others by `roads`, tried in
    that order; with `readv` among them, processes of its user on this machine may read it too.
    `prefill_peers` are RPC addresses of workers of which one computes a long prompt, where no
    gateway has named one. What it lends of its host memory and disk lies in `stage_bytes` of memory
    meanwhile; 0: it lends nothing of them."""

    host: str = LOOPBACK
    port: int = 0
    key: FleetKey | None = None
    roads: tuple[str, ...] = ROADS
    prefill_peers: tuple[str, ...] = ()
    stage_bytes: int = STAGE_BYTES

    def lends(self, tiers: Collection[Tier]) -> tuple[Tier, ...]:
        """Return from where a node with these tiers lends."""
        stored = (tier for tier in LENT_TIERS if tier in tiers and self.stage_bytes)
        return (Tier.DEVICE, *stored)

    def check(self) -> None:
        """Raise InvalidInput for roads that are none, or peers that have no such address."""
        NodeRoads(None, self.roads)
        for peer in self.prefill_peers:
            parse_endpoint(peer, field="prefill-peer", mend="give its tcp://HOST:PORT of RPC")


class TransferCounts(msgspec.Struct, frozen=True):
    """What was lent and brought, ordered and computed for others since the start, by how it ended,
    and the connections now."""

    looks: dict[str, int]
    brings: dict[str, int]
    lends: dict[str, int]
    brought_bytes: dict[str, int]
    read_bytes: int
    orders: dict[str, int]
    ordered_bytes: dict[str, int]
    prefills: dict[str, int]
    moves: dict[tuple[str, str], int]
    """By `came` and `went`, and how each ended."""
    connections: int
    staged_bytes: int
    failed_stagings: int
    stage_used_bytes: int


class NodeTransfers:
    """`NodeTransfers` are one node's: open when made, at work from `start` to `stop`."""

    def __init__(
        self,
        unit: RoutingUnit,
        lending: Lending | None,
        sections: Mapping[str, PayloadSection],
        *,
        block_tokens: int,
        place: TransferPlace,
    ) -> None:
        """Open the port. `lending` None: nothing on the device is lent. Raises InvalidInput where
        the port can't be had."""
        self._lenders = Lenders(lending)
        self._sections = sections
        self._unit, self._place = unit, place
        self._on_engine: OnEngine = no_engine
        key = None if place.key is None else transfer_key(place.key)
        if READV.name in place.roads:
            permit_readers()
        counted = _Counted(self._lenders, self)
        self._server = TcpServer(counted, place.host, port=place.port, key=key)
        self.address = f"{place.host}:{self._server.port}"
        if lending is not None:
            lending.address = self.address

        self.service = TransferService(
            lambda loop: (
                SourceSide(unit, self._lenders, self._on_engine, digests=Xxh3(), loop=loop),
                TargetSide(unit, sections, NodeRoads(key, place.roads), key=place.key, loop=loop),
            )
        )
        self.peers = Peers(self.service, sections, block_tokens)
        self.peers.orders.known = place.prefill_peers
        self.prefills: Prefills | None = None
        """What is computed here for others; None: nothing is."""
        self.leaving: LeavingSessions | None = None
        self.takes: Takes | None = None
        """How sessions leave, and come; None: none does."""
        self.stopped: Callable[[], None] = lambda: None
        """Called once nothing is lent any more."""
        self._is_started = False

    def compute_for_others(
        self, cache: HeteroCache, names: RecordNames, engine: PrefillEngine
    ) -> Prefills:
        """Compute prompts for peers too, by `engine`, and lend them as they come; call it before
        `start`."""
        lending = self._lenders.device
        assert lending is not None, "what is computed is on the device"
        lending.turns = turns = TurnLends(lending, cache, names, tell=self._tell_source)
        self.prefills = prefills = Prefills(cache, turns, engine)
        lending.ended = prefills.lend_ended
        return prefills

    def lend_stored(
        self,
        names: RecordNames,
        sessions: StoredSessions,
        store: LentStore,
        *,
        prices: Callable[[], Prices],
    ) -> None:
        """Lend what `store` has of the sessions too, unless there is no memory for it; call it
        before `start`."""
        if not self._place.stage_bytes:
            return
        stage = LendStage(self._sections, self._place.stage_bytes)
        stored = StoredLends(names, sessions, store, stage=stage, prices=prices)
        stored.address, stored.tell = self.address, self._tell_source
        self._lenders.stored = stored

    def move_sessions(self, cache: HeteroCache, engine: MovingEngine, node: MovingNode) -> None:
        """Have idle sessions move to peers and from them; call it before `start`."""

        def on_engine(work: Callable[[], object]) -> Future[object]:
            return self._on_engine(work)

        self.leaving = LeavingSessions(cache, engine, on_engine)
        self.takes = Takes(self._unit, cache, engine, node=node, on_engine=on_engine)

    def start(self, on_engine: OnEngine, *, rpc: str = "") -> None:
        """Begin to lend and bring; `on_engine` runs calls where the cache is owned. `rpc`: the
        address of this node's RPC port, which peers that compute for it read it by; empty, or one
        that stands for all of this machine's: they can't."""
        self._on_engine = on_engine
        if rpc and not any(host in rpc for host in EVERYWHERE):
            self.peers.orders.own = LenderAddress(self._unit, rpc)
        self.service.start()
        self._is_started = True

    def stop(self) -> None:
        """End all lends and brings, and free the port."""
        self.service.stop()
        self._server.close()
        if self._lenders.stored is not None:
            self._lenders.stored.close()
        self.stopped()

    def answering(self, others: Answerer) -> Answerer:
        """Return what answers peers here, and leaves everything else to `others`."""

        def answer(request: RpcRequest) -> Future[RpcAnswer]:
            match request:
                case AskLender():
                    return self.service.ask(request)
                case AskPrefix():
                    return self._lenders.prefix(request, self._on_engine)
                case Prefill() | EndPrefill() if self.prefills is not None:
                    done = self._on_engine(partial(self.prefills.answer, request))
                    return cast("Future[RpcAnswer]", done)
                case AskSession() if self.leaving is not None:
                    stands = self._on_engine(partial(self.leaving.stands, request))
                    return cast("Future[RpcAnswer]", stands)
                case HandOver() if self.leaving is not None:
                    return self._handed(self.leaving, request)
                case Take() if self.takes is not None:
                    return self.service.run(self.takes.take(request, self.service.target))
            return others(request)

        return answer

    def _handed(self, leaving: LeavingSessions, asked: HandOver) -> Future[RpcAnswer]:
        """Begin to hand a session over; the answer comes later than from the engine's thread."""
        answer: Future[RpcAnswer] = Future()
        answer.set_running_or_notify_cancel()

        def begun(done: Future[object]) -> None:
            if (error := done.exception()) is not None:
                answer.set_exception(error)

        self._on_engine(partial(leaving.hand_over, asked, answer)).add_done_callback(begun)
        return answer

    def counts(self) -> TransferCounts:
        """Return what came of lends and brings; any thread may call."""
        peers = self.peers
        lends = self.service.source.state.ends.copy() if self._is_started else {}
        stored = self._lenders.stored
        return TransferCounts(
            looks=dict(peers.looks),
            brings=dict(peers.brings),
            lends={str(end): count for end, count in lends.items()},
            brought_bytes=dict(peers.brought_bytes),
            read_bytes=self.service.target.read_bytes if self._is_started else 0,
            orders=dict(peers.orders.counts),
            ordered_bytes=dict(peers.ordered_bytes),
            prefills={} if self.prefills is None else dict(self.prefills.counts),
            moves=self._moves(),
            connections=self._server.connections,
            staged_bytes=0 if stored is None else stored.counts["staged_bytes"],
            failed_stagings=0 if stored is None else stored.counts["failed"],
            stage_used_bytes=0 if stored is None else stored.stage.used_bytes(),
        )

    def _moves(self) -> dict[tuple[str, str], int]:
        if self.takes is None or self.leaving is None:
            return {}
        came = {("came", end): count for end, count in self.takes.counts.copy().items()}
        went = {("went", end): count for end, count in self.leaving.counts.copy().items()}
        return came | went

    def _tell_source(self, event: SourceEvent) -> None:
        if self._is_started:
            self.service.source.tell(event)

    def was_read(self, ticket: int) -> None:
        """Note that somebody reads under the ticket; any thread may call."""
        if self._is_started:
            self.service.source.was_read(ticket)


class _Counted:
    """The lender that movers ask, which tells of each read that stood."""

    def __init__(self, lending: Lenders, transfers: NodeTransfers) -> None:
        self._lending, self._transfers = lending, transfers

    def runs(self, ticket: int, piece: FramePiece) -> Runs | None:
        return self._lending.runs(ticket, piece)

    def stands(self, ticket: int) -> bool:
        stands = self._lending.stands(ticket)
        if stands:
            self._transfers.was_read(ticket)
        return stands
