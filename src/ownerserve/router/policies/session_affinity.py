"""Session affinity: a session stays where it is; a new one starts where least is pending.

Seed 002 §4.2 (pillar 1). Ties are broken by bound sessions, then by stable order: without that,
every session of an idle fleet starts on the first worker (measured at two routers, 100 % of 64
sessions on one of four engines: research/routers.md §4).
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.router.fleet import Worker
from ownerserve.router.messages import Reason
from ownerserve.router.policies.base import Choice, Request


class SessionAffinity:
    """The owner when it is a candidate, else the least pending worker. Keeps no state."""

    def choose(self, request: Request, candidates: Sequence[Worker]) -> Choice:
        if request.owner is not None:
            for worker in candidates:
                if worker.id == request.owner:
                    return Choice(worker, Reason.OWNER)
        if request.session is None:
            return Choice(min(candidates, key=_for_one_request), Reason.NO_SESSION)
        reason = Reason.OWNER_LOST if request.turns else Reason.NEW_SESSION
        return Choice(min(candidates, key=_for_a_session), reason)


def _for_a_session(worker: Worker) -> tuple[int, int, int]:
    """A session comes back: what counts beside the queue is who else will come back there."""
    return worker.pending_prefill_tokens, worker.bound_sessions, worker.order


def _for_one_request(worker: Worker) -> tuple[int, int, int]:
    """A request without a session leaves nothing behind: only what runs now counts."""
    return worker.pending_prefill_tokens, worker.requests, worker.order
