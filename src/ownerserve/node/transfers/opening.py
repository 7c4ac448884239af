"""A node's transfers are opened here: the port where a node is read, the thread on which it lends
and brings, and the tier that its peers are. Wiring only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Protocol, cast

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.addresses import EVERYWHERE, parse_endpoint
from ownerserve.kv.errors import InvalidInput, OwnerServeError
from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.listening import LOOPBACK
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.units import GIB
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.holders import LendingRank
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    AskLender,
    AskPrefix,
    AskSession,
    AskTokens,
    DropTurn,
    EndPrefill,
    HandOver,
    MoveTurn,
    Prefill,
    RpcAnswer,
    RpcRequest,
    StopTurn,
    Suspend,
    Take,
    TakePrefix,
)
from ownerserve.node.transfers.counting import TransferCounts
from ownerserve.node.transfers.engines import ARENA_BYTES, NodeEngines, check_engines
from ownerserve.node.transfers.landings import LANDING_BYTES, Landings
from ownerserve.node.transfers.legs import GatewayLegs
from ownerserve.node.transfers.lenders import Lenders, OnEngine, no_engine
from ownerserve.node.transfers.lending import Lending
from ownerserve.node.transfers.moves import LeavingSessions, MovingEngine, MovingNode, Takes
from ownerserve.node.transfers.peers import Peers
from ownerserve.node.transfers.prefills import AfterRead, PrefillEngine, Prefills
from ownerserve.node.transfers.ranks import RankHolders
from ownerserve.node.transfers.replicas import PrefixTakes
from ownerserve.node.transfers.roads import READV, ROADS, NodeRoads, kinds_of
from ownerserve.node.transfers.service import TransferService
from ownerserve.node.transfers.source_side import SourceSide
from ownerserve.node.transfers.stage import LendStage
from ownerserve.node.transfers.state_brings import BringingNode
from ownerserve.node.transfers.stored_lends import FindRecord, LentStore, RecordForms, StoredLends
from ownerserve.node.transfers.stored_looks import (
    LENT_TIERS,
    StandingRecords,
    StoredLooks,
    StoredSessions,
)
from ownerserve.node.transfers.suspending import Suspensions
from ownerserve.node.transfers.target_side import TargetSide
from ownerserve.node.transfers.turn_lends import LayersWatched, TurnLends
from ownerserve.node.transfers.turn_moves import ComingTurns, LeavingTurns, StoppingEngine
from ownerserve.node.transfers.turn_states import TurnStates
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.node.vocabulary.settings import BRINGS_AT_ONCE
from ownerserve.plan.cost.prices import Prices
from ownerserve.transfer.control.events import SourceEvent
from ownerserve.transfer.movers.digests import Digests, Xxh3, fleet_digests
from ownerserve.transfer.movers.rights import permit_readers
from ownerserve.transfer.movers.tcp.handshake import transfer_key
from ownerserve.transfer.movers.tcp.server import TcpServer
from ownerserve.transfer.movers.tcp.settings import (
    LenderSettings,
    ReaderSettings,
    check_interface,
)
from ownerserve.transfer.vocabulary import FramePiece, Runs

XXH3 = "xxh3"
DIGESTS = (XXH3, "blake3")

Answerer = Callable[[RpcRequest], "Future[RpcAnswer]"]

STAGE_BYTES = GIB
"""A part of a restore (NodeSettings.part_tokens) of 128 KiB a token; pages take room once they are
written, and give it back."""


class TransferPlace(msgspec.Struct, frozen=True):
    """A `TransferPlace` is where a node is read: an address of this machine, a port (0: a free
    one), and the fleet's key, without which it is on loopback. It reads others by `roads`, tried in
    that order; with `readv` among them, processes of its user on this machine may read it too, and
    with `mooncake` or `nixl` whoever reaches those. Movers of these write into an arena of
    `arena_bytes`. `digest` is what pieces are verified by, one of DIGESTS, by all of a fleet alike.
    `prefill_peers` are RPC addresses of workers of which one computes a long prompt, where no
    gateway has named one; `after_read` is what becomes of what it computed for others. What it
    lends of its host memory and disk lies in `stage_bytes` of memory meanwhile; 0: it lends nothing
    of them. What it brings comes into `landing_bytes` of it. `interface` is the device by which
    alone it is read over TCP, and reads; empty: any. So many `brings` may be waited for at once,
    beside the store's own reads."""

    host: str = LOOPBACK
    port: int = 0
    key: FleetKey | None = None
    roads: tuple[str, ...] = ROADS
    prefill_peers: tuple[str, ...] = ()
    arena_bytes: int = ARENA_BYTES
    digest: str = XXH3
    stage_bytes: int = STAGE_BYTES
    landing_bytes: int = LANDING_BYTES
    interface: str = ""
    after_read: AfterRead = AfterRead.KEEP
    brings: int = BRINGS_AT_ONCE

    def lends(self, tiers: Collection[Tier]) -> tuple[Tier, ...]:
        """Return from where a node with these tiers lends."""
        stored = (tier for tier in LENT_TIERS if tier in tiers and self.stage_bytes)
        return (Tier.DEVICE, *stored)

    def check(self) -> None:
        """Raise InvalidInput for roads that are none or not installed, peers that have no such
        address, an interface that is not here, no memory to come into, and a digest that needs a
        key where there is none."""
        digests_of(self)
        if self.landing_bytes < 1:
            mend = "give it some: what other workers lend comes into it"
            raise InvalidInput("landing-memory", "is 0", mend)
        check_interface(self.interface, field="transfer-interface")
        kinds_of(self.roads)
        check_engines(self.roads, host=self.host, arena_bytes=self.arena_bytes)
        for peer in self.prefill_peers:
            parse_endpoint(peer, field="prefill-peer", mend="give its tcp://HOST:PORT of RPC")


