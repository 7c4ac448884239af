"""Sticky: a session stays where it is, however busy; a new one starts where least is pending.

Source: seed 002 §3.3 and §4.2 (its pillar 1 alone). Ties of load are broken by who is bound
already: without that, every session of an idle fleet starts on the first worker (measured at two
routers, 100 % of 64 sessions on one of four engines: research/routers.md §4).
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at, start_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER


class Sticky:
    """The policy takes the home when it is a candidate, else the least loaded worker. It keeps no
    state."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        if request.home is not None:
            return run_at(request, request.home, DispatchReason.OWNER)
        return start_at(request, fleet.least_one())
