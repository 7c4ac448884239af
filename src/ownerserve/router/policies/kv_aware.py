"""KV-aware linear: cached share less relative load, one weight each.

Source: the "kvcache-aware + load-balance" baseline of seed 002 §5.1; production-stack's
`loadaware` is the same form, match / len - beta x relative load (research/routers.md §1).
Looks at every worker.
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.worker import Worker

LOAD_WEIGHT = 1.0


class KvAware:
    """The policy takes argmax cached / prompt - LOAD_WEIGHT x pending / most pending. It keeps no
    state."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        most = max(max(worker.pending_tokens for worker in fleet), request.prompt_tokens)

        def cost(worker: Worker) -> tuple[float, int, int, int]:
            share = request.reusable_on(worker) / request.prompt_tokens
            load = worker.pending_tokens / most
            crowd = worker.bound_sessions + worker.batch
            return LOAD_WEIGHT * load - share, crowd, worker.passed, worker.order

        return run_at(request, min(fleet, key=cost), DispatchReason.SCORE)
