"""This module is ownership in a simulated fleet: each worker's OwnerState and one DirectoryState.

    came, left, over, release ──> OwnerState ── FLUSH_S ──> frame ── delay_s ──> DirectoryState
    standing <──────────────────── memory <──────────────── answers ────────────────┘

Owns the frames under way. Both are the production classes, and a frame is
node/ownership/ownership.py's: what a worker wishes within FLUSH_S goes as one and renews its
lease. Only the way is modelled: `delay_s` there and back. A directory that is lost answers nothing
until it is back, under a new term and with an empty memory; what it was asked is asked again then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ownerserve.directory.decisions.records import Key
from ownerserve.directory.decisions.state import DirectoryState
from ownerserve.directory.messages import (
    FindSession,
    Outcome,
    Refused,
    Request,
    SessionIs,
    Transfer,
)
from ownerserve.directory.owner.doors import GuardedOwner
from ownerserve.directory.owner.state import Asks, OwnerState, SessionGrant, SessionTip
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import HandOver, Moved, Reject
from ownerserve.node.ownership.ownership import FLUSH_S, end_of_move
from ownerserve.router.knowledge import end_of
from ownerserve.router.messages import AskRelease, Claimed, ReleaseEnd
from ownerserve.sim.timeline.heap import Heap

LEASE_S = 300.0
"""Ten times a live fleet's, so that idle workers' frames do not outnumber turns on a trace of days:
so long others are guests of a dead worker's sessions."""
LOOK_S = LEASE_S / 6
"""How often an idle worker that owns a session looks whether something is due: it renews after a
third of its lease. One that owns none lets it end, and registers with its next turn."""
AGAIN_S = 0.5
"""After a refusal that says for how long it holds no better."""
SWEEP_S = 3600.0
SWEEP_RECORDS = 500
"""So many are looked at so often. What a sweep cleans up has been silent for a day."""

Found = Callable[[Claimed | None, float], None]
MoveTold = Callable[[Moved | Reject], None]
"""Hears what came of a hand-over."""


class SimOwner:
    """A simulated owner is the node of one life of a worker, and what it will ask with its next
    frame. `send` puts requests into that."""

    __slots__ = ("asks", "guarded", "is_asking", "moving", "owner", "send")

    def __init__(self, unit: RoutingUnit, send: Callable[[SimOwner, Asks, float], None]) -> None:
        self.owner = OwnerState(unit)
        self.guarded = GuardedOwner(self.owner)
        self.asks: Asks = []
        self.is_asking = False
        self.moving: dict[SessionId, MoveTold] = {}
        """`moving` has who hears of each session that is handed over to who has its state."""
        self.send = send

    def hand_over(self, asked: HandOver, told: MoveTold, now: float) -> Reject | None:
        """Give the session up to its target, as node.ownership does: it is not the worker's at
        once. `told` hears when the directory has answered. Else return why it stays."""
        session, epoch = asked.session_id, asked.epoch
        if epoch is None:
            return Reject(WorkerRefusal.STALE_EPOCH)
        grant = self.owner.grants.get(session)
        if grant is not None and grant.epoch == epoch and grant.version != asked.version:
            return Reject(WorkerRefusal.STALE_VERSION)
        leaving = self.guarded.release(session, epoch, asked.target, now_s=now)
        if isinstance(leaving, WorkerRefusal):
            return Reject(leaving)
        self.moving[session] = told
        self.send(self, leaving, now)
        return None

    def moved_here(self, session: SessionId, epoch: Epoch | None, now: float) -> None:
        """Ask for a session that may be the worker's own now."""
        self.send(self, self.guarded.moved_here(session, now, epoch=epoch), now)


