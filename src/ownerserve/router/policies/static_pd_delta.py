"""Static PD with delta transfer: both halves stay with the session, only what D lacks is sent.

Source: seed 000 §3.8 and §3.10 ("delta artifact instead of the complete KV every time"): P keeps
the prefix and computes each addition, D keeps what it was sent.
"""

from __future__ import annotations

from ownerserve.router.candidates import Candidates
from ownerserve.router.deciding import split_over, start_at
from ownerserve.router.decision import Decision
from ownerserve.router.policies.static_pd import prefillers
from ownerserve.router.request import Request


class StaticPdDelta:
    """D is the session's home, P whoever else holds most of the prompt. Keeps no state."""

    def decide(self, request: Request, fleet: Candidates) -> Decision:
        worker = request.home or fleet.least_one()
        able = prefillers(worker, [*request.prefill_holders(fleet), *fleet.least_prefill(2)])
        if not able:
            return start_at(request, worker)
        prefill = max(able, key=request.cached_on)
        lacking = request.prompt_tokens - request.cached_on(worker)
        return split_over(request, worker, prefill, moved_tokens=lacking)
