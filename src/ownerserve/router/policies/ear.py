"""EAR: affinity by default, and a move when the owner is hot.

Source: seed 002 §4. A cold start goes where least is pending; every later turn to the session's
owner; when others' work there passes T_hot, the session moves to the least loaded worker with room
(pricing.py). Decided by observable load, never by predicted transfer times (seed 002 §4.3.2).
"""

from __future__ import annotations

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.decision import (
    Decision,
    DispatchReason,
    Move,
    RoutingRequest,
    bring_to,
    run_at,
    start_at,
)
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.pricing import (
    STAYS_CALM,
    HomeHeat,
    PlacementPricer,
    heat,
    peer_copy,
    start,
    stored_copy,
    wait_ms,
)
from ownerserve.router.settings import DEFAULTS, Settings
from ownerserve.router.worker import Worker

_STAYS = {
    HomeHeat.CALM: DispatchReason.OWNER,
    HomeHeat.COOLING: DispatchReason.HOT_COOLING,
    HomeHeat.STUCK: DispatchReason.HOT_NO_TARGET,
}


class Ear:
    """The policy keeps no state: when a session last moved is known of the session itself."""

    needs = ANY_WORKER

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._settings = settings
        self._pricer = PlacementPricer(settings)

    def tune(self, settings: Settings) -> None:
        """Decide from now on by the derived numbers of `settings`, but where one is by hand."""
        self._settings = self._settings.following(settings)
        self._pricer = PlacementPricer(self._settings)

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        home = request.home
        if home is None:
            if request.copies:
                return start(request, fleet, pricer=self._pricer, settings=self._settings)
            return start_at(request, fleet.least_one())
        waits_ms = wait_ms(request, home, fleet)
        state, target = STAYS_CALM
        if waits_ms > self._settings.hot_ms:
            state, target = heat(
                request, waits_ms, home, fleet=fleet, settings=self._settings, pressure=wait_ms
            )
        if target is None:
            return run_at(request, home, _STAYS[state])
        return move(request, home, target, fleet=fleet)


def move(request: RoutingRequest, home: Worker, target: Worker, *, fleet: Candidates) -> Decision:
    """Leave `home` for `target`: migrate; else fetch, load or compute anew, and want it migrated.

    Computing a long context anew can take longer than any queue: then the turn stays, with the
    wish, which whoever performs migrations may grant in the next tool gap.
    """
    actions = target.profile.actions
    peer, stored = peer_copy(request, target), stored_copy(request, target)
    spared_ms = wait_ms(request, home, fleet) - target.queue_ms
    wanted = Move(request.owner or home, target, request.known_tokens, spared_ms)
    reason = DispatchReason.HOT_OWNER
    if peer is not None and peer.worker is request.owner and _MIGRATION in actions:
        return bring_to(request, target, reason, action=_MIGRATION, source=peer)
    if peer is not None and _FETCH in actions:
        return bring_to(request, target, reason, action=_FETCH, source=peer, wanted=wanted)
    if stored is not None and _RESTORE in actions:
        return bring_to(request, target, reason, action=_RESTORE, source=stored, wanted=wanted)
    held, kept = request.cached_on(target), request.cached_on(home)
    anew_ms = target.speed.prefill.ms(request.prompt_tokens - held, held)
    stay_ms = home.speed.prefill.ms(request.prompt_tokens - kept, kept)
    if target.queue_ms + anew_ms < wait_ms(request, home, fleet) + stay_ms:
        return run_at(request, target, reason, wanted=wanted)
    return run_at(request, home, DispatchReason.HOT_TOO_DEAR, wanted=wanted)


_MIGRATION = PlacementAction.STATE_MIGRATION
_FETCH = PlacementAction.ARTIFACT_FETCH
_RESTORE = PlacementAction.TAIL_RECOMPUTE
