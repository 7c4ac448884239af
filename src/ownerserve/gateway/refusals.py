"""Refusals tell an operator of requests of which nothing was decided: by an access line and a span
each, as a turn has.

| a request is refused | known of it |
|---|---|
| amid its head or body: malformed, too long, too slow, no key, no route | what came so far |
| once it is whole: its body, its tenant's limits, a fault of ours | its head |
| before the fleet: the queue is full, its deadline | its session too |

What was decided and then refused is told with the decision (turns.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ownerserve.gateway.asking import IdentifiedRequest
from ownerserve.gateway.http.replies import RefusedRequest, Rejected
from ownerserve.gateway.tracing.trace import TurnTrace
from ownerserve.kv.ids import SessionId

if TYPE_CHECKING:
    from ownerserve.gateway.turns import Turns


class Refusals:
    """The refusals of one gateway. `turns` has its access log and its tracer."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def unread(self, request: RefusedRequest, rejected: Rejected) -> None:
        """Tell of a request of which no more is known than what was read."""
        self._tell(request, rejected, self._turns.tracer.begin(request), session=None)

    def turned_away(
        self, asked: IdentifiedRequest, request: RefusedRequest, rejected: Rejected
    ) -> None:
        """Tell of a turn that is not let in, and end its trace."""
        self._tell(request, rejected, asked.trace, session=asked.arrive.session)

    def in_stream(self, rejected: Rejected) -> None:
        """Count a no that a client is told in its stream, whose head it has."""
        self._turns.observer.rejected(rejected)

    def _tell(
        self,
        request: RefusedRequest,
        rejected: Rejected,
        trace: TurnTrace | None,
        *,
        session: SessionId | None,
    ) -> None:
        if trace is not None:
            trace.refused(request.request_id, rejected)
        access_log = self._turns.access_log
        if access_log is not None:
            trace_id = None if trace is None else trace.trace_id
            access_log.refused(request, rejected, session=session, trace_id=trace_id)
