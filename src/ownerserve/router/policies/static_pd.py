"""Static PD: prefill always on one worker, decode always on another; all of the state is sent.

Source: seed 000 §3.8, seed 002 §3.2 (4 P / 4 D). The least loaded of each kind; in a fleet of
hybrid workers the two are the least loaded pair. With one worker alone it does both.
"""

from __future__ import annotations

from collections.abc import Iterable

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.candidates import Candidates
from ownerserve.router.deciding import split_over, start_at
from ownerserve.router.decision import Decision
from ownerserve.router.request import Request
from ownerserve.router.ways import shares_state
from ownerserve.router.worker import Worker


class StaticPd:
    """Keeps no state."""

    def decide(self, request: Request, fleet: Candidates) -> Decision:
        worker = fleet.least_one()
        prefill = next(iter(prefillers(worker, fleet.least_prefill(2))), None)
        if prefill is None:
            return start_at(request, worker)
        return split_over(request, worker, prefill, moved_tokens=request.prompt_tokens)


def prefillers(worker: Worker, offered: Iterable[Worker]) -> list[Worker]:
    """Those of `offered` that can prefill for `worker`; none when it can't be sent state."""
    if PlacementAction.REMOTE_PREFILL not in worker.profile.actions:
        return []
    return [other for other in offered if other is not worker and shares_state(other, worker)]
