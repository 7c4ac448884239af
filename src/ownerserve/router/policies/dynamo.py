"""Dynamo-like KV cost with soft affinity.

Source: the KV router of Dynamo 1.6.1 (research/routers.md §1): the least
PREFILL_SCALE x (pending + new - credits) + decode blocks; a cached token is worth 1 on the device,
0.75 in host memory, 0.25 on disk. Its softmax is taken at temperature 0; soft affinity leaves the
choice to the cost but favours the last worker for as long as its binding's TTL runs.
Looks at every worker.
"""

from __future__ import annotations

from ownerserve.kv.messages import Tier
from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.worker import Worker

BLOCK_TOKENS = 64
PREFILL_SCALE = 1.0
CREDITS = {Tier.DEVICE: 1.0, Tier.HOST: 0.75, Tier.DISK: 0.25}
AFFINITY_TTL_S = 600.0
AFFINITY_SHARE = 0.1
"""What the bound worker's cost is let off by, as a share of the prompt."""


class Dynamo:
    """The policy keeps no state: the binding is the session's home and its age."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        best = min(fleet, key=lambda worker: _cost(request, worker))
        return run_at(
            request, best, DispatchReason.OWNER if best is request.home else DispatchReason.SCORE
        )


def _cost(request: RoutingRequest, worker: Worker) -> tuple[float, int, int, int]:
    credit = 0.0
    for copy in request.copies:
        if copy.worker is worker:
            tokens = min(copy.tokens, request.known_tokens)
            credit = max(credit, CREDITS.get(copy.tier, 0.0) * tokens)
    prefill = (worker.pending_tokens + request.prompt_tokens - credit) / BLOCK_TOKENS
    decode = (worker.held_tokens + request.prompt_tokens) / BLOCK_TOKENS
    if worker is request.home and request.idle_s <= AFFINITY_TTL_S:
        prefill -= AFFINITY_SHARE * request.prompt_tokens / BLOCK_TOKENS
    return PREFILL_SCALE * prefill + decode, worker.bound_sessions, worker.passed, worker.order
