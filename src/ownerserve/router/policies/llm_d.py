"""llm-d's precise prefix routing: a weighted sum of three scores from 0 to 1; the most wins.

Source: llm-d's guide to precise prefix-cache aware routing and the inference extension's sample
profile: prefix 3, queue 1, KV-cache utilisation 1, the picker of the maximum. The prefix score is
what of the prompt the worker's own events say it holds, by the share of the best one's; the queue
score falls from the shortest queue to the longest; utilisation counts as it is. Looks at every
worker.
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.worker import Worker

PREFIX_WEIGHT, QUEUE_WEIGHT, MEMORY_WEIGHT = 3.0, 1.0, 1.0


class LlmdPrecise:
    """The policy takes the highest score. It keeps no state."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        queues = [worker.pending_tokens for worker in fleet]
        shortest, longest = min(queues), max(queues)
        most = max(request.reusable_on(worker) for worker in fleet)

        def lacking(worker: Worker) -> tuple[float, int, int, int]:
            score = MEMORY_WEIGHT * (1.0 - worker.occupancy)
            if most:
                score += PREFIX_WEIGHT * request.reusable_on(worker) / most
            if longest > shortest:
                waiting = longest - worker.pending_tokens
                score += QUEUE_WEIGHT * waiting / (longest - shortest)
            return -score, worker.bound_sessions + worker.batch, worker.passed, worker.order

        return run_at(request, min(fleet, key=lacking), DispatchReason.SCORE)
