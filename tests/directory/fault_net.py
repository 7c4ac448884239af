"""Virtual time, a bad network, and resources that remember: what the fault schedules run on."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

from ownerserve.kv.epoch import Admitted, Epoch, Fence, FenceOutcome, Stale
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit


class Violation(AssertionError):
    """A safety or liveness property does not hold."""


class Net:
    """A heap of events. Until `heal_s` messages are lost, doubled, delayed and so reordered."""

    def __init__(self, rng: random.Random, heal_s: float) -> None:
        self.rng = rng
        self.heal_s = heal_s
        self.now_s = 0.0
        self.loss = rng.choice((0.0, 0.05, 0.2, 0.4))
        self.doubling = rng.choice((0.0, 0.1, 0.3))
        self.slowest_s = rng.choice((0.02, 0.3, 1.5))
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when_s, next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._order), action))

    def send(self, action: Callable[[], None]) -> None:
        """Deliver `action` perhaps once, perhaps twice, perhaps never."""
        if self.now_s >= self.heal_s:
            self.after(0.005, action)
            return
        if self.rng.random() < self.loss:
            return
        for _ in range(1 + (self.rng.random() < self.doubling)):
            self.after(self.rng.uniform(0.001, self.slowest_s), action)

    def run(self, until_s: float, each: Callable[[], None]) -> None:
        """Every event in order; `each` looks at the world after it."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action = pop(heap)
            action()
            each()
        self.now_s = until_s


class Journal:
    """What was served of one session, in order: the resource that an epoch guards. Durable."""

    def __init__(self, session_id: SessionId) -> None:
        self.session_id = session_id
        self.fence = Fence()
        self.done: list[str] = []
        self._writer: dict[Epoch, RoutingUnit] = {}

    def open(self, unit: RoutingUnit, epoch: Epoch) -> FenceOutcome:
        """A new owner reads what was done; from here on its predecessors can't write."""
        outcome = self.fence.admit(epoch)
        if isinstance(outcome, Admitted):
            self._note(unit, epoch)
        return outcome

    def write(self, unit: RoutingUnit, epoch: Epoch, position: int, request: str) -> FenceOutcome:
        """Append `request` as number `position`; repeating it is harmless."""
        outcome = self.fence.admit(epoch)
        if isinstance(outcome, Stale):
            return outcome
        self._note(unit, epoch)
        if request in self.done:
            return outcome
        if position != len(self.done):
            raise Violation(f"{unit} built {request} on {position} of {len(self.done)} turns")
        self.done.append(request)
        return outcome

    def _note(self, unit: RoutingUnit, epoch: Epoch) -> None:
        if self._writer.setdefault(epoch, unit) != unit:
            raise Violation(f"{self.session_id}: {epoch} is {self._writer[epoch]}'s and {unit}'s")
