"""Rooms are the slots that parts of brings come into, from their reservation to the last writer's
end. They own the reads, and so the one answer to whether somebody may still write. Pure.

    room        leaves by                                            its slots
    WAITED      reserved | there is no room                          none yet
    RESERVED    the first read                                       nobody writes
    READING     commit: all has landed, and the ticket stood after   `writers` write
    VERIFIED    it is in the tree: OVER                              nobody writes
    HELD        its last writer has stopped: FreeRoom, OVER          `writers` may write

    RESERVED, READING -- give_up: HoldRoom --> HELD

    read        leaves by                                            may write
    READING     landed | failed: over                                into its goal
                landed in an arena: CopyFromArena                    into its arena
                unproven                                             into its goal
    COPYING     copied: over                                         into the slots
    UNPROVEN    quiet: over                                          into its goal, an arena

A room is committed or freed only when none of its reads may write (invariant 14). Who is not fenced
reads into an arena, whose part is free again when the read is over.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf

import msgspec

from ownerserve.kv.errors import InvariantViolated
from ownerserve.transfer.control.events import (
    CancelRead,
    CommitRoom,
    CopyFromArena,
    FreeArena,
    FreeRoom,
    HoldRoom,
    PeerLink,
    ReadGoal,
    RoomReserved,
    StartRead,
    TargetEffect,
)
from ownerserve.transfer.control.messages import LentRank
from ownerserve.transfer.control.pieces import PIECE_BYTES
from ownerserve.transfer.vocabulary import (
    Ended,
    FramePiece,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    ReadQuiet,
    ReadUnproven,
    Road,
)

READS_MAX, READ_BYTES_MAX = 16, 64 << 20
"""The reads into a room that are under way at once: credit."""


class RoomState(StrEnum):
    """A `RoomState` is where the slots of a part stand; the module's table says how they go on."""

    WAITED = "waited"
    RESERVED = "reserved"
    READING = "reading"
    VERIFIED = "verified"
    HELD = "held"
    OVER = "over"


class PieceTask(msgspec.Struct, eq=False):
    """A `PieceTask` is one piece that one rank is to read, tried `attempts` times."""

    piece: FramePiece
    rank: LentRank
    digest: bytes
    bytes: int
    attempts: int = 0

    @property
    def large_bytes(self) -> int:
        """Return its bytes where they are more than a piece is cut to, else 0."""
        return self.bytes if self.bytes > PIECE_BYTES else 0


class PartRoom(msgspec.Struct, eq=False):
    """A `PartRoom` is the slots of one part of the bring `number`. `reading` are its reads that
    have not ended, of `reading_bytes`, with `large_bytes` in pieces that could not be cut to
    PIECE_BYTES; `writers` those that may write into the slots now.

    `landed_at` is the last question that was asked before a read landed that nobody signed; None:
    nothing is left to ask for.
    """

    number: int
    part: int
    state: RoomState = RoomState.WAITED
    reservation: int = 0
    reading: set[int] = set()
    reading_bytes: int = 0
    large_bytes: int = 0
    writers: set[int] = set()
    landed_at: int | None = None
    held_s: float = inf

    @property
    def is_open(self) -> bool:
        """Tell whether reads may still count for it."""
        return self.state in (RoomState.RESERVED, RoomState.READING)


class ReadPhase(StrEnum):
    """A `ReadPhase` is where a read stands, between its start and the end of its last writer."""

    READING = "reading"
    COPYING = "copying"  # from the arena that it landed in
    UNPROVEN = "unproven"  # it failed, and its writer may write


class OpenRead(msgspec.Struct, eq=False):
    """An `OpenRead` is a read that a mover began, and that is not quiet yet."""

    task: PieceTask
    room: PartRoom
    road: Road
    goal: ReadGoal
    phase: ReadPhase = ReadPhase.READING


