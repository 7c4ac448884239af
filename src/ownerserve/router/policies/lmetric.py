"""LMetric: the least product of new prefill tokens and batch size; no knobs.

Source: arXiv 2603.15202 (OSDI'26), seed 002 §5.1. New prefill tokens are those pending at the
worker and those that this request would add there. Looks at every worker.

LMetricGate is the same behind a gate: whoever holds more than half of the prompt gets it. Source:
the seed authors' own later notes (agentic-kvc, research_findings, 05/2026; quoted in
research/routers.md §1): "LMetric base + cache_ratio > 0.5 affinity gate".
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.worker import Worker


class LMetric:
    """The policy takes argmin (pending + new) x (batch + 1). It keeps no state."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        best = min(fleet, key=lambda worker: lmetric(request, worker))
        return run_at(request, best, DispatchReason.SCORE)


def lmetric(request: RoutingRequest, worker: Worker) -> tuple[int, int, int, int]:
    """Return the key that orders workers: the product, then who is there already, then stable
    order."""
    new_tokens, load = request.prompt_tokens - request.reusable_on(worker), worker.load
    product = (load.pending_tokens + new_tokens) * (worker.batch + 1)
    return product, worker.bound_sessions, worker.passed, worker.order


GATE_SHARE = 0.5


class LMetricGate:
    """The policy takes whoever holds more than half of the prompt, else LMetric's choice. It keeps
    no state."""

    needs = ANY_WORKER

    def __init__(self) -> None:
        self._base = LMetric()

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        needed = GATE_SHARE * request.prompt_tokens
        holders = [w for w in request.holders(fleet) if request.reusable_on(w) > needed]
        if not holders:
            return self._base.decide(request, fleet)
        return run_at(
            request, min(holders, key=lambda w: lmetric(request, w)), DispatchReason.CACHED
        )
