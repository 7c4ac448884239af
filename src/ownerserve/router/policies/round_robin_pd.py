"""Round-robin PD: prefill and decode workers in turn, blind to what they hold.

Source: seed 000 §3.8. All of the state is sent each time.
"""

from __future__ import annotations

from ownerserve.router.candidates import Candidates
from ownerserve.router.deciding import split_over, start_at
from ownerserve.router.decision import Decision
from ownerserve.router.policies.rotation import Rotation
from ownerserve.router.policies.static_pd import prefillers
from ownerserve.router.request import Request


class RoundRobinPd:
    """Two rotations; in a fleet of hybrid workers both go over all of them."""

    def __init__(self) -> None:
        self._decode = Rotation()
        self._prefill = Rotation()

    def decide(self, request: Request, fleet: Candidates) -> Decision:
        worker = self._decode.next(fleet)
        others = prefillers(worker, fleet.prefilling())
        if not others:
            return start_at(request, worker)
        prefill = self._prefill.next(others)
        return split_over(request, worker, prefill, moved_tokens=request.prompt_tokens)