class SimOwnership:
    """The ownership carries what workers tell the directory and hear of it."""

    def __init__(self, heap: Heap, *, delay_s: float) -> None:
        self.state = DirectoryState(Term(1, 0), lease_s=LEASE_S, open_at_s=0.0)
        self._heap = heap
        self.delay_s = delay_s
        self._is_up = True
        self.nodes: dict[RoutingUnit, SimOwner] = {}
        """`nodes` are those of workers that are up."""
        self._swept_s = 0.0
        self._to_sweep: list[Key] = []
        heap.at(heap.now + LOOK_S, self._look_again)

    # -- workers --------------------------------------------------------------------------------

    def lives(self, unit: RoutingUnit, now: float) -> None:
        """Begin a life of a worker that is up."""
        node = self.nodes[unit] = SimOwner(unit, self._send)
        self._send(node, node.owner.tick(now), now)

    def silent(self, unit: RoutingUnit) -> None:
        """Drop a worker that is down, and what it was about to ask with it."""
        self.nodes.pop(unit, None)

    def came(
        self,
        session: SessionId,
        unit: RoutingUnit,
        *,
        parent: SessionId | None,
        epoch: Epoch | None,
        now: float,
    ) -> None:
        """Tell the worker's node that a turn is there. `epoch`: the highest that its gateway heard
        of the session."""
        node = self.nodes.get(unit)
        if node is not None:
            asks = node.guarded.came(session, now, parent=parent, epoch=epoch)
            self._send(node, asks, now)

    def left(self, session: SessionId, unit: RoutingUnit, tip: SessionTip, now: float) -> None:
        """Tell the worker's node that the turn is complete there, and leaves its session at
        `tip`."""
        node = self.nodes.get(unit)
        if node is not None:
            self._send(node, node.guarded.left(session, tip, now), now)

    def over(self, session: SessionId, unit: RoutingUnit, now: float) -> None:
        """Tell the worker's node that the session ended with a turn there."""
        node = self.nodes.get(unit)
        if node is not None:
            self._send(node, node.guarded.over(session, now), now)

    def standing(self, session: SessionId, unit: RoutingUnit, now: float) -> SessionGrant | None:
        """Return what the worker owns of the session; None when it serves as a guest."""
        node = self.nodes.get(unit)
        return None if node is None else node.owner.may_serve(session, now)

    def owner_of(self, session: SessionId, unit: RoutingUnit, now: float) -> Claimed | None:
        """Return what the worker's answer says of the session's owner: itself, or whose guest it
        is."""
        node = self.nodes.get(unit)
        if node is None:
            return None
        grant = node.owner.may_serve(session, now)
        if grant is not None:
            return Claimed(session, unit, grant.epoch, grant.version)
        other = node.guarded.other_owner(session)
        return None if other is None else Claimed(session, *other)

    def release(self, asked: AskRelease, now: float) -> ReleaseEnd:
        """Ask the node of a worker where no turn of the session runs to hand it over, and return
        how that ended."""
        node = self.nodes.get(asked.source)
        if node is None:
            return ReleaseEnd.KEPT  # that life is over: it says nothing
        leaving = node.guarded.release(asked.session, asked.epoch, asked.target, now_s=now)
        if isinstance(leaving, WorkerRefusal):
            return end_of(leaving)
        self._send(node, leaving, now)
        return ReleaseEnd.RELEASED

    # -- a gateway ------------------------------------------------------------------------------

    def find(self, session: SessionId, then: Found, now: float) -> None:
        """Ask for a gateway who owns a session that it has never seen.

        `then` hears of a live owner, or that none is known. A directory that is lost refuses the
        connection.
        """
        self._heap.at(now + self.delay_s, partial(self._find, session, then))

    def _find(self, session: SessionId, then: Found, now: float) -> None:
        found = self._handle(FindSession(session), now) if self._is_up else None
        claimed = None
        if isinstance(found, SessionIs) and found.owner_live:
            claimed = Claimed(session, found.owner, found.epoch, found.version)
        then(claimed, now)

    # -- faults ---------------------------------------------------------------------------------

    def lose(self) -> None:
        """Let the directory die and forget."""
        self._is_up = False

    def restore(self, now: float) -> None:
        """Bring the directory back under a later term; workers' leases of before may still run."""
        self._is_up = True
        self.state = DirectoryState(self._next_term(), lease_s=LEASE_S, open_at_s=now + LEASE_S)
        for node in self.nodes.values():
            self._look_at(node, now)

    def check(self, now: float) -> None:
        """Raise InvariantViolated (invariant 2) where two workers may write one session's
        record."""
        self.state.check()
        owners: dict[SessionId, RoutingUnit] = {}
        for unit, node in self.nodes.items():
            for session in node.owner.grants:
                if self.standing(session, unit, now) is None:
                    continue
                if session in owners:
                    raise InvariantViolated(f"2: {owners[session]} and {unit} own {session}")
                owners[session] = unit

    # -- frames ---------------------------------------------------------------------------------

    def _send(self, node: SimOwner, asks: Asks, now: float) -> None:
        """Put a request into the worker's next frame."""
        if not asks:
            return
        node.asks += asks
        if not node.is_asking:
            self._arm(node, now + FLUSH_S)

    def _arm(self, node: SimOwner, leaves_s: float) -> None:
        node.is_asking = True
        self._heap.at(leaves_s + self.delay_s, partial(self._frame, node))

    def _frame(self, node: SimOwner, now: float) -> None:
        """Have the directory answer a frame, and the node hear its answers."""
        asks, node.asks, node.is_asking = node.asks, [], False
        owner = node.owner
        if not self._is_up or self.nodes.get(owner.unit) is not node:
            return
        again_s = 0.0
        asks += node.guarded.along(now)
        for ask in asks:
            outcome = self._handle(ask.request, now)
            if isinstance(outcome, Refused):
                again_s = max(again_s, outcome.retry_after_s or AGAIN_S)
            node.asks += node.guarded.answered(ask, outcome, now)
            if isinstance(ask.request, Transfer):
                _tell_moved(node, ask.request, outcome)
        if node.asks:
            self._arm(node, now)  # what answers ask for goes at once
        if again_s:
            self._heap.at(now + again_s, partial(self._look_at, node))
        if now - self._swept_s >= SWEEP_S:
            self._swept_s = now
            self._sweep(now)

    def _handle(self, request: Request, now: float) -> Outcome:
        state = self.state
        if state.is_behind(request):
            state.start_term(self._next_term(), open_at_s=now + LEASE_S)
        return state.handle(request, now)

    def _look_again(self, now: float) -> None:
        self._heap.at(now + LOOK_S, self._look_again)
        for node in self.nodes.values():
            if self._is_up and node.owner.grants:
                self._look_at(node, now)

    def _look_at(self, node: SimOwner, now: float) -> None:
        """Send what is due or was not answered, as an idle worker does."""
        self._send(node, node.owner.tick(now), now)
        for session in node.moving.keys() - node.owner.leaving() if node.moving else ():
            node.moving.pop(session)(Reject(WorkerRefusal.NO_ANSWER))  # its lease is over

    def _sweep(self, now: float) -> None:
        if not self._to_sweep:
            self._to_sweep = self.state.keys()
            self._to_sweep.reverse()  # taken from the end: there may be millions
        part = self._to_sweep[: -SWEEP_RECORDS - 1 : -1]
        del self._to_sweep[-SWEEP_RECORDS:]
        self.state.sweep(part, now)

    def _next_term(self) -> Term:
        """Return the directory's next term. One directory alone needs no nonce: ordinals tell its
        memories apart."""
        return Term(self.state.term.ordinal + 1, 0)


def _tell_moved(node: SimOwner, request: Transfer, outcome: Outcome) -> None:
    """Tell who waits for a hand-over what the directory said, once it is decided."""
    said = end_of_move(request, outcome)
    told = None if said is None else node.moving.pop(request.session_id, None)
    if said is not None and told is not None:
        told(said)
