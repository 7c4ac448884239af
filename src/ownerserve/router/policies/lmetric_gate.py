"""LMetric behind a gate: whoever holds more than half of the prompt gets it, else LMetric.

Source: the seed authors' own later notes (agentic-kvc, research_findings, 05/2026; quoted in
research/routers.md §1): "LMetric base + cache_ratio > 0.5 affinity gate".
"""

from __future__ import annotations

from ownerserve.router.candidates import Candidates
from ownerserve.router.deciding import run_at
from ownerserve.router.decision import Decision
from ownerserve.router.messages import Reason
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.policies.lmetric import LMetric, lmetric
from ownerserve.router.request import Request

GATE_SHARE = 0.5


class LMetricGate:
    """Keeps no state."""

    needs = ANY_WORKER

    def __init__(self) -> None:
        self._base = LMetric()

    def decide(self, request: Request, fleet: Candidates) -> Decision:
        needed = GATE_SHARE * request.prompt_tokens
        holders = [w for w in request.holders(fleet) if request.cached_on(w) > needed]
        if not holders:
            return self._base.decide(request, fleet)
        return run_at(request, min(holders, key=lambda w: lmetric(request, w)), Reason.CACHED)
