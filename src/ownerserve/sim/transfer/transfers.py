"""Transfers bring state from one worker's device to another's: a fetch, a migration, a prompt that
another worker computes.

    bring ── look ── room? ── no ──> waits in line, until `timeout_s` -> NO_ROOM
                       | yes
                       v
             the bring of transfer.control ── BROUGHT -> LANDED
                       |`-- by its own deadlines, or `timeout_s` -> LATE
                       |`-- refused, or the source needed the room -> GONE
                       `--- the source died -> SOURCE_LOST, the target -> LOST

    follow ── the source begins to compute it ── room ── the same bring, which grows ── send

Owns who waits for room, and each worker's lender and reader. Decides nothing of a bring: control
does (transfer.control), and whoever asked decides what follows.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from math import inf

import msgspec

from ownerserve.cache.outcomes import (
    Arrival,
    CacheRefused,
    NoRoom,
    SlotsReserved,
    Writer,
    WriterKind,
)
from ownerserve.kv.ids import PrefixHash, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, HashedPrefix, Packed
from ownerserve.sim.engine.sequence import SimSequence
from ownerserve.sim.timeline.heap import TimedCall
from ownerserve.sim.timeline.turns import prefix_name
from ownerserve.sim.transfer.lender import LendHint, SimLender, held_units
from ownerserve.sim.transfer.network import PeerNetwork
from ownerserve.sim.transfer.outcomes import Then, TransferOutcome, TransferResult
from ownerserve.sim.transfer.reader import SimBring, SimReader
from ownerserve.sim.worker.worker import SimWorker
from ownerserve.transfer.control.events import BringEnd
from ownerserve.transfer.control.messages import NO_TURN
from ownerserve.transfer.control.target import lend_s

ORDER_SHARE = 4.0
"""What a peer computes may take so many times as long as computing here: node.transfers.peers'."""
GROWING_CELLS = 8
"""A prompt that is read while it is computed comes in so many parts at most."""

_PEER = Writer(WriterKind.PEER)
_ENDS = {
    BringEnd.BROUGHT: TransferOutcome.LANDED,
    BringEnd.SHORT: TransferOutcome.GONE,
    BringEnd.REFUSED: TransferOutcome.GONE,
    BringEnd.GONE: TransferOutcome.GONE,
}
"""What each end is to the fleet; every other one is LATE."""


class ChainedIds(HashedPrefix):
    """This digester names tokens by their last unit id: ids are chained over a run, so that it
    names all before it and nothing is hashed."""

    def digest_of(self, tokens: Packed) -> PrefixHash:
        """Return the name of `tokens`."""
        return prefix_name(tokens)


_CHAINED = ChainedIds(1)


class _Life(msgspec.Struct, eq=False):
    """A life is one of a worker, as one that lends and brings."""

    worker: SimWorker
    lender: SimLender
    reader: SimReader


class _Wish(msgspec.Struct, eq=False):
    """A wish is a prompt that `target` is to have of what `source` has, for the turn `for_turn`.
    `turn_id` names the turn that computes it there, in `ready_ms`. It may take `share` of what
    computing it would. `bring` is the reader's number of it once it has begun; `moved_bytes` have
    crossed of which nobody was told."""

    source: _Life
    target: _Life
    prompt: Packed
    then: Then | None
    until_s: float
    share: float
    for_turn: TurnId = NO_TURN
    moved_bytes: int = 0
    ready_ms: float = 0.0
    lined_s: float = 0.0
    turn_id: TurnId = NO_TURN
    held: int = 0
    waited_s: float = 0.0
    bring: int = 0
    is_over: bool = False
    timer: TimedCall | None = None


class _Part(msgspec.Struct, eq=False):
    """A part is a prompt that is computed at `source` for a turn at `target`. It was to be there in
    `ready_ms` when it was ordered, by the source's word."""

    source: SimWorker
    target: SimWorker
    sequence: SimSequence
    ready_ms: float
    wish: _Wish | None = None


