"""Program TTL: a session keeps its place over a tool call, for so long and no longer.

Source: vllm-router 0.1.17's program scheduling (research/routers.md §1 and §2.6: TTL over tool
calls); its request pool is the worker's admission here.
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at, start_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER

TTL_S = 120.0


class ProgramTtl:
    """The policy keeps no state: the place is the session's home, its age the session's idle
    time."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        home = request.home
        if home is None:
            return start_at(request, fleet.least_one())
        if request.idle_s > TTL_S:
            return run_at(request, fleet.least_one(), DispatchReason.EXPIRED)
        return run_at(request, home, DispatchReason.OWNER)
