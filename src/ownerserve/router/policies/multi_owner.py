"""Prefix-aware, multi-owner: the least loaded of all who hold the prefix, unless load is uneven.

Source: seed 000 §3.8 (prefix cache hits, copies wherever they arise); the gate is that of
SGLang's and vLLM's cache_aware routers (research/routers.md §1): when the most and the least loaded
lie apart by an absolute and a relative amount, the least loaded gets it, cold if need be.
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at, start_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER

APART_REQUESTS = 32
APART_RATIO = 1.5
MATCH_SHARE = 0.5


class MultiOwner:
    """The policy looks at every worker's batch, and keeps no state."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        batches = [worker.batch for worker in fleet]
        low, high = min(batches), max(batches)
        needed = MATCH_SHARE * request.prompt_tokens
        holders = [w for w in request.holders(fleet) if request.reusable_on(w) > needed]
        if not holders:
            return start_at(request, fleet.least_one())
        if high - low > APART_REQUESTS and high > APART_RATIO * low:
            return run_at(request, fleet.least_one(), DispatchReason.HOT_OWNER)
        return run_at(
            request, min(holders, key=lambda w: (w.queue_ms, w.order)), DispatchReason.CACHED
        )
