"""TTFT-gated affinity: the holder, unless it answers so much later that a cold prefill is due.

Source: llm-d's prefix affinity filter with a TTFT gate (research/routers.md §1): when the predicted
penalty for staying passes the limit, stickiness is broken and the prefix is computed elsewhere.
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at, start_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.worker import Worker

PENALTY_MS_MAX = 5000.0


class TtftGate:
    """The policy takes the home unless the answer there comes over PENALTY_MS_MAX later than at the
    least loaded worker. It keeps no state."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        least = fleet.least_one()
        home = request.home
        if home is None:
            return start_at(request, least)
        if _ttft_ms(request, home) - _ttft_ms(request, least) > PENALTY_MS_MAX:
            return run_at(request, least, DispatchReason.HOT_OWNER)
        return run_at(request, home, DispatchReason.OWNER)


def _ttft_ms(request: RoutingRequest, worker: Worker) -> float:
    cached = request.reusable_on(worker)
    return worker.queue_ms + worker.speed.prefill.ms(request.prompt_tokens - cached, cached)
