"""The target side performs what `transfer.control.target` decides: it asks peers over their RPC
ports, has movers read into a landing, and hands over what came whole. All its calls are made on
the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf
from typing import NamedTuple, Protocol

import msgspec
from zmq import ZMQError

from ownerserve.kv.addresses import parse_endpoint
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.curve import FleetKey
from ownerserve.kv.wire.framed import AsyncFramedClient
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import (
    MAX_FRAME_BYTES,
    NO_NONCE,
    Accepted,
    AskLender,
    AskPrefix,
    Cancel,
    LenderSays,
    Nonce,
    Prefill,
    PrefixIs,
    RpcRequest,
    Said,
    Status,
    StatusIs,
    decode_answer,
    encode,
    new_nonce,
)
from ownerserve.node.transfers.frames import decode_reply, encode_message
from ownerserve.node.transfers.landing import Landing
from ownerserve.node.transfers.landings import Landings, LandingsFull
from ownerserve.node.transfers.lending import SessionHint
from ownerserve.node.transfers.memory import LenderPlaces
from ownerserve.node.transfers.read_arena import ReadArena
from ownerserve.node.transfers.roads import told_address
from ownerserve.transfer.control.events import (
    ArenaCopied,
    AskPeer,
    BringOver,
    BringUnwanted,
    BringWanted,
    CancelRead,
    CommitRoom,
    CopyFromArena,
    FreeArena,
    FreeRoom,
    HoldRoom,
    PeerAnswered,
    PeerLink,
    PeerReplaced,
    QuestionLost,
    ReadEnded,
    ReadGoal,
    ReserveRoom,
    RoomCommitted,
    RoomRefused,
    RoomReserved,
    StartRead,
    TargetEffect,
    TargetEvent,
    TellPeer,
    WakeUp,
    WantedArtifact,
)
from ownerserve.transfer.control.messages import (
    NO_TURN,
    Grown,
    Lend,
    Lent,
    More,
    PeerQuestion,
    ReaderRank,
)
from ownerserve.transfer.control.target import TransferTarget
from ownerserve.transfer.movers.arena import ArenaFull
from ownerserve.transfer.movers.peers import own_name
from ownerserve.transfer.movers.port import Mover
from ownerserve.transfer.vocabulary import (
    Ended,
    Read,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    ReadQuiet,
    ReadUnproven,
    Road,
    Runs,
)

log = logging.getLogger("ownerserve.transfer")

MEMORIES_KEPT = 256
ORDER_AGAIN_S = 0.5
CLOSED = (ReadFailure.PEER_LOST, ReadFailure.UNABLE)
ALL_OF_IT = (ReaderRank(0, 0, 0),)


BringParts = tuple[tuple[WantedArtifact, ...], ...]


class Roads(Protocol):
    """`Roads` open the movers that bring from peers."""

    @property
    def kinds(self) -> tuple[Road, ...]:
        """Return what roads there are, in order of preference."""
        ...

    @property
    def arena(self) -> ReadArena | None:
        """Return where those write that are not fenced; None: there is none of them."""
        ...

    def open(self, road: str, address: str, memory: LenderPlaces | None) -> Mover | None:
        """Open the road of that name to `address`, or to the process whose `memory` it is; None
        where it is not open. Raises InvalidInput for an address that is none."""
        ...


PartLanded = Callable[[int, Landing], None]
"""Hears of each part of a bring that has come and is verified, in their order. Called on the loop's
thread, it must neither block nor raise."""


class _Bring(msgspec.Struct, eq=False):
    parts: BringParts
    nonce: Nonce
    over: asyncio.Future[BringOver]
    landed: PartLanded
    into: Landing | None


class _PartOf(NamedTuple):
    number: int
    part: int


class TargetSide:
    """A `TargetSide` brings for one unit."""

    def __init__(
        self,
        unit: RoutingUnit,
        landings: Landings,
        roads: Roads,
        *,
        key: FleetKey | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.state = TransferTarget(unit)
        self.read_bytes = 0
        """What was read of peers, whether or not it counts in the end."""
        self.read_failures: Counter[str] = Counter()
        """Reads that brought nothing, by why, of brings that have ended."""
        self._unit = unit
        self._landings = landings
        self._roads = roads
        self._key = key
        self._loop = loop
        self._numbers, self._reservations = count(1), count(1)
        self._brings: dict[int, _Bring] = {}
        self._hints: dict[Nonce, SessionHint] = {}
        self._parts: dict[int, _PartOf] = {}
        """Which part of which bring each reservation is of."""
        self._lines: dict[str, AsyncFramedClient] = {}
        self._met: dict[tuple[WorkerId, int], LenderAddress] = {}
        """The life of each worker's data-parallel rank that was asked last, and where."""
        self._movers: dict[tuple[str, str, RoutingUnit, str], Mover] = {}
        self._memory: dict[tuple[RoutingUnit, int], LenderPlaces] = {}
        self._boot = own_name().boot
        self._reads: dict[int, Mover] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def look(
        self, lender: LenderAddress, hint: SessionHint, within_s: float
    ) -> PrefixIs | None:
        """Ask what a peer holds of a session; None: no answer in time."""
        assert hint.session_id is not None
        self._meet(lender)
        asked = AskPrefix(hint.session_id, hint.tokens, hint.parent)
        said = await self._ask(lender.address, asked, within_s=within_s)
        return said if isinstance(said, PrefixIs) else None

    async def bring(
        self,
        parts: BringParts,
        lender: LenderAddress,
        hint: SessionHint,
        *,
        landed: PartLanded,
        compute_ms: float,
        turn_id: TurnId = NO_TURN,
        into: Landing | None = None,
    ) -> BringOver:
        """Bring what is wanted, part by part, each whole or not at all: what the lender holds, or
        its turn of that id computes. It may take `compute_ms`. Cancelled, it is not wanted any
        more. `into`: where the only part comes, beside what others bring there."""
        self._meet(lender)
        number = next(self._numbers)
        bring = _Bring(parts, new_nonce(), self._loop.create_future(), landed, into)
        self._brings[number] = bring
        self._hints[bring.nonce] = hint
        wanted_bring = BringWanted(
            number,
            bring.nonce,
            parts=parts,
            peers=(PeerLink(lender.unit, lender.address),),
            ranks=ALL_OF_IT,
            roads=self._roads.kinds,
            compute_ms=compute_ms,
            turn_id=turn_id,
        )
        self._handle(wanted_bring)
        try:
            return await bring.over
        except asyncio.CancelledError:
            self._handle(BringUnwanted(number))
            raise

    async def order(
        self, worker: LenderAddress, asked: Prefill, nonce: Nonce, *, within_s: float
    ) -> Accepted | None:
        """Have a peer compute a prompt; None: it does not, and what of it may have begun is called
        off."""
        self._meet(worker)
        try:
            said = await self._ask(worker.address, asked, within_s=within_s, nonce=nonce)
        except InvalidInput as error:  # longer than a frame may be
            log.info("a prompt is computed here: %s", error)
            return None
        if isinstance(said, Accepted):
            return said
        self.call_off(worker, nonce)
        return None

    async def least_pending(
        self, addresses: Sequence[str], within_s: float
    ) -> LenderAddress | None:
        """Return which of the peers at these RPC addresses has the least to compute, by its own
        word now; None: none answers."""
        asking = (self._ask(one, Status(), within_s=within_s) for one in addresses)
        said = zip(addresses, await asyncio.gather(*asking), strict=True)
        told = [(one.status, address) for address, one in said if isinstance(one, StatusIs)]
        if not told:
            return None
        load, address = min(told, key=lambda one: one[0].pending_prefill_tokens)
        return LenderAddress(load.unit, address)

    async def ask(
        self, peer: LenderAddress, request: RpcRequest, *, within_s: float, nonce: Nonce
    ) -> Said | None:
        """Ask a peer anything; None: no answer in time. Under a nonce it is said again."""
        self._meet(peer)
        return await self._ask(peer.address, request, within_s=within_s, nonce=nonce)

    def call_off(self, worker: LenderAddress, nonce: Nonce) -> None:
        """Tell a peer that what was ordered under the nonce is not wanted any more."""
        if (line := self._line(worker.address)) is not None:
            line.tell(encode(Cancel(nonce)))

    def close(self) -> None:
        """Ask nobody any more, and let no byte come."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._asking:
            task.cancel()
        for mover in self._movers.values():
            self._loop.remove_reader(mover.fileno())
            mover.close()
        for line in self._lines.values():
            line.close()
        for bring in self._brings.values():
            bring.over.cancel()

    # -- effects -------------------------------------------------------------------------------

    def _handle(self, event: TargetEvent) -> None:
        self._perform(self.state.handle(event, self._loop.time()))
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.state.next_deadline()
        self._timer = None if due_s == inf else self._loop.call_at(due_s, self._handle, WakeUp())

    def _later(self, event: TargetEvent) -> None:
        """Take the event once what is being performed has ended."""
        self._loop.call_soon(self._handle, event)

    def _perform(self, effects: Iterable[TargetEffect]) -> None:
        for effect in effects:
            match effect:
                case AskPeer():
                    asking = self._loop.create_task(self._question(effect))
                    self._asking.add(asking)
                    asking.add_done_callback(self._asking.discard)
                case TellPeer(peer, message):
                    if (line := self._line(peer.address)) is not None:
                        line.tell(encode(self._wrapped(message)))
                case ReserveRoom(number, part):
                    self._reserve(number, part)
                case StartRead():
                    self._start(effect)
                case CancelRead(number):
                    if (mover := self._reads.get(number)) is not None:
                        mover.cancel(number)
                case CopyFromArena(number):
                    assert self._roads.arena is not None, "it was read into"
                    self._roads.arena.copy(number)
                    self._later(ArenaCopied(number))
                case FreeArena(number):
                    if self._roads.arena is not None:
                        self._roads.arena.free(number)
                case CommitRoom(reservation):
                    number, part = self._parts.pop(reservation)
                    self._brings[number].landed(part, self._landings.take(reservation))
                    self._later(RoomCommitted(reservation))
                case HoldRoom(reservation):
                    self._landings.hold(reservation, self._loop.time())
                case FreeRoom(reservation):
                    del self._parts[reservation]
                    self._landings.free(reservation)
                case BringOver(number, failures=failures):
                    self.read_failures.update({str(why): count for why, count in failures.items()})
                    bring = self._brings.pop(number)
                    del self._hints[bring.nonce]
                    if not bring.over.done():
                        bring.over.set_result(effect)

    def _reserve(self, number: int, part: int) -> None:
        reservation = next(self._reservations)
        bring = self._brings[number]
        wanted, now_s = bring.parts[part], self._loop.time()
        landing = self._landings.reserve(reservation, wanted, into=bring.into, now_s=now_s)
        if isinstance(landing, LandingsFull):
            log.warning(
                "no room for what a peer lends: %d bytes are coming, here or held, %d of them held",
                landing.used_bytes, landing.held_bytes,
            )  # fmt: skip
            self._later(RoomRefused(number, part))
            return
        self._parts[reservation] = _PartOf(number, part)
        self._later(RoomReserved(number, part, reservation))

    def _start(self, effect: StartRead) -> None:
        memory = self._memory.get((effect.peer.unit, effect.ticket))
        source = None if memory is None else memory.runs(effect.piece)
        try:
            mover = self._mover(effect, None if source is None else memory)
        except InvalidInput as error:
            log.warning("%s is not read: %s", effect.peer.unit.worker, error)
            mover = None
        goal = None if mover is None else self._goal(effect)
        if mover is None or goal is None:
            self._later(ReadEnded(ReadFailed(effect.number, ReadFailure.UNABLE)))
            return
        self._reads[effect.number] = mover
        mover.start(
            Read(
                effect.number,
                effect.ticket,
                effect.piece,
                goal=goal,
                source=source,
                digest=effect.digest,
                deadline_s=effect.deadline_s,
            )
        )

    def _goal(self, effect: StartRead) -> Runs | None:
        """Return where the read writes; None: there is no room in the arena."""
        runs = self._landings.of(effect.reservation).runs(effect.piece)
        if effect.goal is ReadGoal.BLOCKS:
            return runs
        arena = self._roads.arena
        goal = None if arena is None else arena.goal(effect.number, runs)
        if isinstance(goal, ArenaFull):
            log.warning(
                "no room for a read by %s: %d bytes of the arena are free, %d abandoned",
                effect.road, goal.free_bytes, goal.abandoned_bytes,
            )  # fmt: skip
            return None
        return goal

    def _mover(self, effect: StartRead, memory: LenderPlaces | None) -> Mover | None:
        """Return the mover of the read's road to its peer, opened once."""
        rpc_host, _ = parse_endpoint(effect.peer.address, field="peer", mend="name its RPC port")
        address = told_address(effect.rank.address, rpc_host)
        shared = None if memory is None else memory.shared()
        key = (effect.road, address, effect.peer.unit, "" if shared is None else shared.name)
        mover = self._movers.get(key)
        if mover is None:
            mover = self._roads.open(effect.road, address, memory)
            if mover is not None:
                self._movers[key] = mover
                self._loop.add_reader(mover.fileno(), self._ended, mover)
        return mover

    def _ended(self, mover: Mover) -> None:
        ends = mover.ended()
        if any(isinstance(one, ReadFailed) and one.reason in CLOSED for one in ends):
            self._drop(mover)
            ends += mover.ended()
        for ended in ends:
            self._note(ended)
            self._handle(ReadEnded(ended))

    def _note(self, ended: Ended) -> None:
        """Count what a mover said of a read; who may write on has its part of the arena."""
        if not isinstance(ended, ReadQuiet):
            self._reads.pop(ended.number, None)
        if isinstance(ended, ReadLanded):
            self.read_bytes += ended.bytes
        elif isinstance(ended, ReadUnproven):
            assert self._roads.arena is not None, "who is fenced proves it"
            self._roads.arena.unproven(ended.number, self._loop.time())

    def _meet(self, lender: LenderAddress) -> None:
        """Let go of what is open to a former life of the lender's worker, and of what waits for
        it: nobody is there. Ranks of a worker live beside each other."""
        rank = lender.unit.worker, lender.unit.dp_rank
        former = self._met.get(rank)
        self._met[rank] = lender
        if former is None or former.unit == lender.unit:
            return
        gone = {id(one): one for key, one in self._movers.items() if key[2] == former.unit}
        for mover in gone.values():
            self._drop(mover)
            for ended in mover.ended():
                self._note(ended)
                self._later(ReadEnded(ended))
        for place in [place for place in self._memory if place[0] == former.unit]:
            del self._memory[place]
        if former.address != lender.address and (line := self._lines.pop(former.address, None)):
            line.close()
        self._later(PeerReplaced(former.unit))

    def _drop(self, mover: Mover) -> None:
        """Close a road on which nobody is read any more; the next read opens it anew."""
        for key in [key for key, one in self._movers.items() if one is mover]:
            del self._movers[key]
            self._loop.remove_reader(mover.fileno())
            mover.close()

    # -- peers ---------------------------------------------------------------------------------

    async def _question(self, effect: AskPeer) -> None:
        """Ask, and hand on what was answered."""
        within_s = effect.until_s - self._loop.time()
        request = self._wrapped(effect.message)
        said = await self._ask(effect.peer.address, request, within_s=within_s)
        try:
            answer = decode_reply(said.frame) if isinstance(said, LenderSays) else None
        except InvalidInput:
            answer = None
        if isinstance(said, LenderSays) and said.memory:
            if isinstance(answer, Lent):
                self._note_memory(effect.peer.unit, answer.ticket, said.memory)
            elif isinstance(answer, Grown) and isinstance(effect.message, More):
                self._note_memory(effect.peer.unit, effect.message.ticket, said.memory)
        if answer is None:
            self._handle(QuestionLost(effect.question))
        else:
            self._handle(PeerAnswered(effect.question, answer))

    def _note_memory(self, unit: RoutingUnit, ticket: int, data: bytes) -> None:
        """Keep where a lend lies, the last MEMORIES_KEPT of them."""
        before = self._memory.get((unit, ticket))
        try:
            known = LenderPlaces(data) if before is None else before.joined(data)
            self._memory[unit, ticket] = known
        except InvalidInput as error:
            log.warning("%s says where it lends, and it can't be: %s", unit.worker, error)
        while len(self._memory) > MEMORIES_KEPT:
            del self._memory[next(iter(self._memory))]

    def _wrapped(self, message: PeerQuestion) -> AskLender:
        """Return the request that carries the message, and with a `Lend` where to look for it."""
        frame = encode_message(message)
        hint = self._hints.get(message.nonce) if isinstance(message, Lend) else None
        if hint is None:
            return AskLender(frame, self._unit, boot=self._boot)
        session, parent, tokens = hint
        return AskLender(frame, self._unit, session, parent, tokens, self._boot)

    async def _ask(
        self, address: str, request: RpcRequest, *, within_s: float, nonce: Nonce = NO_NONCE
    ) -> Said | None:
        line, repeat_s = self._line(address), within_s if nonce == NO_NONCE else ORDER_AGAIN_S
        if line is None:
            return None
        data = await line.ask(encode(request, nonce), within_s=within_s, repeat_s=repeat_s)
        try:
            return None if data is None else decode_answer(data)
        except InvalidInput:
            return None

    def _line(self, address: str) -> AsyncFramedClient | None:
        """Return the line to a peer's RPC port; None where the address is none, or wants keys."""
        line = self._lines.get(address)
        if line is None:
            try:
                line = AsyncFramedClient(
                    address, key=self._key, read_bytes_max=4 * MAX_FRAME_BYTES, unclaimed=_drop
                )
            except (InvalidInput, ZMQError) as error:
                log.warning("nobody is asked at %r: %s", address, error)
                return None
            self._lines[address] = line
        return line


def _drop(data: bytes) -> None:
    """Let an answer go for which nobody waits any more."""
