"""Round-robin PD: prefill and decode workers in turn, blind to what they hold.

Source: seed 000 §3.8. All of the state is sent each time.
"""

from __future__ import annotations

from ownerserve.router.decision import Decision, RoutingRequest, split_over
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.apart import NEEDS, on_the_spot, prefillers
from ownerserve.router.policies.round_robin import Rotation


class RoundRobinPd:
    """The policy keeps two rotations; in a fleet of hybrid workers both go over all of them."""

    needs = NEEDS

    def __init__(self) -> None:
        self._decode = Rotation()
        self._prefill = Rotation()

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        worker, prefilling = self._decode.next(fleet), fleet.prefilling()
        others = prefillers(worker, prefilling)
        if not others:
            able = [one for one in fleet if prefillers(one, prefilling)]
            if not able:
                return on_the_spot(request, worker)
            worker = self._decode.next(able)
            others = prefillers(worker, prefilling)
        prefill = self._prefill.next(others)
        return split_over(request, worker, prefill, moved_tokens=request.prompt_tokens)
