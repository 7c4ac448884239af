"""OwnerServe: one owner for each session, and the cheapest way to run each turn (PD-hybrid).

Source: seed 000 §3.5-3.6. A short turn at a calm owner runs there: all that a move could save is
less than T_hot, which is what a move costs (settings.py). Any other turn is priced over all
placement actions that its class is offered (pricing.py), at the owner and, when the session may
leave (EAR's states and brakes), at those who hold its prefix and at the target; the least total
wins. Without an owner, the holders and the k least loaded are priced.

A session leaves its home only for a worker that can take it without having to bring back soon what
it displaces: the refill share that the worker states is a gate and no price. One whose home has
lost a long part of its state begins anew where that is cheapest; what home still has, if it is half
or more, is taken along only where EAR's brakes let a session move.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.decision import (
    Decision,
    DispatchReason,
    Move,
    Option,
    RoutingRequest,
    TurnClass,
    take,
)
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.pricing import (
    STAYS_CALM,
    HomeHeat,
    PlacementPricer,
    few,
    has_more_stored,
    heat,
    peer_copy,
    rank,
    start,
    wait_ms,
)
from ownerserve.router.settings import DEFAULTS, Settings
from ownerserve.router.worker import Worker

_CALM, _COLD = HomeHeat.CALM, TurnClass.COLD_RESUME
_OWNER, _CHEAPEST, _HOT_OWNER = (
    DispatchReason.OWNER,
    DispatchReason.CHEAPEST,
    DispatchReason.HOT_OWNER,
)
_MIGRATION = PlacementAction.STATE_MIGRATION
_SHORT = (TurnClass.SMALL_INCREMENT, TurnClass.DECODE_CONTINUATION)


class OwnerServe:
    """The policy keeps no state of its own: sessions, heat and prices are asked for anew at each
    turn."""

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
            return start(request, fleet, pricer=self._pricer, settings=self._settings)
        if request.lost_tokens(home) >= self._settings.long_tokens:
            return self._begin_anew(request, home, fleet)
        takes = partial(self._takes, request)
        pressure_ms = self.pressure_ms(request, home, fleet)
        state, target = STAYS_CALM
        if pressure_ms > self._settings.hot_ms:
            state, target = heat(
                request,
                pressure_ms,
                home,
                fleet=fleet,
                settings=self._settings,
                pressure=self.pressure_ms,
                takes=takes,
            )
        if state is _CALM and request.turn in _SHORT and not has_more_stored(request, home):
            option = self._pricer.local(request, home)
            return Decision(
                home, option.action, _OWNER, option.cached_tokens, alternatives=(option,)
            )
        workers: Iterable[Worker] = (home,)
        if target is not None:
            workers = (home, *filter(takes, request.holders(fleet)), target)
        elif state is _CALM and request.turn is _COLD:
            others = few(request, fleet, count=self._settings.candidates)
            workers = (home, *filter(takes, others))
        ranked = rank(request, workers, pricer=self._pricer, fleet=fleet)
        best = ranked[0]
        reason = _STAYS[state]
        if best.worker is not home:
            reason = _CHEAPEST if target is None else _HOT_OWNER
        return take(best, reason, ranked=ranked, wanted=self._wish(request, home, target, ranked))

    def _begin_anew(self, request: RoutingRequest, home: Worker, fleet: Candidates) -> Decision:
        """Choose where a session goes whose home has lost a long part of its state: home would have
        to displace as much as others, so it goes where that is cheapest."""
        tokens = request.prompt_tokens + request.output_tokens
        at_home = home.load.refill_share(tokens)
        workers = [home]
        for worker in few(request, fleet, count=self._settings.candidates):
            share = worker.load.refill_share(tokens)
            is_calmer = share is not None and at_home is not None and share <= at_home
            if is_calmer or self._takes(request, worker):
                workers.append(worker)
        if 2 * request.lost_tokens(home) <= request.known_tokens:
            workers = self._braked(request, home, workers, fleet)
        ranked = rank(request, workers, pricer=self._pricer, fleet=fleet)
        return take(ranked[0], DispatchReason.CHEAPEST, ranked=ranked)

    def _braked(
        self, request: RoutingRequest, home: Worker, others: Iterable[Worker], fleet: Candidates
    ) -> list[Worker]:
        """Return home, and of the others those to whom the session may take along what home still
        has, half of it or more, by a move's brakes: home is hot, they are surely less busy, and it
        did not move just now."""
        settings, pressure_ms = self._settings, self.pressure_ms(request, home, fleet)
        if pressure_ms <= settings.hot_ms or request.since_move_s < settings.cool_s:
            return [home]
        most_ms = pressure_ms / settings.hot_ratio
        return [home, *(one for one in others if self.pressure_ms(request, one, fleet) < most_ms)]

    def pressure_ms(self, request: RoutingRequest, worker: Worker, fleet: Candidates) -> float:
        """Return all that leaving can save, in ms: the queue, and what a larger batch than
        elsewhere costs.

        Each sequence more is delayed by the turn's prefill and makes its answer's steps slower.
        """
        waits_ms = wait_ms(request, worker, fleet)
        excess = worker.batch - fleet.mean_batch
        if excess <= 0.0:
            return waits_ms
        speed, known = worker.speed, request.known_tokens
        prefill_ms = speed.prefill.ms(request.prompt_tokens - known, known)
        slower_ms = request.output_tokens * speed.step_ms_per_sequence
        return waits_ms + excess * (self._settings.interference * prefill_ms + slower_ms)

    def _takes(self, request: RoutingRequest, worker: Worker) -> bool:
        """Return whether the session may move to the worker."""
        tokens = request.prompt_tokens + request.output_tokens - request.cached_on(worker)
        return self._pricer.takes(worker, tokens)

    def _wish(
        self, request: RoutingRequest, home: Worker, target: Worker | None, ranked: list[Option]
    ) -> Move | None:
        """Return a migration that should follow the turn, or that would have been cheaper but for
        the time on the network, for which nobody waits between turns."""
        best = ranked[0]
        if best.worker is not home:
            if best.action is _MIGRATION or not request.known_tokens:
                return None
            spared_ms = min(one.total_ms for one in ranked if one.worker is home) - best.total_ms
            return Move(request.owner or home, best.worker, request.known_tokens, spared_ms)
        source = None if target is None else peer_copy(request, target)
        holder = None if source is None else source.worker
        if target is None or source is None or holder is None or holder is not request.owner:
            return None
        moving = self._pricer.bring(request, target, action=_MIGRATION, source=source)
        spared_ms = best.total_ms - (moving.total_ms - moving.network_ms)
        if spared_ms <= 0.0:
            return None
        return Move(holder, target, request.known_tokens, spared_ms)


_STAYS = {
    HomeHeat.CALM: DispatchReason.OWNER,
    HomeHeat.COOLING: DispatchReason.HOT_COOLING,
    HomeHeat.STUCK: DispatchReason.HOT_NO_TARGET,
    HomeHeat.LEAVING: DispatchReason.HOT_TOO_DEAR,
}