class Transfers:
    """The transfers between all workers of a fleet are made here; this class owns those under
    way. `bytes` moved and `count` were begun. `network`: what they go over."""

    def __init__(self, network: PeerNetwork, *, timeout_s: float) -> None:
        self.bytes = 0
        self.count = 0
        self.network = network
        self._heap = network.heap
        self._timeout_s = timeout_s
        self._lives: dict[int, _Life] = {}
        self._open: dict[int, _Wish] = {}
        self._asked: dict[TurnId, _Wish] = {}
        self._waiting: dict[int, deque[_Wish]] = {}
        self._parts: dict[TurnId, _Part] = {}

    # -- what the fleet asks -------------------------------------------------------------------

    def bring(
        self,
        source: SimWorker,
        target: SimWorker,
        prompt: Packed,
        *,
        then: Then,
        now: float,
        for_turn: TurnId = NO_TURN,
    ) -> None:
        """Copy what `source` has of `prompt`, on the device or in host memory, and `target` lacks.
        `then` is called later, or when what the turn asked for is called off."""
        self._ask(source, target, prompt, then=then, share=1.0, now=now, for_turn=for_turn)

    def _ask(
        self,
        source: SimWorker,
        target: SimWorker,
        prompt: Packed,
        *,
        then: Then,
        share: float,
        now: float,
        for_turn: TurnId,
        moved_bytes: int = 0,
    ) -> None:
        if not target.is_up or not source.is_up:
            is_lost = not target.is_up
            died = TransferOutcome.LOST if is_lost else TransferOutcome.SOURCE_LOST
            self._heap.at(now, partial(then, TransferResult(died, bytes=moved_bytes)))
            return
        lives = self._life(source), self._life(target)
        until_s = now + self._timeout_s
        wish = _Wish(*lives, prompt, then, until_s, share, for_turn, moved_bytes)
        self._open[id(wish)] = wish
        if for_turn != NO_TURN:
            self._asked[for_turn] = wish
        self._look(wish, now)

    def follow(
        self, source: SimWorker, target: SimWorker, sequence: SimSequence, now: float
    ) -> None:
        """Send what `source` computes of a prompt, a sequence that was submitted there, while it is
        computed; `send` is to follow when it is."""
        if not source.is_up:
            return
        part = _Part(source, target, sequence, _ready_ms(source))
        self._parts[sequence.turn_id] = part
        self._life(source).lender.expect(sequence, partial(self._began, part))

    def send(
        self, source: SimWorker, target: SimWorker, sequence: SimSequence, *, then: Then, now: float
    ) -> None:
        """Have all of a prompt come that `source` has computed now; what of it is on its way goes
        on. `then` is called later."""
        turn_id = sequence.turn_id
        part = self._parts.get(turn_id)
        wish = None if part is None else part.wish
        if wish is None or wish.is_over:
            moved_bytes = self.call_off(turn_id, now)
            self._ask(
                source,
                target,
                sequence.turn.prompt,
                then=then,
                share=ORDER_SHARE,
                now=now,
                for_turn=turn_id,
                moved_bytes=moved_bytes,
            )
            return
        wish.then, wish.until_s = then, now + self._timeout_s
        wish.lined_s, wish.waited_s = now, 0.0  # while it was computed nothing waited for it
        self._until(wish, wish.until_s)

    def call_off(self, turn_id: TurnId, now: float) -> int:
        """Bring no more for a turn, or of a prompt that is computed for one. Who waits for it hears
        so now; return the bytes that crossed where nobody does. It is no error where nothing is
        under way."""
        asked, part = self._asked.pop(turn_id, None), self._parts.pop(turn_id, None)
        if asked is not None:
            self._give_up(asked, now)
        if part is None:
            return 0
        life, wish = self._lives.get(part.source.index), part.wish
        if life is not None:
            life.lender.forget(turn_id, now)
        if wish is None:
            return 0
        if not wish.is_over:
            self._give_up(wish, now)
        return wish.moved_bytes

    def room_at(self, target: SimWorker, now: float) -> None:
        """Try those who wait for room at `target`, in order, as something ended there."""
        waiting = self._waiting.get(target.index)
        while waiting:
            wish = waiting.popleft()
            before = len(waiting)
            self._try(wish, now, is_first=True)
            if len(waiting) > before:
                return

    def check(self) -> None:
        """Raise InvariantViolated unless the books of all lenders and readers are whole."""
        for life in self._lives.values():
            life.lender.check()
            life.reader.check()

    # -- lives ---------------------------------------------------------------------------------

    def _life(self, worker: SimWorker) -> _Life:
        """Return the present life of a worker that is up."""
        life = self._lives.get(worker.index)
        if life is None or life.lender.unit != worker.unit:
            lender = SimLender(worker, self.network, partial(self._freed, worker))
            life = _Life(worker, lender, SimReader(worker, self.network))
            self._lives[worker.index] = life
            worker.mourners.append(partial(self._died, life))
        return life

    def _freed(self, worker: SimWorker, now: float) -> None:
        """Go on where a lend has ended: it may have kept the room that somebody waits for."""
        self.room_at(worker, now)
        worker.look(now)

    def _died(self, life: _Life, now: float) -> None:
        """Break what goes to and from a life that has ended, behind this instant's other calls."""
        life.lender.die()
        self._heap.at(now, partial(self._bury, life))

    def _bury(self, life: _Life, now: float) -> None:
        life.reader.die(now)
        for wish in [one for one in self._open.values() if one.target is life]:
            self._over(wish, TransferResult(TransferOutcome.LOST), now)
        for other in self._lives.values():
            other.reader.lost(life.lender, now)

    # -- a wish's way --------------------------------------------------------------------------

    def _look(self, wish: _Wish, now: float) -> None:
        """Ask the source what it has, unless all of it is at the target."""
        target, units = wish.target.worker, len(wish.prompt) // TOKEN_BYTES
        there = held_units(target, wish.prompt)
        if there + target.cache.layout.block_tokens >= units:
            nothing = TransferResult(TransferOutcome.NOTHING_TO_BRING)
            self._heap.at(now, partial(self._over, wish, nothing))
            return
        within_s = lend_s(target.machine.node.compute_ms(units - there, there))
        self._until(wish, min(wish.until_s, now + within_s))
        here, peer = wish.target.worker.host, wish.source.worker.host

        def told(held: int) -> None:
            self.network.say(peer, here, partial(self._told, wish, held), self._heap.now)

        def asked(at_s: float) -> None:
            if wish.source.lender.is_alive:
                wish.source.lender.look(wish.prompt, told, at_s)

        self.network.say(here, peer, asked, now)

    def _told(self, wish: _Wish, held: int, now: float) -> None:
        """Take the source's word, and reserve room, behind those who came before."""
        if wish.is_over:
            return
        wish.held, wish.lined_s = held, now
        self._until(wish, wish.until_s)
        if self._waiting.get(wish.target.worker.index):
            self._wait(wish, now, is_first=False)
        else:
            self._try(wish, now, is_first=False)

    def _began(self, part: _Part, now: float) -> None:
        """Begin to send a prompt when its first step begins: its lend is asked for in good time."""
        if not part.target.is_up:
            return
        sequence, block = part.sequence, part.source.cache.layout.block_tokens
        end = (len(sequence.turn.prompt) // TOKEN_BYTES - 1) // block * block
        there = held_units(part.target, sequence.turn.prompt)
        if end <= there:
            return
        lives = self._life(part.source), self._life(part.target)
        prompt, turn_id = sequence.turn.prompt, sequence.turn_id
        ready_ms = part.ready_ms
        wish = _Wish(*lives, prompt, None, inf, ORDER_SHARE, ready_ms=ready_ms, turn_id=turn_id)
        self._open[id(wish)] = part.wish = wish
        self._told(wish, end, now)

    def _try(self, wish: _Wish, now: float, *, is_first: bool) -> None:
        """Begin the bring if there is room for it, else wait on."""
        if wish.is_over:
            return
        died = _who_died(wish)
        if died is not None:
            self._heap.at(now, partial(self._over, wish, TransferResult(died)))
            return
        target, held = wish.target.worker, wish.held
        there = held_units(target, wish.prompt)
        wish.waited_s = now - wish.lined_s
        if held <= there:
            nothing = TransferResult(TransferOutcome.NOTHING_TO_BRING, waited_s=wish.waited_s)
            self._heap.at(now, partial(self._over, wish, nothing))
            return
        target.settle(now)
        room = reserve(target, wish.prompt, held, now)
        if isinstance(room, SlotsReserved):
            self._begin(wish, room, there, now=now)
        else:
            self._wait(wish, now, is_first=is_first)

    def _begin(self, wish: _Wish, room: SlotsReserved, there: int, *, now: float) -> None:
        target, held = wish.target.worker, wish.held
        count = count_bytes(target, room, held)
        cells = -(-count // self.network.piece_bytes)
        compute_ms = target.machine.node.compute_ms(held - there, there)
        if wish.turn_id != NO_TURN:
            # As node.restore prices an order: behind all that waits at either of the two.
            compute_ms = max(compute_ms + _ready_ms(target), wish.ready_ms)
            blocks = (held - room.start) // target.cache.layout.block_tokens
            cells = max(cells, min(blocks, GROWING_CELLS))
        self.count += 1
        bring = SimBring(
            wish.source.lender,
            LendHint(wish.prompt, room.start, held, max(1, cells), count),
            room,
            compute_ms=wish.share * compute_ms,
            over=partial(self._ended, wish),
            turn_id=wish.turn_id,
        )
        wish.bring = wish.target.reader.bring(bring, wish.source.worker.index, now)

    def _wait(self, wish: _Wish, now: float, *, is_first: bool) -> None:
        waiting = self._waiting.setdefault(wish.target.worker.index, deque())
        if is_first:
            waiting.appendleft(wish)
        else:
            waiting.append(wish)

    # -- ends ----------------------------------------------------------------------------------

    def _until(self, wish: _Wish, until_s: float) -> None:
        """Give the wish up at that instant, wherever it is then."""
        if wish.timer is not None:
            wish.timer.cancel()
        wish.timer = None if until_s == inf else self._heap.at(until_s, partial(self._late, wish))

    def _late(self, wish: _Wish, now: float) -> None:
        self._give_up(wish, now)

    def _give_up(self, wish: _Wish, now: float) -> None:
        if wish.bring:
            wish.target.reader.unwanted(wish.bring, now)
            return
        waiting = self._waiting.get(wish.target.worker.index)
        is_waiting = waiting is not None and any(other is wish for other in waiting)
        landing = _who_died(wish) or TransferOutcome.LATE
        if is_waiting:
            landing = TransferOutcome.NO_ROOM
        waited_s = now - wish.lined_s if is_waiting else 0.0
        self._over(wish, TransferResult(landing, waited_s=waited_s), now)

    def _ended(self, wish: _Wish, end: BringEnd, moved_bytes: int, now: float) -> None:
        """Take what came of the bring."""
        self.bytes += moved_bytes
        wish.moved_bytes += moved_bytes
        landing = _ENDS.get(end, TransferOutcome.LATE)
        if landing is not TransferOutcome.LANDED:
            landing = _who_died(wish) or landing
        self._over(wish, TransferResult(landing, wish.held, waited_s=wish.waited_s), now)

    def _over(self, wish: _Wish, result: TransferResult, now: float) -> None:
        """Tell who asked, once, with the bytes that crossed for it."""
        if wish.is_over:
            return
        wish.is_over = True
        del self._open[id(wish)]
        if self._asked.get(wish.for_turn) is wish:
            del self._asked[wish.for_turn]
        if wish.timer is not None:
            wish.timer.cancel()
        waiting = self._waiting.get(wish.target.worker.index)
        if waiting is not None and any(other is wish for other in waiting):
            self._waiting[wish.target.worker.index] = deque(w for w in waiting if w is not wish)
        then, wish.then = wish.then, None
        if then is not None:
            self._parts.pop(wish.turn_id, None)
            if wish.turn_id != NO_TURN:
                wish.source.lender.forget(wish.turn_id, now)
            moved_bytes, wish.moved_bytes = wish.moved_bytes, 0
            then(msgspec.structs.replace(result, bytes=moved_bytes), now)
        if wish.target.worker.is_up:
            wish.target.worker.look(now)


def reserve(
    target: SimWorker, prompt: Packed, held: int, now: float
) -> SlotsReserved | NoRoom | CacheRefused:
    """Reserve room at `target` for what it lacks of the first `held` units of a prompt."""
    tokens = prompt[: held * TOKEN_BYTES]
    points = (held,) if target.point_bytes else ()
    arrival = Arrival(tokens, prefix_name(tokens), points, _PEER, _CHAINED)
    return target.cache.ingest.reserve(arrival, now)


def count_bytes(target: SimWorker, room: SlotsReserved, held: int) -> int:
    """Count the bytes that come into the room, up to unit `held`."""
    ranges = round((held - room.start) * target.unit_bytes)
    return ranges + len(room.points) * target.point_bytes


def _ready_ms(source: SimWorker) -> float:
    """Return in how long the source has computed all prompts that it has, as it would say."""
    units = source.machine.engine.pending_tokens // source.unit_tokens
    return source.machine.node.compute_ms(units, 0) if units else 0.0


def _who_died(wish: _Wish) -> TransferOutcome | None:
    """Return what the wish comes to as one of its two lives has ended; None: neither has."""
    target = wish.target
    if not target.worker.is_up or target.worker.unit != target.reader.unit:
        return TransferOutcome.LOST
    return None if wish.source.lender.is_alive else TransferOutcome.SOURCE_LOST
