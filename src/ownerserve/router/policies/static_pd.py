"""Static PD: prefill always on one worker, decode always on another; all of the state is sent.

Source: seed 000 §3.8, seed 002 §3.2 (4 P / 4 D). The least loaded of each kind; in a fleet of
hybrid workers the two are the least loaded pair.

StaticPdDelta sends deltas: both halves stay with the session, only what D lacks is sent. Source:
seed 000 §3.8 and §3.10 ("delta artifact instead of the complete KV every time"): P keeps the prefix
and computes each addition, D keeps what it was sent.
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, RoutingRequest, split_over
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.apart import NEEDS, on_the_spot, pair, prefillers


class StaticPd:
    """The policy takes the least loaded worker of each kind, and keeps no state."""

    needs = NEEDS

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        found = pair((fleet.least_one(),), fleet) or pair(fleet.least(len(fleet)), fleet)
        if found is None:
            return on_the_spot(request, fleet.least_one())
        worker, prefill = found
        return split_over(request, worker, prefill, moved_tokens=request.prompt_tokens)


class StaticPdDelta:
    """The policy decodes at the session's home and prefills at whoever else holds most of the
    prompt. It keeps no state."""

    needs = NEEDS

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        worker = request.home or fleet.least_one()
        found = pair((worker,), fleet) or pair(fleet.least(len(fleet)), fleet)
        if found is None:
            return on_the_spot(request, worker)
        worker, least = found
        able = prefillers(worker, [*request.prefill_holders(fleet), *fleet.least_prefill(2)])
        prefill = max(able or [least], key=request.cached_on)
        lacking = request.prompt_tokens - request.cached_on(worker)
        return split_over(request, worker, prefill, moved_tokens=lacking)
