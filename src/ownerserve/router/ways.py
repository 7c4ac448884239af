"""Which ways there are to place a turn at a worker: what its abilities, the turn's class and the
known copies allow. The only place that asks what a worker can do.
"""

from __future__ import annotations

from collections.abc import Iterator

from ownerserve.kv.messages import PlacementAction
from ownerserve.plan.inputs import Tier
from ownerserve.router.candidates import Candidates
from ownerserve.router.costs import Pricer
from ownerserve.router.decision import Option
from ownerserve.router.extents import Copy
from ownerserve.router.request import Request
from ownerserve.router.turns import STRATEGIES
from ownerserve.router.worker import Worker

_BRINGING = (PlacementAction.STATE_MIGRATION, PlacementAction.ARTIFACT_FETCH)


def ways_at(
    request: Request, worker: Worker, *, pricer: Pricer, fleet: Candidates
) -> Iterator[Option]:
    """Every way to run the turn at `worker`: on the spot always, the others where they apply."""
    yield pricer.local(request, worker)
    offered, actions = STRATEGIES[request.turn], worker.profile.actions
    if PlacementAction.REMOTE_PREFILL in offered and PlacementAction.REMOTE_PREFILL in actions:
        for prefill in fleet.least_prefill(1):
            if prefill is not worker and shares_state(prefill, worker):
                yield pricer.apart(request, worker, prefill)
    if not request.copies or request.spec_digest != worker.profile.spec_digest:
        return
    held = request.cached_on(worker)
    if PlacementAction.TAIL_RECOMPUTE in offered and PlacementAction.TAIL_RECOMPUTE in actions:
        stored = stored_copy(request, worker)
        if stored is not None and stored.tokens > held:
            yield pricer.bring(
                request, worker, action=PlacementAction.TAIL_RECOMPUTE, source=stored
            )
    peer = peer_copy(request, worker)
    if peer is not None and peer.tokens > held:
        for action in _BRINGING:
            if action in offered and action in actions and _may(action, request, peer):
                yield pricer.bring(request, worker, action=action, source=peer)
                return  # a migration costs what a fetch costs, and leaves no second copy


def stored_copy(request: Request, worker: Worker) -> Copy | None:
    """The longest copy that `worker` can load by itself: its own tiers, or the shared store."""
    found = None
    for copy in request.copies:
        is_own = copy.worker is worker and copy.tier is not Tier.DEVICE
        if (is_own or copy.worker is None) and (found is None or copy.tokens > found.tokens):
            found = copy
    return found


def peer_copy(request: Request, worker: Worker) -> Copy | None:
    """The longest copy that another worker holds, the least busy one's of equals."""
    found = None
    for copy in request.copies:
        other = copy.worker
        if other is None or other is worker or not shares_state(other, worker):
            continue
        if found is None or found.worker is None or (copy.tokens, -other.queue_ms) > (
            found.tokens, -found.worker.queue_ms
        ):  # fmt: skip
            found = copy
    return found


def shares_state(one: Worker, other: Worker) -> bool:
    """Whether state computed by one can be used by the other."""
    return one.profile.spec_digest == other.profile.spec_digest


def _may(action: PlacementAction, request: Request, peer: Copy) -> bool:
    """Only its owner's state migrates: what others hold read-only is fetched."""
    return action is not PlacementAction.STATE_MIGRATION or peer.worker is request.owner
