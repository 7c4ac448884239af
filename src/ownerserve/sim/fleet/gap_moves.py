"""A simulated gateway grants moves in gaps, and replicas of hot prefixes, as a real one does.

    a turn is sent ──> GapMoves, HotPrefixes     production's own: what its decision wanted
    each LOOK_S    ──> granted ──> SimTakes      only while something is wanted, under way or joins
                       taken, made ──> TakenOver, Claimed, Reported ──> the router
                       or why not  ──> stayed, missed

The production counterpart is gateway.moves, which has the drained leave, too: nobody is drained
here. Owns when is looked, and what came of it for one gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import floor

from ownerserve.kv.ids import WorkerId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.rpc import PrefixTaken, Reject, SessionTaken
from ownerserve.router.gap_moves import JOINING_S, KEPT_S, GapMove, GapMoves
from ownerserve.router.hot_prefixes import HotPrefixes, PrefixCopy
from ownerserve.router.messages import Arm, Claimed, Dispatch, Reported, TakenOver
from ownerserve.router.state import RouterState
from ownerserve.sim.fleet.accounts import Accounts
from ownerserve.sim.fleet.takes import SimTakes, Taken
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.worker.worker import SimWorker

LOOK_S = 0.25
"""How often a gateway looks (gateway.moves)."""


class SimGapMoves:
    """The moves in gaps of one gateway's sessions. A worker hears the gateway `delay_s` later, and
    the gateway the worker. What came of each is booked in `accounts`."""

    def __init__(
        self,
        heap: Heap,
        router: RouterState,
        takes: SimTakes,
        *,
        named: Mapping[WorkerId, SimWorker],
        accounts: Accounts,
        delay_s: float,
    ) -> None:
        self.moves = GapMoves(router, lambda name: Arm.MAIN)
        self.replicas = HotPrefixes(router)
        self._heap = heap
        self._router = router
        self._takes = takes
        self._named = named
        self._delay_s = delay_s
        self._accounts = accounts
        self._until_s = heap.now + LOOK_S
        self._is_armed = False
        self._arm(heap.now)

    def sent(self, dispatch: Dispatch, now: float) -> None:
        """Take in what the turn's decision wanted."""
        if dispatch.decision.wanted is not None:
            self.moves.sent(dispatch, now)
            self.replicas.sent(dispatch, now)
            self._arm(now)

    def joined(self, now: float) -> None:
        """Hear that a worker came up."""
        self._go_on_until(now + JOINING_S, now)

    def _go_on_until(self, until_s: float, now: float) -> None:
        self._until_s = max(self._until_s, until_s)
        self._arm(now)

    def _arm(self, now: float) -> None:
        """Look at the next of the instants at which a gateway looks."""
        if not self._is_armed:
            self._is_armed = True
            self._heap.at((floor(now / LOOK_S) + 1) * LOOK_S, self._look)

    def _look(self, now: float) -> None:
        self._is_armed = False
        for move in self.moves.look(now):
            self._heap.at(now + self._delay_s, partial(self._take, move))
            self._go_on_until(now + KEPT_S, now)
        for copy in self.replicas.look(now):
            self._heap.at(now + self._delay_s, partial(self._copy, copy))
        if len(self.moves) or len(self.replicas) or now < self._until_s:
            self._arm(now)

    def _take(self, move: GapMove, now: float) -> None:
        source, target = self._named[move.source.id], self._named[move.target.id]

        def ended(said: Taken, at_s: float) -> None:
            heard = partial(self._moved, move, source, target, said)
            self._heap.at(at_s + self._delay_s, heard)

        self._takes.take(move.session, source, target, ended=ended, now=now)

    def _moved(
        self, move: GapMove, source: SimWorker, target: SimWorker, said: Taken, now: float
    ) -> None:
        if isinstance(said, SessionTaken) and move.target.unit is not None:
            unit, name = move.target.unit, move.session
            self._router.handle(TakenOver(name, unit, source.name, said.tokens), now)
            if said.epoch is not None:
                self._router.handle(Claimed(name, unit, said.epoch, said.version), now)
            self.moves.taken(name, now)
            self._accounts.moved_in_gap(name, source, target)
        else:
            self.moves.stayed(move.session, _why(said))
        self._accounts.gap_move_ended("taken" if isinstance(said, SessionTaken) else _why(said))
        self._go_on_until(now + KEPT_S, now)

    def _copy(self, copy: PrefixCopy, now: float) -> None:
        source, target = self._named[copy.source.id], self._named[copy.target.id]

        def ended(said: Taken, at_s: float) -> None:
            self._heap.at(at_s + self._delay_s, partial(self._copied, copy, said))

        units = copy.tokens // target.unit_tokens
        self._takes.copy(copy.session, source, target, units=units, ended=ended, now=now)

    def _copied(self, copy: PrefixCopy, said: Taken, now: float) -> None:
        if isinstance(said, PrefixTaken) and copy.target.unit is not None:
            unit = copy.target.unit
            self._router.handle(Reported(unit, Tier.DEVICE, None, said.tokens, copy.session), now)
            self.replicas.made(copy.session, said.moved_bytes)
        else:
            self.replicas.missed(copy.session, _why(said), now)
        self._accounts.replica_ended("made" if isinstance(said, PrefixTaken) else _why(said))


def _why(said: Taken) -> str:
    """Return why nothing was taken."""
    match said:
        case str():
            return said
        case Reject(reason):
            return reason.value
        case _:
            return "malformed"
