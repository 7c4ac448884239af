"""Round robin: each worker in turn, blind to sessions and load. The baseline of seed 002 §5.1."""

from __future__ import annotations

from collections.abc import Iterable

from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.worker import Worker


class Rotation:
    """A rotation remembers which worker was last, by stable order, so that workers may come and
    go."""

    def __init__(self) -> None:
        self._last_order = -1

    def next(self, workers: Iterable[Worker]) -> Worker:
        """Return the worker after the last one, which it becomes; `workers` are in stable order, at
        least one."""
        first = None
        for worker in workers:
            if worker.order > self._last_order:
                break
            first = first or worker
        else:
            assert first is not None
            worker = first
        self._last_order = worker.order
        return worker


class RoundRobin:
    """The policy takes the next worker in stable order after the one that it chose last."""

    needs = ANY_WORKER

    def __init__(self) -> None:
        self._rotation = Rotation()

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        return run_at(request, self._rotation.next(fleet), DispatchReason.ROUND_ROBIN)
