"""This module is what the pricing policies (ear, ownerserve) share: options, costs, the start, the
heat.

**Costs** (seed 000 §3.6.5): each term in ms, priced for one option at a time.

    C(a) = T_queue + T_compute + T_network + T_restore + lambda M_HBM + delta D + mu I_decode

| term | is |
|---|---|
| queue | until the prefilling worker begins: pending prefill tokens x its ms a token; computed |
| | apart, also what is left of the other one's when the state has come |
| compute | prefill of what is not cached, then decode of the expected answer in that batch |
| network | bytes that come from another worker's memory |
| restore | bytes that come from a store tier, and the tokens computed again after a restore |
| memory | lambda x GiB of device memory newly taken x how full that memory is |
| duplicate | delta x GiB that lie on two devices from then on, x how full the other one is |
| interference | mu x ms of prefill x sequences that decode there meanwhile |

A sequence's bytes are those of its tokens and what it keeps beside: point state, which is taken,
sent and held twice whole, however few tokens go with it. Network and restore are priced without
overlap with compute: an upper bound, the same for all options. Nothing is counted twice: what waits
behind a queue is in `queue`, what runs is in the others.

**Options**: a worker's abilities, the turn's class and the known copies say in which ways a turn
can be placed there. Nothing else asks what a worker can do.

**Start** of a turn without an owner: new, forked, its owner gone, or nobody's.

held by nobody      the least loaded; prefilled apart where that is priced lower
a fork              where the shared prefix lies, or one more read-only replica (rule 3)
the owner is gone   from a copy that outlived it, else from the token log (rule 4)

**Heat**: EAR's trigger, target and brakes decide when a session leaves a busy owner (seed 002 §4.3,
§6). A session at its owner, when a turn of it arrives:

| state | holds when | then |
|---|---|---|
| calm | the pressure there is <= T_hot, or <= hot_ratio x the target's | stays |
| cooling | it is hot, and the session moved less than T_cool ago | stays |
| stuck | it is hot, but nobody else has room for the context | stays |
| leaving | otherwise | moves to the least busy worker with room |

Pressure is measured by what is observable: for EAR pending prefill tokens, as time at the worker's
own rate; for OwnerServe also the sequences that decode there (policies/ownerserve.py).
What brakes: the session's own pending work does not make its owner hot for it (a giant session
would flee from itself), the target must be less busy by the relative term too (a fleet that is hot
everywhere keeps still), and after a move the session stays for T_cool (O(lifetime / T_cool) moves).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.kv.units import GIB
from ownerserve.router.decision import (
    STRATEGIES,
    Decision,
    DispatchReason,
    Option,
    Replica,
    RoutingRequest,
    TurnClass,
    take,
)
from ownerserve.router.fleet import ALIKE, Candidates, room_tokens
from ownerserve.router.sessions import Copy, Use
from ownerserve.router.settings import Settings
from ownerserve.router.worker import Worker


class PlacementPricer:
    """A pricer prices options of placing one request. It holds the weights, no state."""

    def __init__(self, settings: Settings) -> None:
        self._lambda = settings.memory_ms_per_gib / GIB
        self._delta = settings.duplicate_ms_per_gib / GIB
        self._mu = settings.interference
        self._refill_most = settings.move_refill_share

    def takes(self, worker: Worker, tokens: float) -> bool:
        """Return whether `worker` may be given so much state that could be elsewhere: what that
        displaces lasts long enough beside what bringing it back takes, or the worker does not
        say. A gate and no price."""
        share = worker.load.refill_share(tokens)
        return share is None or share <= self._refill_most

    def local(self, request: RoutingRequest, worker: Worker) -> Option:
        """Price computing at `worker` whatever its device does not hold."""
        cached = request.cached_on(worker)
        is_going_on = cached > 0 and request.turn is _CONTINUATION
        action = _DECODE if is_going_on else _COLOCATED
        return self._price(request, worker, action, cached, cached, None)

    def bring(
        self, request: RoutingRequest, worker: Worker, *, action: PlacementAction, source: Copy
    ) -> Option:
        """Price bringing the state from `source` to `worker` and computing the rest there."""
        tokens, known_tokens = source.tokens, request.known_tokens
        cached = tokens if tokens < known_tokens else known_tokens
        return self._price(request, worker, action, cached, request.cached_on(worker), source)

    def apart(self, request: RoutingRequest, worker: Worker, prefill: Worker) -> Option:
        """Price a prefill at `prefill`, sending what `worker` lacks there, and decoding at
        `worker`, which computes the prompt's end itself: no state gives the first token. What still
        stands before that there once the state has come is waited for too."""
        there = worker.speed
        held, lent = request.cached_on(worker), request.cached_on(prefill)
        prompt = request.prompt_tokens
        prefill_ms = prefill.speed.prefill.ms(prompt - lent, lent)
        network_ms = there.media[_PEER].ms(there.sequence_bytes(prompt - held))
        come_ms = prefill.queue_ms + prefill_ms + network_ms
        queue_ms = prefill.queue_ms + max(worker.queue_ms - come_ms, 0.0)
        end_ms = there.prefill.ms(1, prompt - 1)
        step_ms = there.step_ms + there.step_ms_per_sequence * (worker.batch + 1)
        compute_ms = prefill_ms + end_ms + request.output_tokens * step_ms
        taken_bytes = there.sequence_bytes(prompt - held + request.output_tokens)
        memory_ms = self._lambda * taken_bytes * worker.occupancy
        # The prefilling worker keeps what it computed until it needs the room, or frees it at once.
        is_kept = not prefill.profile.frees_prompts
        duplicate_ms = self._held_twice_ms(prompt - lent, prefill) if is_kept else 0.0
        interference_ms = self._mu * (prefill_ms * prefill.batch + end_ms * worker.batch)
        return Option(
            _REMOTE, worker, lent, queue_ms, compute_ms, network_ms, 0.0, memory_ms, duplicate_ms,
            interference_ms, queue_ms + compute_ms + network_ms + memory_ms + duplicate_ms
            + interference_ms, prompt - held, None, prefill,
        )  # fmt: skip

    def _price(
        self,
        request: RoutingRequest,
        worker: Worker,
        action: PlacementAction,
        cached: int,
        held: int,
        source: Copy | None,
    ) -> Option:
        """Price a turn of which `held` of the `cached` tokens are at the worker, the others coming
        from `source`."""
        speed, load = worker.speed, worker.load
        batch, queue_ms, occupancy = worker.batch, load.queue_ms, load.occupancy
        answer_tokens = request.output_tokens
        prompt_tokens = request.prompt_tokens
        prefill_ms = speed.prefill.ms(prompt_tokens - cached, cached)
        compute_ms = prefill_ms + answer_tokens * (
            speed.step_ms + speed.step_ms_per_sequence * (batch + 1)
        )
        network_ms = restore_ms = memory_ms = duplicate_ms = 0.0
        if source is not None:
            moved_bytes = speed.sequence_bytes(cached - held)
            if speed.replay_tokens:
                restore_ms = speed.prefill.ms(min(speed.replay_tokens, cached), cached)
                prefill_ms += restore_ms
            holder = source.worker or worker
            if source.tier is not _DEVICE:
                restore_ms += holder.speed.media[source.tier].ms(moved_bytes)
            if holder is not worker:
                network_ms = speed.media[_PEER].ms(moved_bytes)
        if occupancy:
            taken_tokens = prompt_tokens - held + answer_tokens
            memory_ms = self._lambda * speed.sequence_bytes(taken_tokens) * occupancy
        if action is not _MIGRATION:
            known_tokens = request.known_tokens
            for copy in request.copies:
                if copy.worker is not worker:
                    tokens = copy.tokens if copy.tokens < known_tokens else known_tokens
                    twice_ms = self._duplicate_ms(tokens - held, copy)
                    if twice_ms > duplicate_ms:
                        duplicate_ms = twice_ms
        interference_ms = self._mu * prefill_ms * batch
        total_ms = queue_ms + compute_ms + network_ms + restore_ms
        total_ms += memory_ms + duplicate_ms + interference_ms
        return Option(
            action, worker, cached, queue_ms, compute_ms, network_ms, restore_ms, memory_ms,
            duplicate_ms, interference_ms, total_ms, cached - held, source,
        )  # fmt: skip

    def _duplicate_ms(self, tokens: int, copy: Copy) -> float:
        """Return what it costs, in ms, that `copy` holds so many of the tokens too."""
        holder = copy.worker
        if tokens <= 0 or holder is None or copy.tier is not _DEVICE:
            return 0.0
        return self._held_twice_ms(tokens, holder)

    def _held_twice_ms(self, tokens: int, holder: Worker) -> float:
        return self._delta * holder.speed.sequence_bytes(tokens) * holder.occupancy


_CONTINUATION = TurnClass.DECODE_CONTINUATION
_DEVICE, _PEER = Tier.DEVICE, Tier.PEER
_DECODE = PlacementAction.DECODE_CONTINUATION
_COLOCATED = PlacementAction.COLOCATED_PREFILL
_REMOTE = PlacementAction.REMOTE_PREFILL
_MIGRATION = PlacementAction.STATE_MIGRATION


_APART = PlacementAction.REMOTE_PREFILL
_RESTORE = PlacementAction.TAIL_RECOMPUTE
_FETCH = PlacementAction.ARTIFACT_FETCH
_BRINGING = (_MIGRATION, _FETCH)


class _Offer(NamedTuple):
    """An offer is what a worker can do for a class of turns. `brings`: actions that bring state
    from a peer, the best first."""

    apart: bool
    restores: bool
    brings: tuple[PlacementAction, ...]


@cache
def _offer(turn: TurnClass, actions: frozenset[PlacementAction]) -> _Offer:
    """Return what a worker of these actions offers a turn of this class; cached, as there are few
    of both."""
    able = actions.intersection(STRATEGIES[turn])
    return _Offer(_APART in able, _RESTORE in able, tuple(one for one in _BRINGING if one in able))


def options_at(
    request: RoutingRequest, worker: Worker, *, pricer: PlacementPricer, fleet: Candidates
) -> list[Option]:
    """Return every way to run the turn at `worker`, priced: on the spot always, the others where
    they apply."""
    local = pricer.local(request, worker)
    options = [local]
    profile = worker.profile
    offer = _offer(request.turn, profile.actions)
    if offer.apart:
        prefill = next(iter(fleet.least_prefill(1)), worker)
        new_tokens = request.prompt_tokens - request.cached_on(prefill)
        if prefills_for(prefill, worker) and pricer.takes(prefill, new_tokens):
            options.append(pricer.apart(request, worker, prefill))
    if not request.copies or request.spec_digest != profile.spec_digest:
        return options
    held = request.cached_on(worker)
    if offer.restores:
        stored = stored_copy(request, worker)
        if stored is not None and stored.tokens > held:
            options.append(pricer.bring(request, worker, action=_RESTORE, source=stored))
            if stored.use is Use.LOADED:
                options.remove(local)
    if offer.brings:
        peer = peer_copy(request, worker)
        if peer is not None and peer.tokens > held:
            for action in offer.brings:
                if _may(action, request, peer):
                    options.append(pricer.bring(request, worker, action=action, source=peer))
                    break  # a migration costs what a fetch costs, and leaves no second copy
    return options


def stored_copy(request: RoutingRequest, worker: Worker) -> Copy | None:
    """Return the longest copy that `worker` can load by itself, from its own tiers or the shared
    store, and has not said it would leave, of equals the one that is loaded soonest; None when
    there is none."""
    found = None
    for copy in request.copies:
        is_own = copy.worker is worker and copy.tier is not _DEVICE and copy.use is not Use.LEFT
        if not is_own and copy.worker is not None:
            continue
        if found is None or _is_better(copy, found, worker):
            found = copy
    return found


def _is_better(copy: Copy, other: Copy, worker: Worker) -> bool:
    """Return whether `worker` has more by loading `copy` than `other`, or as much sooner."""
    if copy.tokens != other.tokens:
        return copy.tokens > other.tokens
    media, moved_bytes = worker.speed.media, worker.speed.sequence_bytes(copy.tokens)
    return media[copy.tier].ms(moved_bytes) < media[other.tier].ms(moved_bytes)


def has_more_stored(request: RoutingRequest, worker: Worker) -> bool:
    """Return whether `worker` can load more of the prompt than its device has: not for most
    turns."""
    if len(request.copies) < 2 and (not request.copies or request.copies[0].tier is _DEVICE):
        return False
    stored = stored_copy(request, worker)
    return stored is not None and stored.tokens > request.cached_on(worker)


def peer_copy(request: RoutingRequest, worker: Worker) -> Copy | None:
    """Return the longest copy that another worker can send, of equals the least busy one's, from
    its device where that has it; None when there is none. Of other tiers what it lends counts."""
    found = None
    for copy in request.copies:
        other = copy.worker
        if other is None or other is worker or copy.tier not in other.profile.lends:
            continue
        if not shares_state(other, worker):
            continue
        if found is None or found.worker is None:
            found = copy
            continue
        if (copy.tokens, -other.queue_ms, copy.tier is _DEVICE) > (
            found.tokens, -found.worker.queue_ms, found.tier is _DEVICE
        ):  # fmt: skip
            found = copy
    return found


def shares_state(one: Worker, other: Worker) -> bool:
    """Return whether state computed by one can be used by the other: plain engines state no
    digest, and their models tell them apart."""
    digest = one.profile.spec_digest
    if digest != other.profile.spec_digest:
        return False
    return digest != "" or one.profile.model == other.profile.model


def prefills_for(prefill: Worker, worker: Worker) -> bool:
    """Return whether `prefill` can compute a prompt for `worker`, which is another: that one can be
    sent state, and what this one computes is of use there and can be sent, by its own word or its
    operator's."""
    if prefill is worker or _APART not in worker.profile.actions:
        return False
    sends = _APART in prefill.profile.actions or _DEVICE in prefill.profile.lends
    return sends and shares_state(prefill, worker)


