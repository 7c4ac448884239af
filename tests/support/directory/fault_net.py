"""Virtual time, a bad network, and resources that remember: what the fault schedules run on."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import NamedTuple, TypeVar

from ownerserve.directory.owner.doors import Doors
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit
from ownerserve.kv.prefix import Packed, pack

STEM_TOKENS, FOLD_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 8, 16, 5
STEM = pack(range(STEM_TOKENS))
FOLDED = 6
WORDS = 1_000_000

FASTEST_S = 0.001
HEALTHY_S = 0.005
STUCK_S = 4.0
STORM_LOSS = 0.7

T = TypeVar("T")


class Violation(AssertionError):
    """A safety or liveness property does not hold."""


class DoubleOwner(Violation):
    """Two own at once what one may own, or one epoch is two owners'."""


class LostRequest(Violation):
    """A request vanished: acknowledged and not served, or let in and never started."""


class Late(Violation):
    """All is well for two leases and more, and a client still waits."""


class Net:
    """A heap of events. Until `heal_s` messages are lost, doubled, delayed and so reordered."""

    def __init__(self, rng: random.Random, heal_s: float) -> None:
        self.rng = rng
        self.heal_s = heal_s
        self.now_s = 0.0
        self.loss = rng.choice((0.0, 0.05, 0.2, 0.4))
        self.doubling = rng.choice((0.0, 0.1, 0.3))
        self.slowest_s = rng.choice((0.02, 0.3, 1.5))
        self.stuck = rng.choice((0.0, 0.0, 0.03))
        """Share of messages that come up to `STUCK_S` later, when nobody thinks of them."""
        self.storm_until_s = 0.0
        self.latest_s = FASTEST_S + self.slowest_s + (STUCK_S if self.stuck else 0.0)
        """How long a message may be under way."""
        self.events = self.lost = self.doubled = self.delayed = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when_s, next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._order), action))

    def send(self, action: Callable[[], None]) -> None:
        """Deliver `action` perhaps once, perhaps twice, perhaps never."""
        if self.now_s >= self.heal_s:
            heapq.heappush(self._heap, (self.now_s + HEALTHY_S, next(self._order), action))
            return
        draw = self.rng.random
        if draw() < (self.loss if self.now_s >= self.storm_until_s else STORM_LOSS):
            self.lost += 1
            return
        when_s = self.now_s + FASTEST_S + self.slowest_s * draw()
        if self.stuck and draw() < self.stuck:
            self.delayed += 1
            when_s += STUCK_S * draw()
        heapq.heappush(self._heap, (when_s, next(self._order), action))
        if draw() < self.doubling:
            self.doubled += 1
            when_s = self.now_s + FASTEST_S + self.slowest_s * draw()
            heapq.heappush(self._heap, (when_s, next(self._order), action))

    def run(self, until_s: float, touched: list[T], look: Callable[[], None]) -> None:
        """Every event in order; when one has `touched` anything, `look` at it."""
        heap, pop, events = self._heap, heapq.heappop, 0
        try:
            while heap and heap[0][0] <= until_s:
                self.now_s, _, action = pop(heap)
                events += 1
                action()
                if touched:
                    look()
        finally:
            self.events += events
        self.now_s = until_s


class Said(NamedTuple):
    """A turn's tokens: what was said before with the new question, and the answer to come."""

    prompt: Packed
    output: Packed


class Journal:
    """What was served of one session, in order: the resource that an epoch guards. Durable."""

    def __init__(self, session_id: SessionId) -> None:
        self.session_id = session_id
        self._doors = Doors()
        self.done: list[str] = []
        self.guests: set[str] = set()
        """Answered by who did not own it: part of no record."""
        self._writer: dict[Epoch, RoutingUnit] = {}
        self._words: dict[str, Said] = {}
        self.openings = 0
        """How often an owner began to read: a write of before is its own predecessor's."""

    def said(self, position: int, request: str) -> Said:
        """The conversation up to `position`, with `request` as its next turn.

        Sessions begin alike, and what was said is folded into a few tokens every `FOLDED` turns.
        """
        first = position // FOLDED * FOLDED
        name = int(self.session_id[1:])
        parts = [STEM, pack(range(1000 * name + first, 1000 * name + first + FOLD_TOKENS))]
        for before in self.done[first:position]:
            parts += self._of(before)
        prompt, output = self._of(request)
        return Said(b"".join((*parts, prompt)), output)

    def _of(self, request: str) -> Said:
        """The words of one turn alone, made from its number."""
        known = self._words.get(request)
        if known is None:
            start = WORDS + 64 * int(request.rsplit("/", 1)[-1])
            middle = start + PROMPT_TOKENS
            output = pack(range(middle, middle + OUTPUT_TOKENS))
            known = self._words[request] = Said(pack(range(start, middle)), output)
        return known

    def open(self, unit: RoutingUnit, epoch: Epoch) -> Epoch | None:
        """A new owner reads what was done; from here on its predecessors can't write: they are told
        the epoch of who was there later."""
        later = self._doors.above(self.session_id, epoch)
        if later is None:
            self._note(unit, epoch)
            self.openings += 1
        return later

    def write(
        self, unit: RoutingUnit, epoch: Epoch, position: int, request: str, *, opening: int
    ) -> Epoch | None:
        """Append `request` as number `position`; repeating it is harmless. The epoch that was there
        later is returned, or the own where the owner has begun anew since."""
        later = self._doors.above(self.session_id, epoch)
        if later is not None or opening < self.openings:
            return later or epoch
        self._note(unit, epoch)
        if request in self.done:
            return None
        if position != len(self.done):
            raise Violation(f"{unit} built {request} on {position} of {len(self.done)} turns")
        self.done.append(request)
        return None

    def _note(self, unit: RoutingUnit, epoch: Epoch) -> None:
        self._doors.hear(self.session_id, epoch)
        if self._writer.setdefault(epoch, unit) != unit:
            raise DoubleOwner(f"{self.session_id}: {epoch} is {self._writer[epoch]}'s and {unit}'s")
