"""An idle session leaves its node for the store: its state first, ownership after.

    gateway ── Suspend ──> S: is it S's own, and idle?
                           what of it is not in the store is copied there; S serves on
                           the same version, and no turn? S stops, and gives it up to nobody
    gateway <── Suspended  S, once the directory has it so; its soft reference goes

Its next turn comes to any worker, which brings the state from the store as any turn's, and binds.
A turn that comes meanwhile wins: then the session stays.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import NO_UNIT
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    AskSession,
    HandOver,
    Moved,
    Reject,
    RpcAnswer,
    SessionStands,
    Suspend,
    Suspended,
)
from ownerserve.node.transfers.moves import LeavingSessions, MovingEngine, MovingNode


class Suspensions:
    """`Suspensions` put sessions of one node away; called on the engine's thread."""

    def __init__(self, engine: MovingEngine, node: MovingNode, leaving: LeavingSessions) -> None:
        self._engine = engine
        self._node = node
        self._leaving = leaving

    def suspend(self, asked: Suspend, answer: Future[RpcAnswer]) -> None:
        """Begin to put the session away, or say why it stays; the answer comes later."""
        name = asked.session_id
        stands = self._leaving.stands(AskSession(name))
        if isinstance(stands, Reject):
            answer.set_result(stands)
        elif self._engine.is_live(name):
            answer.set_result(Reject(WorkerRefusal.SESSION_IS_RUNNING))
        else:
            self._node.put_away(name, partial(self._give_up, name, stands, answer))

    def _give_up(self, name: SessionId, stands: SessionStands, answer: Future[RpcAnswer]) -> None:
        """Give the session up, whose state is in the store, unless a turn of it came."""
        freed: Future[RpcAnswer] = Future()

        def ended(done: Future[RpcAnswer]) -> None:
            said = done.result()
            answer.set_result(Suspended() if isinstance(said, Moved) else said)

        freed.add_done_callback(ended)
        self._leaving.hand_over(HandOver(name, stands.version, NO_UNIT, stands.epoch), freed)