def _may(action: PlacementAction, request: RoutingRequest, peer: Copy) -> bool:
    """Return whether the action may bring `peer`: only its owner's state migrates, what others hold
    read-only is fetched."""
    return action is not _MIGRATION or peer.worker is request.owner


def few(request: RoutingRequest, fleet: Candidates, *, count: int) -> list[Worker]:
    """Return the small set that is priced: the home, the holders and the `count` least loaded."""
    home = () if request.home is None else (request.home,)
    return [*home, *request.holders(fleet), *fleet.least(count)]


def rank(
    request: RoutingRequest,
    workers: Iterable[Worker],
    *,
    pricer: PlacementPricer,
    fleet: Candidates,
) -> list[Option]:
    """Price all options at `workers` and return them, the cheapest first; of equal ones, the
    earlier worker's."""
    options: list[Option] = []
    for worker in dict.fromkeys(workers):
        options += options_at(request, worker, pricer=pricer, fleet=fleet)
    options.sort(key=_BY_TOTAL)
    return options


def start(
    request: RoutingRequest, fleet: Candidates, *, pricer: PlacementPricer, settings: Settings
) -> Decision:
    """Decide where a turn without an owner starts: by the cheapest option at the few that are
    priced; where no session stands behind it, workers that are alike take turns."""
    workers = few(request, fleet, count=settings.candidates)
    passing = fleet.next_in_turn() if request.session is None else None
    if passing is not None:
        workers.append(passing)
    ranked = rank(request, workers, pricer=pricer, fleet=fleet)
    best = ranked[0]
    if passing is not None and best.worker is not passing:
        until_ms = best.total_ms * ALIKE
        alike = (one for one in ranked if one.worker is passing and one.total_ms <= until_ms)
        best = next(alike, best)
    why = _why(request, ranked)
    wanted = _replica(best, ranked) if why is DispatchReason.FORK else None
    return take(best, why, ranked=ranked, wanted=wanted)