def digests_of(place: TransferPlace) -> Digests:
    """Return what a piece's bytes are compared by. Raises InvalidInput for a digest that is none,
    or that needs a key."""
    if place.digest not in DIGESTS:
        mend = f"use one of {', '.join(DIGESTS)}"
        raise InvalidInput("transfer-digest", f"{place.digest!r} is none", mend)
    if place.digest == XXH3:
        return Xxh3()
    if place.key is None:
        problem = "blake3 is made under the fleet's key, and there is none"
        raise InvalidInput("transfer-digest", problem, "give --curve-key-file")
    return fleet_digests(transfer_key(place.key).secret)


class LentMedia(StandingRecords, LentStore, Protocol):
    """`LentMedia` are what a node has below its device: what stands there is told, and lent."""


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
        key, digests = None if place.key is None else transfer_key(place.key), digests_of(place)
        if READV.name in place.roads:
            permit_readers()
        counted = _Counted(self._lenders, self)
        lends_by = LenderSettings(interface=place.interface)
        self._server = TcpServer(counted, place.host, port=place.port, key=key, settings=lends_by)
        self.address = f"{place.host}:{self._server.port}"
        if lending is not None:
            lending.address = self.address
        try:
            self._engines = _engines(unit, lending, place)
        except OwnerServeError:
            self._server.close()
            raise
        opened, arena = self._engines.opened, self._engines.arena
        reads_by = ReaderSettings(interface=place.interface)
        roads = NodeRoads(
            key, place.roads, settings=reads_by, engines=opened, arena=arena, digests=digests
        )
        self._landings = Landings(sections, place.landing_bytes)
        self.service = TransferService(
            lambda loop: (
                SourceSide(unit, self._lenders, self._on_engine, digests=digests, loop=loop),
                TargetSide(unit, self._landings, roads, key=place.key, loop=loop),
            )
        )
        self.peers = Peers(self.service, sections, block_tokens)
        self.peers.orders.known = place.prefill_peers
        self.prefills: Prefills | None = None
        self.legs: GatewayLegs | None = None
        """What is computed here for others; None: nothing is."""
        self.leaving: LeavingSessions | None = None
        self.takes: Takes | None = None
        self.suspensions: Suspensions | None = None
        """How sessions leave, come, and are put away; None: none is."""
        self.leaving_turns: LeavingTurns | None = None
        self.coming_turns: ComingTurns | None = None
        self.turn_states: TurnStates | None = None
        """How turns leave and come amid their answers, and their state before; None: none does."""
        self.prefix_takes: PrefixTakes | None = None
        """What brings replicas here; None: nothing does."""
        self.stopped: Callable[[], None] = lambda: None
        """Called once nothing is lent any more."""
        self._is_started = False

    def compute_for_others(
        self,
        cache: HeteroCache,
        names: RecordNames,
        engine: PrefillEngine,
        *,
        layers: LayersWatched,
    ) -> Prefills:
        """Compute prompts for peers too, by `engine`, and lend them as they come, after each of the
        `layers` that it tells; call it before `start`."""
        lending = self._lenders.device
        assert lending is not None, "what is computed is on the device"
        lending.turns = turns = TurnLends(
            lending, cache, names, tell=self._tell_source, layers=layers
        )
        self.prefills = prefills = Prefills(cache, turns, engine)
        self.legs = GatewayLegs(prefills, lambda: self._on_engine)
        prefills.after_read = self._place.after_read
        lending.ended = prefills.lend_ended
        return prefills

    def lend_stored(
        self,
        names: RecordNames,
        sessions: StoredSessions,
        store: LentMedia,
        *,
        prices: Callable[[], Prices],
    ) -> None:
        """Lend what `store` has of the sessions too, unless there is no memory for it; call it
        before `start`."""
        if not self._place.stage_bytes:
            return
        looks = self._lenders.looks = StoredLooks(names, sessions, store, prices=prices)
        self.lend_records(names, looks.find, store)

    def lend_records(self, forms: RecordForms, find: FindRecord, store: LentStore) -> None:
        """Lend of `store` what is found, and tell nobody what that is; call it before `start`."""
        stage = LendStage(self._sections, self._place.stage_bytes)
        stored = StoredLends(forms, find, store, stage=stage)
        stored.address, stored.tell = self.address, self._tell_source
        self._lenders.stored = stored

    def state(self, holders: RankHolders) -> None:
        """State what this node keeps, which peers of other ranks read a part of; call it before
        `start`."""
        self.peers.own = (holders,)

    def move_sessions(self, cache: HeteroCache, engine: MovingEngine, node: MovingNode) -> None:
        """Have idle sessions move to peers and from them, and replicas be made; call it before
        `start`."""

        def on_engine(work: Callable[[], object]) -> Future[object]:
            return self._on_engine(work)

        self.leaving = LeavingSessions(cache, engine, on_engine)
        self.takes = Takes(self._unit, cache, engine, node=node, on_engine=on_engine)
        self.suspensions = Suspensions(engine, node, self.leaving)
        self.prefix_takes = PrefixTakes(self._unit, cache, node=node, on_engine=on_engine)

    def move_turns(
        self,
        engine: StoppingEngine,
        check: Callable[[bytes], WorkerRefusal | None],
        *,
        cache: HeteroCache,
        node: BringingNode,
    ) -> None:
        """Have turns move to peers and from them amid their answers, `check` being what an engine
        says of a state that it is to go on from; call it before `start`."""

        def on_engine(work: Callable[[], object]) -> Future[object]:
            return self._on_engine(work)

        self.leaving_turns = LeavingTurns(engine, on_engine)
        self.turn_states = states = TurnStates(cache, node=node, on_engine=on_engine)
        self.coming_turns = ComingTurns(check, states)

    def start(self, on_engine: OnEngine, *, rpc: str = "") -> None:
        """Begin to lend and bring; `on_engine` runs calls where the cache is owned. `rpc`: the
        address of this node's RPC port, which peers that compute for it read it by; empty, or one
        that stands for all of this machine's: they can't."""
        self._on_engine = on_engine
        if rpc and not any(host in rpc for host in EVERYWHERE):
            self.peers.orders.own = own = LenderAddress(self._unit, rpc)
            stated = tuple(LendingRank(own, tuple(one.values())) for one in self.peers.own)
            self._lenders.ranks = lambda: stated
        self.service.start()
        self._is_started = True

    def stop(self) -> None:
        """End all lends and brings, and free the port."""
        self.service.stop()
        self._server.close()
        self._engines.close()
        if self._lenders.looks is not None:
            self._lenders.looks.close()
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
                case Prefill() if (joined := self._joined(request)) is not None:
                    return joined
                case Prefill() | EndPrefill() if self.prefills is not None:
                    done = self._on_engine(partial(self.prefills.answer, request))
                    return cast("Future[RpcAnswer]", done)
                case AskSession() if self.leaving is not None:
                    stands = self._on_engine(partial(self.leaving.stands, request))
                    return cast("Future[RpcAnswer]", stands)
                case HandOver() if self.leaving is not None:
                    return self._later(partial(self.leaving.hand_over, request))
                case Suspend() if self.suspensions is not None:
                    return self._later(partial(self.suspensions.suspend, request))
                case StopTurn() if self.leaving_turns is not None:
                    return self.service.run(self.leaving_turns.send(request, self.service.target))
                case MoveTurn() if self.coming_turns is not None:
                    return _at_once(self.coming_turns.keep(request))
                case DropTurn() if self.coming_turns is not None:
                    return _at_once(self.coming_turns.drop(request))
                case Take() if request.turn and self.coming_turns is not None:
                    return self.service.run(self.coming_turns.take(request, self.service.target))
                case Take() if self.takes is not None:
                    return self.service.run(self.takes.take(request, self.service.target))
                case AskTokens() if self.prefix_takes is not None:
                    here = self._on_engine(partial(self.prefix_takes.tokens_here, request))
                    return cast("Future[RpcAnswer]", here)
                case TakePrefix() if self.prefix_takes is not None:
                    return self.service.run(self.prefix_takes.take(request, self.service.target))
            return others(request)

        return answer

    def _joined(self, asked: Prefill) -> Future[RpcAnswer] | None:
        """Return the answer to who reads a prompt that a leg has ordered before; None: none has."""
        before = None if self.prefills is None else self.prefills.joined(asked)
        if before is None:
            return None
        answer: Future[RpcAnswer] = Future()
        answer.set_result(before)
        return answer

    def _later(self, begin: Callable[[Future[RpcAnswer]], None]) -> Future[RpcAnswer]:
        """Begin what is answered later than from the engine's thread."""
        answer: Future[RpcAnswer] = Future()
        answer.set_running_or_notify_cancel()

        def begun(done: Future[object]) -> None:
            if (error := done.exception()) is not None:
                answer.set_exception(error)

        self._on_engine(partial(begin, answer)).add_done_callback(begun)
        return answer

    def counts(self) -> TransferCounts:
        """Return what came of lends and brings; any thread may call."""
        peers, arena = self.peers, self._engines.arena
        lends = self.service.source.state.ends.copy() if self._is_started else {}
        stored = self._lenders.stored
        return TransferCounts(
            looks=dict(peers.looks),
            brings=dict(peers.brings),
            lends={str(end): count for end, count in lends.items()},
            brought_bytes=dict(peers.brought_bytes),
            read_bytes=self.service.target.read_bytes if self._is_started else 0,
            read_failures=self.service.target.read_failures.copy() if self._is_started else {},
            orders=dict(peers.orders.counts),
            ordered_bytes=dict(peers.ordered_bytes),
            prefills={} if self.prefills is None else dict(self.prefills.counts),
            told_bytes={} if self.prefills is None else dict(self.prefills.told_bytes),
            moves=self._moves(),
            handover_s=0.0 if self.takes is None else self.takes.handover_s,
            turn_moves=self._turn_moves(),
            turn_states={} if self.turn_states is None else dict(self.turn_states.counts),
            turn_state_bytes=0 if self.turn_states is None else self.turn_states.moved_bytes,
            replicas={} if self.prefix_takes is None else dict(self.prefix_takes.counts),
            replica_bytes=0 if self.prefix_takes is None else self.prefix_takes.moved_bytes,
            connections=self._server.connections,
            landings=self._landings.numbers(time.monotonic()),
            arena=None if arena is None else arena.numbers(time.monotonic()),
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

    def _turn_moves(self) -> dict[tuple[str, str], int]:
        if self.coming_turns is None or self.leaving_turns is None:
            return {}
        came = {("came", end): count for end, count in self.coming_turns.counts.copy().items()}
        went = {("went", end): count for end, count in self.leaving_turns.counts.copy().items()}
        return came | went

    def _tell_source(self, event: SourceEvent) -> None:
        if self._is_started:
            self.service.source.tell(event)

    def was_read(self, ticket: int) -> None:
        """Note that somebody reads under the ticket; any thread may call."""
        if self._is_started:
            self.service.source.was_read(ticket)


def _at_once(said: RpcAnswer) -> Future[RpcAnswer]:
    answer: Future[RpcAnswer] = Future()
    answer.set_result(said)
    return answer


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


def _engines(unit: RoutingUnit, lending: Lending | None, place: TransferPlace) -> NodeEngines:
    """Open the engines among the place's roads, and have them read what is lent of the device."""
    engines = NodeEngines(unit, place.roads, host=place.host, arena_bytes=place.arena_bytes)
    if engines.opened and lending is not None:
        lending.engines = engines.register(lending.regions())
        lending.lends, lending.rests = engines.lends, engines.rests
    return engines
