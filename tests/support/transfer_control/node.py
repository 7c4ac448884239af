"""A simulated worker: the real cache and both machines of control, on one thread and one clock."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from ownerserve.cache.hetero import HeteroCache, parts_of
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.rpc import Cancel
from ownerserve.transfer.control.events import PeerAsked, PeerLink, SourceEvent, TargetEvent, WakeUp
from ownerserve.transfer.control.messages import ReaderRank
from ownerserve.transfer.control.source import TransferSource
from ownerserve.transfer.control.target import TransferTarget
from tests.support.transfer_control.lending import AskedOf, Lending, heads_of
from tests.support.transfer_control.memory import HEADS, LAYERS, LAYOUT, Place, Value
from tests.support.transfer_control.reading import Reading

if TYPE_CHECKING:
    from tests.support.transfer_control.world import World

TURNS = 4


class SimNode:
    """One life of a worker."""

    def __init__(self, world: World, name: str, incarnation: int, *, blocks: int) -> None:
        self.world, self.name = world, name
        self.unit = RoutingUnit(WorkerId(name), 0, Incarnation(incarnation))
        self.ranks = world.net.rng.choice((1, 1, 2))
        self.cache = HeteroCache(LAYOUT, {"kv": blocks}, TURNS)
        self.parts = parts_of(self.cache)
        self.memory: dict[Place, Value] = {}
        self.is_dead = False
        self.frozen_until_s = 0.0
        self.source, self.target = TransferSource(self.unit), TransferTarget(self.unit)
        self.lending, self.reading = Lending(self), Reading(self)
        self._wake_s = inf

    @property
    def link(self) -> PeerLink:
        return PeerLink(self.unit, self.name)

    @property
    def reader_ranks(self) -> tuple[ReaderRank, ...]:
        heads = [heads_of(rank, self.ranks) for rank in range(self.ranks)]
        return tuple(ReaderRank(rank, mine.start, mine.stop) for rank, mine in enumerate(heads))

    def block_is(self, slot: int, tokens: bytes, block: int) -> bool:
        """Whether a slot holds what the block of these tokens is, in all layers and heads."""
        value = self.world.names.value
        return all(
            self.memory.get((slot, layer, head)) == value(tokens, block, layer=layer, head=head)
            for layer in range(LAYERS)
            for head in range(HEADS)
        )

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do it later, on this process's threads: not at all once it is dead, not while it is
        frozen."""

        def act() -> None:
            if self.is_dead:
                return
            if self.frozen_until_s > self.world.net.now_s:
                self.world.net.at(self.frozen_until_s, act)
                return
            action()

        self.world.net.after(delay_s, act)

    def asked(self, event: PeerAsked) -> None:
        self.lending.asked[event.question] = AskedOf(event, self.world.net.now_s)
        if isinstance(event.message, Cancel):
            self.lending.called_off.add((event.reader, event.message.nonce))
        self.lends(event)

    def lends(self, event: SourceEvent) -> None:
        effects = self.source.handle(event, self.world.net.now_s)
        self.source.check()
        for effect in effects:
            self.lending.perform(effect)
        self._arm()

    def brings(self, event: TargetEvent) -> None:
        effects = self.target.handle(event, self.world.net.now_s)
        self.target.check()
        for effect in effects:
            self.reading.perform(effect)
        self._arm()

    def _arm(self) -> None:
        due_s = min(self.source.next_deadline(), self.target.next_deadline())
        if due_s < self._wake_s:
            self._wake_s = due_s
            self.after(max(0.0, due_s - self.world.net.now_s), self._wake)

    def _wake(self) -> None:
        self._wake_s = inf
        self.lends(WakeUp())
        self.brings(WakeUp())