def _replica(best: Option, ranked: Sequence[Option]) -> Replica | None:
    """Return the replica by which a fork would have been cheaper elsewhere than at a holder of its
    prefix, as `best` is: all that kept it there is the way of the state."""
    holder, tokens, found = best.worker, best.cached_tokens, None
    if _DEVICE not in holder.profile.lends:
        return None
    for option in ranked:
        if option.action is not _FETCH or option.worker is holder:
            continue
        gain_ms = best.total_ms - (option.total_ms - option.network_ms)
        if gain_ms > (0.0 if found is None else found.gain_ms):
            found = Replica(holder, option.worker, tokens, gain_ms)
    return found


_BY_TOTAL = attrgetter("total_ms")


def _why(request: RoutingRequest, ranked: Sequence[Option]) -> DispatchReason:
    best = ranked[0]
    if request.session is None:
        return DispatchReason.NO_SESSION
    if request.turns:
        if best.cached_tokens:
            return DispatchReason.RECOVERED
        is_left = any(copy.use is Use.LEFT for copy in request.copies)
        is_kept = is_left or any(option.cached_tokens for option in ranked)
        return DispatchReason.RECOMPUTED if is_kept else DispatchReason.OWNER_LOST
    if not request.copies:
        return DispatchReason.NEW_SESSION
    is_on_the_spot = best.action is PlacementAction.COLOCATED_PREFILL and best.cached_tokens > 0
    return DispatchReason.FORK if is_on_the_spot else DispatchReason.REPLICA


