"""Round robin: each worker in turn, blind to sessions and load. The baseline of seed 002 §5.1."""

from __future__ import annotations

from ownerserve.router.candidates import Candidates
from ownerserve.router.deciding import run_at
from ownerserve.router.decision import Decision
from ownerserve.router.messages import Reason
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.policies.rotation import Rotation
from ownerserve.router.request import Request


class RoundRobin:
    """The next worker in stable order after the one that was chosen last."""

    needs = ANY_WORKER

    def __init__(self) -> None:
        self._rotation = Rotation()

    def decide(self, request: Request, fleet: Candidates) -> Decision:
        return run_at(request, self._rotation.next(fleet), Reason.ROUND_ROBIN)
