"""Static PD: prefill always on one worker, decode always on another; all of the state is sent.

Source: seed 000 §3.8, seed 002 §3.2 (4 P / 4 D). The least loaded of each kind; in a fleet of
hybrid workers the two are the least loaded pair.
"""

from __future__ import annotations

from ownerserve.router.candidates import Candidates
from ownerserve.router.deciding import split_over
from ownerserve.router.decision import Decision
from ownerserve.router.policies.apart import NEEDS, on_the_spot, pair
from ownerserve.router.request import Request


class StaticPd:
    """Keeps no state."""

    needs = NEEDS

    def decide(self, request: Request, fleet: Candidates) -> Decision:
        found = pair((fleet.least_one(),), fleet) or pair(fleet.least(len(fleet)), fleet)
        if found is None:
            return on_the_spot(request, fleet.least_one())
        worker, prefill = found
        return split_over(request, worker, prefill, moved_tokens=request.prompt_tokens)
