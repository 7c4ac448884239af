"""LMetric: the least product of new prefill tokens and batch size; no knobs.

Source: arXiv 2603.15202 (OSDI'26), seed 002 §5.1. New prefill tokens are those pending at the
worker and those that this request would add there. Looks at every worker.
"""

from __future__ import annotations

from ownerserve.router.candidates import Candidates
from ownerserve.router.deciding import run_at
from ownerserve.router.decision import Decision
from ownerserve.router.messages import Reason
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.request import Request
from ownerserve.router.worker import Worker


class LMetric:
    """argmin (pending + new) x (batch + 1). Keeps no state."""

    needs = ANY_WORKER

    def decide(self, request: Request, fleet: Candidates) -> Decision:
        best = min(fleet, key=lambda worker: lmetric(request, worker))
        return run_at(request, best, Reason.SCORE)


def lmetric(request: Request, worker: Worker) -> tuple[int, int, int]:
    """The product, then who is there already, then stable order."""
    new_tokens, load = request.prompt_tokens - request.cached_on(worker), worker.load
    product = (load.pending_tokens + new_tokens) * (worker.batch + 1)
    return product, worker.bound_sessions, worker.order
