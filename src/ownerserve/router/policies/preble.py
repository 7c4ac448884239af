"""Preble-like E2: exploit the longest prefix where it saves more than it leaves, else explore.

Source: arXiv 2407.00023 (ICLR'25), Algorithms 1 and 2. Exploited is whoever holds the longest
prefix, when that is longer than the rest of the prompt; explored is the worker of the least
L + M + P: load, what making room costs, the rest's prefill, each in ms. A holder whose load is over
BALANCE times the lightest one's gives the turn to that one. L is here what is pending and decodes,
as the router knows it, instead of counts over a window; M is the prompt's own recompute in
proportion to how full the device is, instead of what would be evicted. Looks at every worker.
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.worker import Worker

BALANCE = 2.0


class Preble:
    """The policy exploits or explores. It keeps no state."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        longest = max((request.reusable_on(w) for w in request.holders(fleet)), default=0)
        if 2 * longest <= request.prompt_tokens:
            best = min(fleet, key=lambda worker: _cost(request, worker))
            return run_at(request, best, DispatchReason.SCORE)
        holders = [w for w in request.holders(fleet) if request.reusable_on(w) == longest]
        holder = min(holders, key=lambda worker: _load_ms(request, worker))
        lightest = min(fleet, key=lambda worker: _load_ms(request, worker))
        if _load_ms(request, holder) > BALANCE * _load_ms(request, lightest):
            return run_at(request, lightest, DispatchReason.HOT_OWNER)
        return run_at(request, holder, DispatchReason.CACHED)


def _load_ms(request: RoutingRequest, worker: Worker) -> float:
    """Return what stands before a turn and beside it, its own answer included: never 0."""
    speed, batch = worker.speed, worker.batch + 1
    step_ms = speed.step_ms + speed.step_ms_per_sequence * batch
    return worker.queue_ms + step_ms * batch * max(request.output_tokens, 1)


def _cost(request: RoutingRequest, worker: Worker) -> tuple[float, int, int, int]:
    cached, prefill = request.reusable_on(worker), worker.speed.prefill
    rest_ms = prefill.ms(request.prompt_tokens - cached, cached)
    room_ms = worker.occupancy * prefill.ms(request.prompt_tokens, 0)
    total_ms = _load_ms(request, worker) + room_ms + rest_ms
    return total_ms, worker.bound_sessions, worker.passed, worker.order
