"""Which owner is asked to hand a session over to where its turns are done. Pure.

Owns the hand-overs under way: one for each session, and none again before its next turn ends.

    done at T, home is T, S is up and owns ── AskRelease ──> S
                                 <── ReleaseEnded: released, not_owner: S is not known as owner now
                                                   kept: S still is; the next turn's end asks again
"""

from __future__ import annotations

from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.router.messages import NOTED, AskRelease, Noted, ReleaseEnd, ReleaseEnded
from ownerserve.router.sessions import Session
from ownerserve.router.worker import Worker

IN_FLIGHT_MAX = 1024
"""Hand-overs under way; beyond, a session waits for the end of its next turn."""


_NO_OWNER = (
    WorkerRefusal.STALE_EPOCH,
    WorkerRefusal.NOT_OWNER,
    WorkerRefusal.UNKNOWN_SESSION,
)


def end_of(refusal: WorkerRefusal) -> ReleaseEnd:
    """What an owner's refusal says of who owns the session."""
    return ReleaseEnd.NOT_OWNER if refusal in _NO_OWNER else ReleaseEnd.KEPT


class Handovers:
    """Decides when an owner is asked to hand a session over."""

    def __init__(self) -> None:
        self._under_way: set[SessionId] = set()

    def __len__(self) -> int:
        return len(self._under_way)

    def done(self, name: SessionId, session: Session, worker: Worker) -> AskRelease | Noted:
        """A turn of the session ended at `worker`: is somebody else to hand it over?"""
        grant, target = session.grant, worker.unit
        if grant is None or target is None or session.live_home is not worker:
            return NOTED
        source = grant.live_owner
        if source is None or source is worker or source.unit is None:
            return NOTED
        if name in self._under_way or len(self._under_way) >= IN_FLIGHT_MAX:
            return NOTED
        self._under_way.add(name)
        return AskRelease(name, source.unit, grant.epoch, target)

    def over(self, name: SessionId) -> None:
        """The session has ended."""
        self._under_way.discard(name)

    def ended(self, event: ReleaseEnded, session: Session | None) -> None:
        """The owner answered, or did not."""
        self._under_way.discard(event.session)
        grant = None if session is None else session.grant
        if grant is None or grant.epoch != event.epoch or event.end is ReleaseEnd.KEPT:
            return
        assert session is not None
        session.grant = None