class HomeHeat(Enum):
    """A home's heat says whether a session stays there or leaves, and why it stays."""

    CALM = "calm"
    COOLING = "cooling"
    STUCK = "stuck"
    LEAVING = "leaving"


_CALM, _COOLING, _STUCK, _LEAVING = HomeHeat
STAYS_CALM: tuple[HomeHeat, Worker | None] = (_CALM, None)
"""What holds up to T_hot: `heat` need not be asked."""

Takes: TypeAlias = Callable[[Worker], bool]
"""Whether the worker may be moved to."""


def takes_all(worker: Worker) -> bool:
    """Return True: every worker with room may be moved to."""
    return True


Pressure: TypeAlias = Callable[[RoutingRequest, Worker, Candidates], float]
"""What leaving the worker could spare a turn, in ms."""


def wait_ms(request: RoutingRequest, worker: Worker, fleet: Candidates) -> float:
    """Return EAR's pressure: how long, in ms, others' pending prefill keeps the turn waiting
    there."""
    load, own = worker.load, request.own_pending_tokens
    if not own or worker is not request.home or load.pending_tokens <= 0:
        return load.queue_ms
    return load.queue_ms * max(load.pending_tokens - own, 0) / load.pending_tokens


def heat(
    request: RoutingRequest,
    pressure_ms: float,
    home: Worker,
    *,
    fleet: Candidates,
    settings: Settings,
    pressure: Pressure,
    takes: Takes = takes_all,
) -> tuple[HomeHeat, Worker | None]:
    """Return the state of a session whose home is under a pressure over T_hot, and the worker that
    it leaves for (None: it stays)."""
    target = least_with_room(request, home, fleet, takes=takes)
    if target is None:
        return _STUCK, None
    if pressure_ms <= settings.hot_ratio * pressure(request, target, fleet):
        return STAYS_CALM
    if request.since_move_s < settings.cool_s:
        return _COOLING, None
    return _LEAVING, target


def least_with_room(
    request: RoutingRequest, home: Worker | None, fleet: Candidates, *, takes: Takes
) -> Worker | None:
    """Return the least loaded worker of all but `home` whose free memory takes the whole context
    and that may be moved to; None when there is none."""
    tokens = request.prompt_tokens + request.output_tokens
    least = fleet.least_one()
    if least is not home and room_tokens(least) >= tokens and takes(least):
        return least  # as a rule: the others need not be looked at
    return fleet.least_with_room(tokens, but=home, takes=takes)