class ReadOutcome(msgspec.Struct, frozen=True, eq=False):
    """A `ReadOutcome` is what is to be done when something came of a read. `reading`: whoever waits
    for its room has to know; it has landed, or it is to be tried again for `failure`."""

    effects: list[TargetEffect] = []
    reading: OpenRead | None = None
    failure: ReadFailure | None = None


class BringRooms:
    """`BringRooms` are all rooms and reads of one target."""

    def __init__(self) -> None:
        self._rooms: dict[int, PartRoom] = {}  # by reservation
        self._waited: dict[tuple[int, int], PartRoom] = {}  # by bring and part
        self._reads: dict[int, OpenRead] = {}
        self._numbers = 0

    # -- a room's slots ------------------------------------------------------------------------

    def wait_for(self, number: int, part: int) -> PartRoom:
        """Make the room of a part, which is being reserved."""
        room = self._waited[number, part] = PartRoom(number, part)
        return room

    def reserved(self, event: RoomReserved) -> tuple[PartRoom, list[TargetEffect]]:
        """Take the slots that were waited for; they are freed where the room was given up since."""
        room = self._waited.pop((event.number, event.part))
        if self._is_given_up(room):
            return room, [HoldRoom(event.reservation), FreeRoom(event.reservation)]
        room.state, room.reservation = RoomState.RESERVED, event.reservation
        self._rooms[event.reservation] = room
        return room, []

    def _is_given_up(self, room: PartRoom) -> bool:
        return room.state is RoomState.HELD

    def refused(self, number: int, part: int) -> PartRoom:
        """Note that there are no slots for the room."""
        return self._waited.pop((number, part))

    def commit(self, room: PartRoom, verified: dict[bytes, tuple[bytes, ...]]) -> CommitRoom:
        """Have the cache take a room in which all has landed."""
        room.state = RoomState.VERIFIED
        return CommitRoom(room.reservation, verified)

    def take(self, reservation: int) -> PartRoom:
        """Take out a room whose slots are in the tree, or free."""
        room = self._rooms.pop(reservation)
        room.state = RoomState.OVER
        return room

    def give_up(self, room: PartRoom, now: float) -> list[TargetEffect]:
        """Give up a room that is not committed: its slots are held while somebody may write."""
        is_waited = room.state is RoomState.WAITED
        room.state, room.held_s = RoomState.HELD, now
        if is_waited:
            return []
        cancels = [CancelRead(number) for number in sorted(room.reading)]
        return [HoldRoom(room.reservation), *cancels, *self._free(room)]

    def _free(self, room: PartRoom) -> list[TargetEffect]:
        if room.state is not RoomState.HELD or not self._is_quiet(room):
            return []
        self.take(room.reservation)
        return [FreeRoom(room.reservation)]

    def _is_quiet(self, room: PartRoom) -> bool:
        return not room.writers

    # -- reads ---------------------------------------------------------------------------------

    def has_credit(self, room: PartRoom, task: PieceTask) -> bool:
        """Tell whether one more read may begin."""
        if not room.reading:
            return True
        return len(room.reading) < READS_MAX and room.reading_bytes + task.bytes <= READ_BYTES_MAX

    def read(
        self,
        room: PartRoom,
        task: PieceTask,
        *,
        peer: PeerLink,
        ticket: int,
        road: Road,
        deadline_s: float,
    ) -> StartRead:
        """Begin to read a piece."""
        self._numbers += 1
        reading = OpenRead(task, room, road, self._goal(road))
        self._reads[self._numbers] = reading
        room.state = RoomState.READING
        room.reading.add(self._numbers)
        room.reading_bytes += task.bytes
        room.large_bytes += task.large_bytes
        if reading.goal is ReadGoal.BLOCKS:
            self._writes(room, self._numbers)
        return StartRead(
            number=self._numbers,
            reservation=room.reservation,
            peer=peer,
            road=road.name,
            ticket=ticket,
            piece=task.piece,
            rank=task.rank,
            digest=task.digest,
            goal=reading.goal,
            deadline_s=deadline_s,
        )

    def _writes(self, room: PartRoom, number: int) -> None:
        """Count a read among those that may write into the slots."""
        room.writers.add(number)

    def _goal(self, road: Road) -> ReadGoal:
        return ReadGoal.BLOCKS if road.is_fenced else ReadGoal.ARENA

    def ended(self, ended: Ended) -> ReadOutcome:
        """Take what a mover said of a read."""
        reading = self._reads.get(ended.number)
        if reading is None:
            return ReadOutcome()
        if isinstance(ended, ReadQuiet):
            is_unproven = reading.phase is ReadPhase.UNPROVEN
            return ReadOutcome(self._stopped(ended.number, reading) if is_unproven else [])
        if reading.phase is not ReadPhase.READING:
            return ReadOutcome()
        room = reading.room
        room.reading.remove(ended.number)
        room.reading_bytes -= reading.task.bytes
        room.large_bytes -= reading.task.large_bytes
        match ended:
            case ReadLanded(number) if reading.goal is ReadGoal.ARENA and room.is_open:
                reading.phase = ReadPhase.COPYING
                self._writes(room, number)
                return ReadOutcome([CopyFromArena(number, room.reservation)])
            case ReadLanded(number):
                return self._told(self._stopped(number, reading), reading, None)
            case ReadFailed(number, reason):
                return self._told(self._stopped(number, reading), reading, reason)
            case ReadUnproven(_, reason):
                reading.phase = ReadPhase.UNPROVEN
                return self._told([], reading, reason)

    def copied(self, number: int) -> ReadOutcome:
        """Note that what had landed in an arena is in the slots."""
        reading = self._reads[number]
        return self._told(self._stopped(number, reading), reading, None)

    def _told(
        self, effects: list[TargetEffect], reading: OpenRead, failure: ReadFailure | None
    ) -> ReadOutcome:
        if not reading.room.is_open:
            return ReadOutcome(effects)
        return ReadOutcome(effects, reading, failure)

    def _stopped(self, number: int, reading: OpenRead) -> list[TargetEffect]:
        """Forget a read: no writer of it is left."""
        del self._reads[number]
        reading.room.writers.discard(number)
        free: list[TargetEffect] = [FreeArena(number)] if reading.goal is ReadGoal.ARENA else []
        return free + self._free(reading.room)

    # -- what the checks read ------------------------------------------------------------------

    def counts(self, now: float) -> dict[str, float]:
        """Count the rooms, those that are held, the age of the oldest of these in s, the reads, and
        those of them whose writer may write on though they failed."""
        held = [room.held_s for room in self._rooms.values() if room.state is RoomState.HELD]
        return {
            "rooms": len(self._rooms) + len(self._waited),
            "held": len(held),
            "held_s": now - min(held, default=now),
            "reads": len(self._reads),
            "unproven": sum(one.phase is ReadPhase.UNPROVEN for one in self._reads.values()),
        }

    def check(self) -> None:
        """Raise InvariantViolated unless invariant 14 holds."""
        for room in self._rooms.values():
            if room.state is RoomState.VERIFIED and room.writers:
                raise InvariantViolated("invariant 14: committed while somebody may write")
            if room.state is RoomState.HELD and not room.writers:
                raise InvariantViolated("invariant 14: held, and nobody writes")
            if not room.writers | room.reading <= self._reads.keys():
                raise InvariantViolated("invariant 14: a writer that nobody waits for")
        for number, reading in self._reads.items():
            if reading.goal is not ReadGoal.BLOCKS:
                continue
            if not reading.road.is_fenced:
                raise InvariantViolated("invariant 14: who is not fenced writes into blocks")
            if number not in reading.room.writers:
                raise InvariantViolated("invariant 14: somebody writes and does not count")
            if self._rooms.get(reading.room.reservation) is not reading.room:
                raise InvariantViolated("invariant 14: somebody writes into slots that are free")
