"""Least load: where least is pending, blind to sessions.

Source: the load-only policies of SGLang's and vLLM's routers (research/routers.md §1: least load,
power of two); here over all workers, by queue time.
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER


class LeastLoad:
    """The policy takes the first worker in the order of load. It keeps no state."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        return run_at(request, fleet.least_one(), DispatchReason.LEAST_LOAD)
