"""Sessions leave a simulated worker by production's `LeavingSessions`: this module is what that
class needs of an engine, and of who owns. Owns nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from ownerserve.directory.owner.state import SessionGrant
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch
from ownerserve.kv.prefix import HashedPrefix
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import HandOver, Moved, Reject, Released, RpcAnswer
from ownerserve.node.transfers.moves import LeavingSessions
from ownerserve.router.messages import Claimed
from ownerserve.sim.fleet import gauge
from ownerserve.sim.fleet.ownership import SimOwnership
from ownerserve.sim.worker.worker import SimWorker


class _Owner:
    """The owner is one life of a worker, as node.transfers.moves.MovingOwner."""

    def __init__(self, worker: SimWorker, ownership: SimOwnership) -> None:
        self._heap = worker.heap
        self._unit = worker.unit
        self._ownership = ownership
        self._node = ownership.nodes.get(worker.unit)

    def standing(self, session: SessionId) -> SessionGrant | None:
        """Return what is owned of the session now."""
        return self._ownership.standing(session, self._unit, self._heap.now)

    def owner_of(self, session: SessionId) -> Claimed | None:
        """Return who owns the session, as far as was heard."""
        return self._ownership.owner_of(session, self._unit, self._heap.now)

    def hand_over(self, asked: HandOver, told: Callable[[Moved | Reject], None]) -> Reject | None:
        """Give the session up to its target; else return why it stays."""
        if self._node is None:
            return Reject(WorkerRefusal.NOT_OWNER)
        return self._node.hand_over(asked, told, self._heap.now)

    def moved_here(self, session: SessionId, epoch: Epoch | None) -> None:
        """Ask for a session that may be this unit's now."""
        if self._node is not None:
            self._node.moved_here(session, epoch, self._heap.now)


class _Engine:
    """The engine is the present life of a worker, as node.transfers.moves.MovingEngine."""

    def __init__(self, worker: SimWorker, ownership: SimOwnership) -> None:
        self.ownership = _Owner(worker, ownership)
        self._worker = worker
        self._unit = worker.unit

    def is_live(self, session_id: SessionId) -> bool:
        """Return whether a turn of the session is here, if only in the queue."""
        return gauge.has_turn_of(self._worker, session_id)

    def let_go(self, session_id: SessionId) -> RpcAnswer:
        """Have what the session has here go before all else."""
        if self._worker.unit == self._unit:
            known = self._worker.cache.sessions.get(session_id)
            if known is not None and not known.running:
                self._worker.cache.sessions.let_go(session_id)
        return Released()

    def met(self, session_id: SessionId, hashed: HashedPrefix) -> None:
        """Know nothing more: a simulated engine asks its cache."""


def leaving_from(worker: SimWorker, ownership: SimOwnership) -> LeavingSessions:
    """Return who tells where sessions of the worker's present life stand, and hands them over."""

    def between_steps(call: Callable[[], object]) -> Future[object]:
        done: Future[object] = Future()
        worker.between_steps(lambda now: done.set_result(call()), worker.heap.now)
        return done

    return LeavingSessions(worker.cache, _Engine(worker, ownership), between_steps)
