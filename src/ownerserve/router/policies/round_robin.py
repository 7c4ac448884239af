"""Round robin: each worker in turn, blind to sessions and load. The baseline."""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.router.fleet import Worker
from ownerserve.router.messages import Reason
from ownerserve.router.policies.base import Choice, Request


class RoundRobin:
    """The next worker in stable order after the one that was chosen last."""

    def __init__(self) -> None:
        self._last_order = -1

    def choose(self, request: Request, candidates: Sequence[Worker]) -> Choice:
        for worker in candidates:
            if worker.order > self._last_order:
                break
        else:
            worker = candidates[0]
        self._last_order = worker.order
        return Choice(worker, Reason.ROUND_ROBIN)
