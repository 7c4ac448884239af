"""A transfer is state on its way from one worker's device to another's: a modelled fetch, send or
migration.

Owns what is under way. Room at the target is reserved first and is the pin (two-phase); nothing is
matchable there before all of it has landed. W9's machines replace this model.

    bring -> room? -- no --> waits for it, until `timeout_s` -> NO_ROOM
               | yes
               v
    source's NIC out and target's NIC in, or their host's memory: fairly -> commit -> LANDED
               |                                `--- not there after `timeout_s`  -> LATE
               `--- the source died meanwhile -> SOURCE_LOST, the target -> LOST
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from functools import partial

import msgspec

from ownerserve.cache.outcomes import (
    Arrival,
    Match,
    SlotsReserved,
    Verified,
    Writer,
    WriterKind,
)
from ownerserve.kv.ids import Incarnation, PrefixHash
from ownerserve.kv.prefix import TOKEN_BYTES, HashedPrefix, Packed
from ownerserve.sim.timeline.heap import Heap, TimedCall
from ownerserve.sim.timeline.links import Link, Stream, stream
from ownerserve.sim.timeline.turns import prefix_name
from ownerserve.sim.worker.worker import SimWorker


class TransferOutcome(StrEnum):
    """An outcome says what came of a transfer."""

    LANDED = "landed"
    NOTHING_TO_BRING = "nothing_to_bring"
    NO_ROOM = "no_room"
    LATE = "late"
    SOURCE_LOST = "source_lost"
    LOST = "lost"
    """The target is down, or died meanwhile: the turn must run elsewhere."""


class TransferResult(msgspec.Struct, frozen=True, gc=False):
    """A result says how a transfer ended.

    When it LANDED, `units` of the prompt are at the target now. `bytes` left the source for it.
    It waited `waited_s` for room.
    """

    landing: TransferOutcome
    units: int = 0
    bytes: int = 0
    waited_s: float = 0.0


Then = Callable[[TransferResult, float], None]


class _Wish(msgspec.Struct, gc=False):
    source: SimWorker
    target: SimWorker
    lives: tuple[Incarnation, Incarnation]
    prompt: Packed
    then: Then
    asked_s: float


class ChainedIds(HashedPrefix):
    """This digester names tokens by their last unit id: ids are chained over a run, so that it
    names all before it and nothing is hashed."""

    def digest_of(self, tokens: Packed) -> PrefixHash:
        """Return the name of `tokens`."""
        return prefix_name(tokens)


_CHAINED = ChainedIds(1)


class Transfers:
    """The transfers between all workers of a fleet are made here; this class owns those under
    way."""

    def __init__(self, heap: Heap, *, timeout_s: float, switch: Link | None = None) -> None:
        """`switch`: what all go over between two hosts' NICs; None where it never blocks."""
        self._switch = () if switch is None else (switch,)
        self.bytes = 0
        self.count = 0
        self._heap = heap
        self._timeout_s = timeout_s
        self._waiting: dict[int, deque[_Wish]] = {}

    def bring(
        self, source: SimWorker, target: SimWorker, prompt: Packed, *, then: Then, now: float
    ) -> None:
        """Copy what `source` has of `prompt`, on the device or in host memory, and `target` lacks.
        `then` is called later."""
        lives = (source.incarnation, target.incarnation)
        wish = _Wish(source, target, lives, prompt, then, now)
        if self._waiting.get(target.index):
            self._wait(wish, now, is_first=False)  # behind those who came before
        else:
            self._try(wish, now)

    def room_at(self, target: SimWorker, now: float) -> None:
        """Try those who wait for room at `target`, in order, as something ended there."""
        waiting = self._waiting.get(target.index)
        while waiting:
            wish = waiting.popleft()
            before = len(waiting)
            self._try(wish, now, is_first=True)
            if len(waiting) > before:
                return

    def _try(self, wish: _Wish, now: float, *, is_first: bool = False) -> None:
        source, target = wish.source, wish.target
        died = _who_died(wish)
        if died is not None:
            self._heap.at(
                now, partial(wish.then, TransferResult(died, waited_s=now - wish.asked_s))
            )
            return
        held, there = _held(source, wish.prompt), _held(target, wish.prompt)
        if held <= there:
            brought = TransferResult(TransferOutcome.NOTHING_TO_BRING, waited_s=now - wish.asked_s)
            self._heap.at(now, partial(wish.then, brought))
            return
        tokens = wish.prompt[: held * TOKEN_BYTES]
        points = (held,) if target.point_bytes else ()
        arrival = Arrival(tokens, prefix_name(tokens), points, _PEER, _CHAINED)
        target.settle(now)
        room = target.cache.ingest.reserve(arrival, now)
        if not isinstance(room, SlotsReserved):
            self._wait(wish, now, is_first=is_first)
            return
        count = round((held - room.start) * target.unit_bytes) + len(points) * target.point_bytes
        self.count += 1
        waited_s = now - wish.asked_s
        coming = stream(source.host.way_to(target.host, between=self._switch), count, now)
        late = TransferResult(TransferOutcome.LATE, held, 0, waited_s)
        overdue = self._heap.at(
            max(now, wish.asked_s + self._timeout_s),
            partial(self._late, wish, room, late, coming),
        )
        landed = TransferResult(TransferOutcome.LANDED, held, count, waited_s)
        coming.then = partial(self._landed, wish, room, landed, overdue)

    def _wait(self, wish: _Wish, now: float, *, is_first: bool) -> None:
        until_s = wish.asked_s + self._timeout_s
        if now >= until_s:
            wish.then(TransferResult(TransferOutcome.NO_ROOM, waited_s=now - wish.asked_s), now)
            return
        waiting = self._waiting.setdefault(wish.target.index, deque())
        if is_first:
            waiting.appendleft(wish)
        else:
            waiting.append(wish)
            self._heap.at(until_s, partial(self._overdue, wish))

    def _overdue(self, wish: _Wish, now: float) -> None:
        waiting = self._waiting.get(wish.target.index)
        if waiting is not None and any(other is wish for other in waiting):
            self._waiting[wish.target.index] = deque(w for w in waiting if w is not wish)
            self._wait(wish, now, is_first=True)

    def _landed(
        self,
        wish: _Wish,
        room: SlotsReserved,
        brought: TransferResult,
        overdue: TimedCall,
        now: float,
    ) -> None:
        overdue.cancel()
        self._ended(wish, room, brought, now)

    def _late(
        self,
        wish: _Wish,
        room: SlotsReserved,
        brought: TransferResult,
        coming: Stream,
        now: float,
    ) -> None:
        """Give up what is not there in time: the rest of it is not sent."""
        moved = coming.give_up(now)
        self._ended(wish, room, msgspec.structs.replace(brought, bytes=moved), now)

    def _ended(self, wish: _Wish, room: SlotsReserved, brought: TransferResult, now: float) -> None:
        target, died = wish.target, _who_died(wish)
        self.bytes += brought.bytes
        if died is not None:
            brought = msgspec.structs.replace(brought, landing=died)
        if brought.landing is TransferOutcome.LANDED:
            target.cache.ingest.commit(room.ticket, _parts(target, room, brought.units), now)
        elif died is not TransferOutcome.LOST:
            target.cache.ingest.abort(room.ticket, now)
            target.cache.ingest.quiet(room.ticket)  # its writer is the model's, and has stopped
        wish.then(brought, now)
        target.look(now)


