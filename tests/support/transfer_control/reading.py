"""A simulated worker as one that brings: rooms in the real cache, and movers of three kinds that
write late, stall, break and end when they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ownerserve.cache.outcomes import Arrival, Inserted, SlotsReserved, Verified, Writer, WriterKind
from ownerserve.kv.prefix import hash_prefix
from ownerserve.transfer.control.events import (
    ArenaCopied,
    AskPeer,
    BringEnd,
    BringOver,
    BringWanted,
    CancelRead,
    CommitRoom,
    CopyFromArena,
    FreeArena,
    FreeRoom,
    HoldRoom,
    ReadEnded,
    ReadGoal,
    ReserveRoom,
    RoomCommitted,
    RoomRefused,
    RoomReserved,
    StartRead,
    TargetEffect,
    TellPeer,
)
from ownerserve.transfer.vocabulary import (
    ReadFailed,
    ReadFailure,
    ReadLanded,
    ReadQuiet,
    ReadUnproven,
    Road,
)
from tests.support.transfer_control.memory import (
    CELL,
    GARBAGE,
    B,
    Value,
    digest_of,
    places,
)

if TYPE_CHECKING:
    from tests.support.transfer_control.node import SimNode

READV = Road("readv", is_fenced=True, is_signed=False)
TCP = Road("tcp", is_fenced=True, is_signed=True)
RDMA = Road("rdma", is_fenced=False, is_signed=False)
ROADS = {road.name: road for road in (READV, TCP, RDMA)}


class Wished:
    """What a bring is of, and when it must be over."""

    def __init__(self, wanted: BringWanted, until_s: float, *, must_bring: bool) -> None:
        self.wanted = wanted
        self.until_s = until_s
        self.must_bring = must_bring


class Room:
    """Slots that a reservation has, by block."""

    def __init__(self, tokens: bytes, first: int, slots: dict[int, int]) -> None:
        self.tokens = tokens
        self.first = first
        self.slots = slots


class Reading:
    """What a node brings."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.wished: dict[int, Wished] = {}
        self.rooms: dict[int, Room] = {}
        """Reservations that are neither committed nor freed: nobody else has their slots."""
        self.reads: dict[int, SimRead] = {}
        self.unseen: dict[int, tuple[SimNode, int, float]] = {}
        """By reservation, the last read that its source did not see: under which ticket, when."""
        self.going: dict[int, set[int]] = {}
        """Reads that have not ended, by reservation."""
        self.arenas: dict[int, dict[int, Value]] = {}
        """Of each read into an arena what came, until its part is free."""

    def perform(self, effect: TargetEffect) -> None:
        node, world, cache = self.node, self.node.world, self.node.cache
        delay_s = world.net.rng.choice((0.0, 0.0, 0.002, 0.05))
        match effect:
            case AskPeer(question, peer, message):
                world.ask(node, question, peer, message=message)
            case TellPeer(peer, message):
                world.ask(node, 0, peer, message=message)
            case ReserveRoom():
                node.after(delay_s, lambda: self._reserve(effect))
            case StartRead(number, reservation):
                may_write = ROADS[effect.road].is_fenced or effect.goal is ReadGoal.ARENA
                world.require(may_write, "who can't be stopped writes into blocks")
                self.going.setdefault(reservation, set()).add(number)
                world.require(len(self.going[reservation]) <= 16, "more reads than credit")
                self.reads[effect.number] = SimRead(node, effect)
            case CancelRead(number):
                if number in self.reads:
                    self.reads[number].cancel()
            case CopyFromArena(number, reservation):
                node.after(delay_s, lambda: self._copy(number, reservation))
            case FreeArena(number):
                del self.arenas[number]
            case CommitRoom():
                node.after(delay_s, lambda: self._commit(effect))
            case HoldRoom(reservation):
                cache.ingest.abort(reservation, world.net.now_s)
            case FreeRoom(reservation):
                cache.ingest.quiet(reservation)
                del self.rooms[reservation]
            case BringOver():
                self._over(effect)

    def _over(self, over: BringOver) -> None:
        world, wished = self.node.world, self.wished.pop(over.number)
        world.counts[f"bring {over.end}"] += 1
        world.counts["parts"] += over.parts
        for road in over.read_bytes:
            world.counts[f"by {road}"] += 1
        for failure, count in over.failures.items():
            world.counts[f"read {failure}"] += count
        world.require(over.took_ms >= 0 and world.net.now_s <= wished.until_s, "a bring is late")
        is_whole = over.parts == len(wished.wanted.parts)
        world.require(is_whole == (over.end is BringEnd.BROUGHT), "a wrong report")
        if wished.must_bring:
            world.require(over.end is BringEnd.BROUGHT, f"all is well, and a bring {over.end}")

    def _reserve(self, effect: ReserveRoom) -> None:
        node, now = self.node, self.node.world.net.now_s
        part = node.world.parts[node.unit, effect.number][effect.part]
        cells = [node.world.names.cell(one.piece.artifact) for one in part]
        tokens, first = cells[-1].tokens, cells[0].first
        writer = Writer(WriterKind.PEER, "a peer")
        arrival = Arrival(tokens, hash_prefix(tokens, B)[-1], (), writer)
        got = node.cache.ingest.reserve(arrival, now)
        if isinstance(got, SlotsReserved) and got.start // B < first:  # what was before has gone
            node.cache.ingest.abort(got.ticket, now)
            node.cache.ingest.quiet(got.ticket)
        elif isinstance(got, SlotsReserved):
            slots = dict(enumerate(got.blocks, got.start // B))
            self.rooms[got.ticket] = Room(tokens, first, slots)
            node.brings(RoomReserved(effect.number, effect.part, got.ticket))
            return
        node.brings(RoomRefused(effect.number, effect.part))

    def _commit(self, effect: CommitRoom) -> None:
        node, world = self.node, self.node.world
        room = self.rooms.pop(effect.reservation)
        if effect.reservation in self.unseen:
            source, ticket, read_s = self.unseen[effect.reservation]
            stood = source.lending.stood_s.get(ticket, -1.0) >= read_s
            world.require(stood, "nobody asked for the ticket after a read that nobody saw")
        for block, slot in room.slots.items():
            world.require(node.block_is(slot, room.tokens, block), "wrong bytes are committed")
        parts = []
        for artifact, digests in effect.verified.items():
            first, said = world.names.cell(artifact).first, b"".join(digests)
            parts.append(Verified("kv", first, first + CELL, said, said))
        done = node.cache.ingest.commit(effect.reservation, parts, world.net.now_s)
        world.require(isinstance(done, Inserted), "what was verified is not taken")
        node.brings(RoomCommitted(effect.reservation))

    def _copy(self, number: int, reservation: int) -> None:
        read = self.reads[number]
        for index, value in self.arenas[number].items():
            self.write(reservation, read, index, value)
        self.node.brings(ArenaCopied(number))

    def write(self, reservation: int, read: SimRead, index: int, value: Value) -> None:
        """A byte is written into a block: it must be the reservation's still."""
        room = self.rooms.get(reservation)
        self.node.world.require(room is not None, "a write into blocks that are somebody else's")
        assert room is not None
        unit, layer, head = read.places[index]
        slot = room.slots.get(self.node.world.names.cell(read.start.piece.artifact).first + unit)
        if slot is not None:  # else it is resident, and the bytes go nowhere
            self.node.memory[slot, layer, head] = value


class SimRead:
    """One read of a mover: it goes from place to place, and ends as its road does."""

    def __init__(self, reader: SimNode, start: StartRead) -> None:
        self.reader, self.start = reader, start
        self.world = reader.world
        self.road = ROADS[start.road]
        heads = range(start.rank.first_head, start.rank.end_head)
        self.places = [(*where, head) for where in places(start.piece) for head in heads]
        self.values: list[Value] = []
        self.is_cancelled = self.is_over = False
        if start.goal is ReadGoal.ARENA:
            reader.reading.arenas[start.number] = {}
        self._later(self._begin)

    def _later(self, action: Callable[[], None], delay_s: float | None = None) -> None:
        rng = self.world.net.rng
        wait_s = rng.choice((0.0, 0.001, 0.001, 0.2)) if delay_s is None else delay_s
        if self.road.is_fenced:
            self.reader.after(wait_s, action)
        else:  # a device writes whether or not the process runs

            def act() -> None:
                if not self.reader.is_dead:
                    action()

            self.world.net.after(wait_s, act)

    def cancel(self) -> None:
        self.is_cancelled = True

    def _begin(self) -> None:
        source = self.world.node_of(self.start.peer)
        if not self.world.is_road_open(self.reader, source, self.road):
            self._fail(ReadFailure.UNABLE)
        elif source is None:
            self._fail(ReadFailure.PEER_LOST)
        elif self.road.is_signed and self.start.ticket not in source.lending.standing:
            self._fail(ReadFailure.REFUSED)
        else:
            self._copy()

    def _copy(self) -> None:
        source, net = self.world.node_of(self.start.peer), self.world.net
        if self.is_cancelled and net.rng.random() < 0.7:
            self._fail(ReadFailure.CANCELLED)
        elif net.now_s >= self.start.deadline_s:
            self._fail(ReadFailure.LATE)
        elif source is None or self.world.breaks():
            self._fail(ReadFailure.PEER_LOST)
        elif self.road.is_signed and source.frozen_until_s > net.now_s:
            self._later(self._copy, 0.1)
        else:
            self._copy_from(source)

    def _copy_from(self, source: SimNode) -> None:
        count = 1 + self.world.net.rng.randrange(4)
        at = len(self.values)
        for index, (unit, layer, head) in enumerate(self.places[at : at + count], at):
            value = source.lending.value(
                self.start.ticket, self.start.piece.artifact, unit, layer=layer, head=head
            )
            if self.world.garbles():
                value = GARBAGE
            self.values.append(value)
            self._write(index, value)
        self._later(self._copy if len(self.values) < len(self.places) else self._finish)

    def _write(self, index: int, value: Value) -> None:
        if self.start.goal is ReadGoal.BLOCKS:
            self.reader.reading.write(self.start.reservation, self, index, value)
            return
        arena = self.reader.reading.arenas.get(self.start.number)
        self.world.require(arena is not None, "a write into an arena that is another read's")
        assert arena is not None
        arena[index] = value

    def _finish(self) -> None:
        source = self.world.node_of(self.start.peer)
        if digest_of(self.values) != self.start.digest:
            self._fail(ReadFailure.CORRUPT)
        elif self.road.is_signed and (
            source is None or source.frozen_until_s > self.world.net.now_s
        ):
            self._fail(ReadFailure.PEER_LOST if source is None else ReadFailure.LATE)
        elif (
            self.road.is_signed
            and source is not None
            and not source.lending.stands(self.start.ticket)
        ):
            self._fail(ReadFailure.GONE)
        else:
            if source is not None and not self.road.is_signed:
                unseen = (source, self.start.ticket, self.world.net.now_s)
                self.reader.reading.unseen[self.start.reservation] = unseen
            self.reader.after(0.0, lambda: self._tell(ReadLanded(self.start.number, 1)))

    def _tell(self, ended: ReadLanded | ReadFailed | ReadUnproven | ReadQuiet) -> None:
        self.reader.reading.going[self.start.reservation].discard(self.start.number)
        self.reader.brings(ReadEnded(ended))
        if self.world.net.rng.random() < 0.1:
            self.reader.brings(ReadEnded(ended))

    def _fail(self, reason: ReadFailure) -> None:
        number = self.start.number
        if self.road.is_fenced or reason is ReadFailure.UNABLE:
            self.reader.after(0.0, lambda: self._tell(ReadFailed(number, reason)))
            return
        self.reader.after(0.0, lambda: self._tell(ReadUnproven(number, reason)))
        self._later(self._write_late, self.world.net.rng.choice((0.01, 0.5, 3.0)))

    def _write_late(self) -> None:
        self._write(0, GARBAGE)
        self.reader.after(0.0, lambda: self._tell(ReadQuiet(self.start.number)))
