"""SMetric: a session keeps its owner while that answers in time, else least work wins.

Source: `smetric` of vllm-router (its source; research/routers.md §1). Two gates: the turn is not
the session's first, and the owner holds enough of the prompt. Behind them the owner is kept while
its queued prefill stays within a slack of TTFT; else the least of pending and new prefill times
load, as for a first turn. The source's slack and hit ratio are settings; here they are those of the
other gates. Looks at every worker when it leaves.
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.policies.lmetric import lmetric

HIT_SHARE = 0.5
SLACK_MS = 5_000.0


class SMetric:
    """The policy keeps the owner or takes the least work. It keeps no state."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        home, is_hot = request.home, False
        if home is not None and request.turns:
            is_hit = request.reusable_on(home) > HIT_SHARE * request.prompt_tokens
            is_hot = home.queue_ms > SLACK_MS
            if is_hit and not is_hot:
                return run_at(request, home, DispatchReason.OWNER)
        best = min(fleet, key=lambda worker: lmetric(request, worker))
        return run_at(request, best, DispatchReason.HOT_OWNER if is_hot else DispatchReason.SCORE)
