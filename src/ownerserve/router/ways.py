"""Which ways there are to place a turn at a worker: what its abilities, the turn's class and the
known copies allow. The only place that asks what a worker can do.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.router.candidates import Candidates
from ownerserve.router.costs import Pricer
from ownerserve.router.decision import Option
from ownerserve.router.extents import Copy
from ownerserve.router.request import Request
from ownerserve.router.turns import STRATEGIES, TurnClass
from ownerserve.router.worker import Worker

_APART = PlacementAction.REMOTE_PREFILL
_RESTORE = PlacementAction.TAIL_RECOMPUTE
_MIGRATION = PlacementAction.STATE_MIGRATION
_BRINGING = (_MIGRATION, PlacementAction.ARTIFACT_FETCH)
_DEVICE, _DISK = Tier.DEVICE, Tier.DISK


class _Offer(NamedTuple):
    """What a worker can do for a class of turns. `brings`: the ways from a peer, the first best."""

    apart: bool
    restores: bool
    brings: tuple[PlacementAction, ...]


@cache
def _offer(turn: TurnClass, actions: frozenset[PlacementAction]) -> _Offer:
    """One for each class of turns and kind of worker: both are few."""
    able = actions.intersection(STRATEGIES[turn])
    return _Offer(_APART in able, _RESTORE in able, tuple(one for one in _BRINGING if one in able))


def ways_at(request: Request, worker: Worker, *, pricer: Pricer, fleet: Candidates) -> list[Option]:
    """Every way to run the turn at `worker`: on the spot always, the others where they apply."""
    ways = [pricer.local(request, worker)]
    profile = worker.profile
    offer = _offer(request.turn, profile.actions)
    if offer.apart:
        prefill = next(iter(fleet.least_prefill(1)), worker)
        if prefill is not worker and shares_state(prefill, worker):
            ways.append(pricer.apart(request, worker, prefill))
    if not request.copies or request.spec_digest != profile.spec_digest:
        return ways
    held = request.cached_on(worker)
    if offer.restores:
        stored = stored_copy(request, worker)
        if stored is not None and stored.tokens > held:
            ways.append(pricer.bring(request, worker, action=_RESTORE, source=stored))
    if offer.brings:
        peer = peer_copy(request, worker)
        if peer is not None and peer.tokens > held:
            for action in offer.brings:
                if _may(action, request, peer):
                    ways.append(pricer.bring(request, worker, action=action, source=peer))
                    break  # a migration costs what a fetch costs, and leaves no second copy
    return ways


def stored_copy(request: Request, worker: Worker) -> Copy | None:
    """The longest copy that `worker` can load by itself: its own tiers, or the shared store."""
    found = None
    for copy in request.copies:
        is_own = copy.worker is worker and copy.tier is not _DEVICE
        if (is_own or copy.worker is None) and (found is None or copy.tokens > found.tokens):
            found = copy
    return found


def has_more_stored(request: Request, worker: Worker) -> bool:
    """Whether `worker` can load more of the prompt than its device has: not for most turns."""
    if len(request.copies) < 2 and (not request.copies or request.copies[0].tier is _DEVICE):
        return False
    stored = stored_copy(request, worker)
    return stored is not None and stored.tokens > request.cached_on(worker)


def peer_copy(request: Request, worker: Worker) -> Copy | None:
    """The longest copy that another worker can send, the least busy one's of equals: nobody sends
    from a disk."""
    found = None
    for copy in request.copies:
        other = copy.worker
        if other is None or other is worker or copy.tier is _DISK:
            continue
        if not shares_state(other, worker):
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
    return action is not _MIGRATION or peer.worker is request.owner
