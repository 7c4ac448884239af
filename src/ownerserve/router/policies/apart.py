"""Prefill and decode on different workers: what the PD policies share."""

from __future__ import annotations

from collections.abc import Iterable

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.candidates import Candidates
from ownerserve.router.deciding import run_at
from ownerserve.router.decision import Decision
from ownerserve.router.messages import Reason
from ownerserve.router.request import Request
from ownerserve.router.ways import shares_state
from ownerserve.router.worker import Worker

NEEDS = frozenset({PlacementAction.REMOTE_PREFILL})


def prefillers(worker: Worker, offered: Iterable[Worker]) -> list[Worker]:
    """The workers of `offered` that can prefill for `worker`; none when it can't be sent state."""
    if PlacementAction.REMOTE_PREFILL not in worker.profile.actions:
        return []
    return [other for other in offered if other is not worker and shares_state(other, worker)]


def pair(workers: Iterable[Worker], fleet: Candidates) -> tuple[Worker, Worker] | None:
    """The first of `workers` that can be sent state, and the least loaded that can send it some."""
    for worker in workers:
        able = prefillers(worker, fleet.least_prefill(2)) or prefillers(worker, fleet.prefilling())
        if able:
            return worker, able[0]
    return None


def on_the_spot(request: Request, worker: Worker) -> Decision:
    """Nobody can be sent state: the turn runs where it is, and its reason says so."""
    return run_at(request, worker, Reason.NOT_OFFERED)
