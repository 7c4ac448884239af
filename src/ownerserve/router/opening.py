"""The opening window is a gateway's first while, in which it knows of no session what another
gateway may have decided a moment ago.

Two gateways that begin together have empty tables, and a directory hears of an owner only when the
session's first turn has come to it. So in its window a gateway sends a session that nobody knows to
the worker that both would name without a word: the first of those fit for it by a hash of the
session's name and the worker's (rendezvous; a worker more or less moves only its own sessions).

    fit    queue at most `behind_ms` behind the least loaded worker's: T_hot, what a move costs,
           which is what it costs to disagree; sessions at most CROWD + CROWDED x the fewest

Behind the window, and for all that is known of anybody, the policy decides alone. The rule decides
without doing, and keeps nothing.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from ownerserve.kv.ids import SessionId
from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.settings import DEFAULTS
from ownerserve.router.worker import Worker

CROWD, CROWDED = 16, 2.0
"""What chance makes of a few sessions is no reason to leave a worker."""


class OpeningRule:
    """The rule holds until `until_s`, in seconds of the router's clock."""

    def __init__(self, until_s: float, *, behind_ms: float = DEFAULTS.hot_ms) -> None:
        self._until_s = until_s
        self._behind_ms = behind_ms

    def revised(
        self,
        decision: Decision,
        request: RoutingRequest,
        fleet: Candidates,
        *,
        name: SessionId | None,
    ) -> Decision:
        """Return the policy's decision, or the one that every gateway in its window makes for a
        session of which nothing is known."""
        if (
            request.now_s >= self._until_s
            or name is None
            or decision.reason is not DispatchReason.NEW_SESSION
            or decision.prefill is not None
        ):
            return decision
        least = fleet.least_one()
        queue_ms = least.queue_ms + self._behind_ms
        crowd = CROWD + CROWDED * min(one.bound_sessions for one in fleet)
        fit = (one for one in fleet if one.queue_ms <= queue_ms and one.bound_sessions <= crowd)
        named = max(fit, key=lambda worker: _rank(name, worker), default=least)
        return run_at(request, named, DispatchReason.OPENING)


def _rank(name: SessionId, worker: Worker) -> int:
    """Return the rank of a worker for a session, which all gateways that name both alike agree
    on."""
    return xxh3_64_intdigest(f"{name}/{worker.id}/{worker.dp_rank}".encode())


NEVER_OPENING = OpeningRule(0.0)
"""No window: the policy alone decides."""
