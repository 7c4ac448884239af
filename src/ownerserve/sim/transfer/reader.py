"""A reader performs what `transfer.control.target` decides, for one life of a simulated worker.

    Ask ── the network ── a lender of the peer's life, or nobody ── the network ── PeerAnswered
    StartRead ── a stream over the links ── did the ticket stand? ── ReadLanded | ReadFailed(gone)
    CommitRoom ── the cache's ingest takes what room was reserved for

The production counterpart is node.transfers.target_side: same control. Room is reserved in the
cache before a bring begins, as a restore does, so that nothing waits under a ticket for it. A read
is fenced and signed, as over TCP. Owns the reads under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf

import msgspec

from ownerserve.cache.outcomes import SlotsReserved, Verified
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.rpc import Nonce
from ownerserve.sim.timeline.heap import TimedCall
from ownerserve.sim.timeline.links import Stream
from ownerserve.sim.timeline.turns import prefix_name
from ownerserve.sim.transfer.lender import RANKS, LendHint, SimLender
from ownerserve.sim.transfer.network import CREDIT_BYTES, PeerNetwork
from ownerserve.sim.worker.worker import SimWorker
from ownerserve.transfer.control.events import (
    AskPeer,
    BringEnd,
    BringOver,
    BringUnwanted,
    BringWanted,
    CancelRead,
    CommitRoom,
    FreeRoom,
    HoldRoom,
    PeerAnswered,
    PeerLink,
    PeerReplaced,
    ReadEnded,
    ReserveRoom,
    RoomCommitted,
    RoomReserved,
    StartRead,
    TargetEvent,
    TellPeer,
    WakeUp,
    WantedArtifact,
)
from ownerserve.transfer.control.messages import NO_TURN, Lend, PeerAnswer, PeerQuestion, ReaderRank
from ownerserve.transfer.control.target import READ_S, TransferTarget
from ownerserve.transfer.vocabulary import (
    Ended,
    FramePiece,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    Road,
)

ALL_OF_IT = (ReaderRank(0, 0, 0),)
ROADS = (Road(RANKS[0].address, is_fenced=True, is_signed=True),)
_MADE = b"modelled"
"""Modelled bytes are never wrong: faults of media are misses, and injected where they are read."""

Over = Callable[[BringEnd, int, float], None]
"""Hears how a bring has ended, and how many bytes moved for it."""


class SimBring(msgspec.Struct, eq=False):
    """A bring is what is wanted of a lender, into a room that is reserved. `moved_bytes` came."""

    lender: SimLender
    hint: LendHint
    room: SlotsReserved
    compute_ms: float
    over: Over
    turn_id: TurnId = NO_TURN
    is_room_taken: bool = False
    moved_bytes: int = 0


class _Read(msgspec.Struct, eq=False):
    effect: StartRead
    bring: SimBring
    coming: Stream
    deadline_s: float
    moved_bytes: int = 0


class SimReader:
    """A reader is one life of a worker as one that brings."""

    def __init__(self, worker: SimWorker, network: PeerNetwork) -> None:
        self.unit = worker.unit
        self.is_alive = True
        self.state = TransferTarget(self.unit)
        self._worker = worker
        self._cache = worker.cache
        self._network = network
        self._numbers = 0
        self._brings: dict[int, SimBring] = {}
        self._by_room: dict[int, SimBring] = {}
        self._reads: dict[int, _Read] = {}
        self._asked: set[int] = set()
        """Questions on their way, or not answered yet."""
        self._met: dict[int, SimLender] = {}
        """The life of each worker that was asked last."""
        self._peers: dict[RoutingUnit, SimLender] = {}
        self._events: deque[TargetEvent] = deque()
        self._over: list[tuple[SimBring, BringEnd]] = []
        self._timer: TimedCall | None = None

    @property
    def brings(self) -> int:
        """`brings` counts those under way."""
        return len(self._brings)

    def bring(self, bring: SimBring, index: int, now: float) -> int:
        """Begin a bring from a life of worker `index`, and return its number. Its `over` is called
        later, never from here."""
        self._meet(bring.lender, index, now)
        self._numbers += 1
        number, hint = self._numbers, bring.hint
        self._brings[number] = bring
        piece = FramePiece(prefix_name(hint.tokens), 0, hint.cells, 0, 1)
        lender = bring.lender.unit
        wanted = BringWanted(
            number=number,
            nonce=Nonce(number),
            parts=((WantedArtifact("state", piece, hint.bytes),),),
            peers=(PeerLink(lender, lender.worker),),
            ranks=ALL_OF_IT,
            roads=ROADS,
            compute_ms=bring.compute_ms,
            turn_id=bring.turn_id,
        )
        self._take(wanted, now)
        return number

    def unwanted(self, number: int, now: float) -> None:
        """Bring it no more; what has moved of it is told. One that is over is no error."""
        self._take(BringUnwanted(number), now)

    def lost(self, lender: SimLender, now: float) -> None:
        """Have all reads from a life that has ended fail: its connections are broken."""
        for number in [n for n, read in self._reads.items() if read.bring.lender is lender]:
            self._fail(number, ReadFailure.PEER_LOST, now)

    def die(self, now: float) -> None:
        """End with the life. Whoever waits for a bring hears that it is over."""
        self.is_alive = False
        if self._timer is not None:
            self._timer.cancel()
        for read in self._reads.values():
            read.bring.moved_bytes += read.coming.give_up(now)
        self._reads.clear()
        brings, self._brings = list(self._brings.values()), {}
        for bring in brings:
            bring.over(BringEnd.UNWANTED, bring.moved_bytes, now)

    def check(self) -> None:
        """Raise InvariantViolated unless the control's books are whole."""
        if self.is_alive:
            self.state.check()

    # -- effects -------------------------------------------------------------------------------

    def _take(self, event: TargetEvent, now: float) -> None:
        """Have the control take an event, and all that follows; then tell who is over."""
        if not self.is_alive:
            return
        self._events.append(event)
        if len(self._events) > 1:
            return  # whoever performs now comes to it
        while self._events:
            for effect in self.state.handle(self._events[0], now):
                self._perform(effect, now)
            self._events.popleft()
        self._arm(now)
        while self._over:
            bring, end = self._over.pop(0)
            bring.over(end, bring.moved_bytes, now)

    def _perform(self, effect: object, now: float) -> None:
        match effect:
            case AskPeer(question, peer, message):
                if question not in self._asked:  # no message is lost here: once is enough
                    self._asked.add(question)
                    self._say(peer.unit, message, partial(self._answered, question), now)
            case TellPeer(peer, message):
                self._say(peer.unit, message, None, now)
            case ReserveRoom(number, part):
                bring = self._brings[number]
                bring.is_room_taken = True
                self._by_room[bring.room.ticket] = bring
                self._events.append(RoomReserved(number, part, bring.room.ticket))
            case StartRead():
                self._start(effect, now)
            case CancelRead(number):
                self._fail(number, ReadFailure.CANCELLED, now)
            case CommitRoom(reservation):
                room = self._by_room.pop(reservation)
                parts = landed_parts(self._worker, room.room, room.hint.end)
                self._cache.ingest.commit(reservation, parts, now)
                self._events.append(RoomCommitted(reservation))
            case HoldRoom(reservation):
                self._cache.ingest.abort(reservation, now)
            case FreeRoom(reservation):
                self._by_room.pop(reservation, None)
                self._cache.ingest.quiet(reservation)
            case BringOver(number, end):
                self._ended(self._brings.pop(number), end, now)
                if not self._brings:
                    self._asked.clear()  # of the dead, too

    def _ended(self, bring: SimBring, end: BringEnd, now: float) -> None:
        if not bring.is_room_taken:
            self._cache.ingest.abort(bring.room.ticket, now)
            self._cache.ingest.quiet(bring.room.ticket)
        self._over.append((bring, end))

    # -- peers ---------------------------------------------------------------------------------

    def _meet(self, lender: SimLender, index: int, now: float) -> None:
        """Note which life of a worker is asked now; a former one is over."""
        former = self._met.get(index)
        self._met[index] = lender
        if former is lender:
            return
        self._peers[lender.unit] = lender
        if former is not None:
            del self._peers[former.unit]
            self._take(PeerReplaced(former.unit), now)

    def _say(
        self,
        unit: RoutingUnit,
        message: PeerQuestion,
        answered: Callable[[PeerAnswer, float], None] | None,
        now: float,
    ) -> None:
        lender = self._peers.get(unit)
        if lender is None:
            return  # another life has its place
        hint = self._brings[message.nonce].hint if isinstance(message, Lend) else None
        here, there = self._worker.host, lender.host

        def back(answer: PeerAnswer) -> None:
            if answered is not None:
                hear = partial(answered, answer)
                self._network.say(there, here, hear, self._network.heap.now)

        asked = partial(_ask, lender, self.unit, message, hint, None if answered is None else back)
        self._network.say(here, there, asked, now)

    def _answered(self, question: int, answer: PeerAnswer, now: float) -> None:
        self._asked.discard(question)
        self._take(PeerAnswered(question, answer), now)

    # -- reads ---------------------------------------------------------------------------------

    def _start(self, effect: StartRead, now: float) -> None:
        bring, piece = self._by_room[effect.reservation], effect.piece
        if not bring.lender.is_alive:
            self._events.append(ReadEnded(ReadFailed(effect.number, ReadFailure.PEER_LOST)))
            return
        count = bring.hint.size(piece.first_unit, piece.end_unit)
        coming = self._network.carry(bring.lender.host, self._worker.host, count, now)
        coming.then = partial(self._arrived, effect.number)
        self._reads[effect.number] = _Read(effect, bring, coming, effect.deadline_s)

    def _arrived(self, number: int, now: float) -> None:
        """End a read whose last byte is there: it counts if the lender's ticket stands."""
        read = self._reads.pop(number)
        count = read.coming.count
        read.bring.moved_bytes += count
        ended: Ended = ReadFailed(number, ReadFailure.GONE)
        if read.bring.lender.read(read.effect.ticket, now):
            ended = ReadLanded(number, count)
        self._take(ReadEnded(ended), now)

    def _fail(self, number: int, why: ReadFailure, now: float) -> None:
        read = self._reads.pop(number, None)
        if read is not None:
            read.bring.moved_bytes += read.coming.give_up(now)
            self._take(ReadEnded(ReadFailed(number, why)), now)

    def _overdue(self, now: float) -> None:
        """End the reads that are late: too little of them has moved in a read's time."""
        for number, read in list(self._reads.items()):
            if read.deadline_s > now:
                continue
            before, read.moved_bytes = read.moved_bytes, read.coming.moved_bytes(now)
            if read.moved_bytes - before >= CREDIT_BYTES:
                read.deadline_s = now + READ_S
            else:
                self._fail(number, ReadFailure.LATE, now)

    # -- time ----------------------------------------------------------------------------------

    def _due_s(self) -> float:
        due_s = self.state.next_deadline()
        for read in self._reads.values():
            if read.deadline_s < due_s:
                due_s = read.deadline_s
        return due_s

    def _arm(self, now: float) -> None:
        due_s, timer = self._due_s(), self._timer
        if timer is not None and timer.call is not None:
            if timer.when_s <= due_s:
                return  # it is asked again then
            timer.cancel()
        self._timer = None if due_s == inf else self._network.heap.at(max(now, due_s), self._wake)

    def _wake(self, now: float) -> None:
        if not self.is_alive:
            return
        self._overdue(now)
        if self.state.next_deadline() <= now:
            self._take(WakeUp(), now)
        else:
            self._arm(now)


def _ask(
    lender: SimLender,
    reader: RoutingUnit,
    message: PeerQuestion,
    hint: LendHint | None,
    back: Callable[[PeerAnswer], None] | None,
    now: float,
) -> None:
    lender.asked(reader, message, hint=hint, answered=back, now=now)


def landed_parts(target: SimWorker, room: SlotsReserved, end: int) -> tuple[Verified, ...]:
    """Return what came, up to unit `end`: all that room was reserved for."""
    layout = target.cache.layout
    block = layout.block_tokens
    ranges = [(name, room.start // block, end // block) for name in layout.range_names]
    points = [
        (name, at // block, at // block) for at, slots in room.points.items() for name in slots
    ]
    return tuple(Verified(*part, _MADE, _MADE) for part in (*ranges, *points))