_PEER = Writer(WriterKind.PEER)
_MADE = b"modelled"
"""Modelled bytes are never wrong: faults of media are misses, and injected where they are read."""


def _parts(target: SimWorker, room: SlotsReserved, end: int) -> tuple[Verified, ...]:
    """Return what came, up to unit `end`: all that room was reserved for."""
    layout = target.cache.layout
    block = layout.block_tokens
    ranges = [(name, room.start // block, end // block) for name in layout.range_names]
    points = [
        (name, at // block, at // block) for at, slots in room.points.items() for name in slots
    ]
    return tuple(Verified(*part, _MADE, _MADE) for part in (*ranges, *points))


def _who_died(wish: _Wish) -> TransferOutcome | None:
    source, target = wish.source, wish.target
    if not target.is_up or target.incarnation != wish.lives[1]:
        return TransferOutcome.LOST
    if not source.is_up or source.incarnation != wish.lives[0]:
        return TransferOutcome.SOURCE_LOST
    return None


def _held(worker: SimWorker, prompt: Packed) -> int:
    """Return the units of a prompt that the worker can send, or that need not be sent as they are
    there."""
    on_device = _complete(worker.cache.match(prompt))
    return max(on_device, worker.machine.node.stored_units(prompt))


def _complete(match: Match) -> int:
    """Return the deepest boundary, in units, at which nothing is lacking."""
    return next((point.position for point in match.points if not point.lacks), 0)
