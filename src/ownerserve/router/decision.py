"""This module defines what a policy is asked about a turn, and what it answers.

A request as a policy sees it is plain facts; every token count is the router's estimate. The answer
says where the turn runs, by which action, why, and what else it would have cost: the state counts
load by it, the gateway carries it out, receipts and metrics show it. Plain data, and the makers of
the decisions that policies share.

Turns have classes, each with a default (seed 000 §3.6.4):

| class | is | by default |
|---|---|---|
| new_long_prefix | nothing is known of it, and it is long | prefill apart, else on the spot |
| small_increment | a short addition, or a short new prompt | prefill at the owner |
| long_tool_output | a long addition to a known context | prefill apart, else at the owner |
| decode_continuation | next to nothing to compute | stay with the owner |
| forked_rollout | a first turn on another session's prefix | where that is held, or fetch it |
| cold_resume | back after a long gap, or its owner was lost | load what is kept, compute the rest |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.router.sessions import Copy, Use
from ownerserve.router.settings import Settings
from ownerserve.router.worker import Speed, Worker


class Label(enum.StrEnum):
    """A label is an enum whose members are metric labels. It hashes as the text that it equals, and
    as fast (Enum's own hash does not)."""

    __hash__ = str.__hash__


class DispatchReason(Label):
    """A dispatch reason says why a worker was chosen: a label of metrics and the value of the
    x-ownerserve-reason header."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOAD = "least_load"
    SCORE = "score"
    """The best by the policy's own formula."""
    OWNER = "owner"
    NEW_SESSION = "new_session"
    OPENING = "opening"
    """Nobody knows the session, and the gateway has just begun: where others that did so send it
    too."""
    OWNER_LOST = "owner_lost"
    """The owner is gone and nothing of the session is left: a cold start from the token log."""
    RECOVERED = "recovered"
    """The owner is gone, but a copy in a store or at another worker outlived it."""
    RECOMPUTED = "recomputed"
    """The owner is gone, and a copy outlived it, but computing anew is cheaper than bringing
    that."""
    NO_SESSION = "no_session"
    FORK = "fork"
    """The session's first turn, where its parent's prefix lies."""
    REPLICA = "replica"
    """A fork, away from its prefix's busy holders: one more read-only copy is made."""
    CACHED = "cached"
    """Enough of the prompt is held there."""
    CHEAPEST = "cheapest"
    """The lowest cost of all options that were priced."""
    HOT_OWNER = "hot_owner"
    """The owner is too busy: the session moves."""
    HOT_COOLING = "hot_cooling"
    """The owner is too busy, but the session moved a short time ago: it stays."""
    HOT_NO_TARGET = "hot_no_target"
    """The owner is too busy, but nobody else has room for the context, or could take it without
    having to bring back soon what it displaces: it stays."""
    HOT_TOO_DEAR = "hot_too_dear"
    """The owner is too busy and another has room, but the turn there, its state brought or computed
    anew, would cost more than the wait that it spares: it stays."""
    EXPIRED = "expired"
    """The session was away for longer than it is kept a place for: it starts anew."""
    NOT_OFFERED = "not_offered"
    """No worker offers the action that the policy needs (any more): the turn runs on the spot."""
    NOBODY_UP = "nobody_up"
    """No worker is up that serves it: one that was is asked all the same."""
    SPLIT = "split"
    """Prefill and decode on different workers, as the policy always does."""
    NOT_SPLIT = "not_split"
    """Nobody could compute the prompt apart: the worker that was to decode computes it itself."""
    CARRIED_ON = "carried_on"
    """The worker failed in the middle of a stream: this one carries it on."""
    MOVED = "moved"
    """The turn moved amid its answer: this worker goes on with it."""
    HEDGED = "hedged"
    """Another worker sent nothing of the answer for too long: this one is asked too."""
    RETRY_NEW_CONNECTION = "retry_new_connection"
    RETRY_OTHER_WORKER = "retry_other_worker"
    RETRY_UNASKED = "retry_unasked"
    """Nobody has room: the best of all, whose queue it waits in without a promise."""


class TurnClass(Label):
    """A turn's class says what kind of work it is; it is a metric label."""

    NEW_LONG_PREFIX = "new_long_prefix"
    SMALL_INCREMENT = "small_increment"
    LONG_TOOL_OUTPUT = "long_tool_output"
    DECODE_CONTINUATION = "decode_continuation"
    FORKED_ROLLOUT = "forked_rollout"
    COLD_RESUME = "cold_resume"


_A = PlacementAction

STRATEGIES: dict[TurnClass, tuple[PlacementAction, ...]] = {
    TurnClass.NEW_LONG_PREFIX: (_A.REMOTE_PREFILL, _A.COLOCATED_PREFILL),
    TurnClass.SMALL_INCREMENT: (_A.COLOCATED_PREFILL, _A.STATE_MIGRATION, _A.ARTIFACT_FETCH,
                                _A.TAIL_RECOMPUTE),
    TurnClass.LONG_TOOL_OUTPUT: (_A.REMOTE_PREFILL, _A.COLOCATED_PREFILL, _A.STATE_MIGRATION,
                                 _A.ARTIFACT_FETCH, _A.TAIL_RECOMPUTE),
    TurnClass.DECODE_CONTINUATION: (_A.DECODE_CONTINUATION, _A.COLOCATED_PREFILL,
                                    _A.STATE_MIGRATION, _A.ARTIFACT_FETCH, _A.TAIL_RECOMPUTE),
    TurnClass.FORKED_ROLLOUT: (_A.COLOCATED_PREFILL, _A.ARTIFACT_FETCH, _A.TAIL_RECOMPUTE),
    TurnClass.COLD_RESUME: (_A.TAIL_RECOMPUTE, _A.COLOCATED_PREFILL, _A.ARTIFACT_FETCH,
                            _A.STATE_MIGRATION),
}  # fmt: skip
"""What is offered for each class, the default first; of equal prices the earlier one is taken."""


def classify(
    *, turns: int, known_tokens: int, new_tokens: int, is_cold: bool, limits: Settings
) -> TurnClass:
    """Return the class of a turn that adds `new_tokens` to `known_tokens` known ones.

    `is_cold`: the session was away for long, or its owner is gone.
    """
    if known_tokens == 0:
        return _NEW_LONG if new_tokens >= limits.long_tokens else _SMALL
    if turns == 0:
        return _FORKED
    if is_cold:
        return _COLD
    if new_tokens >= limits.long_tokens:
        return _LONG_OUTPUT
    return _CONTINUATION if new_tokens <= limits.continuation_tokens else _SMALL


# Looked up once: an enum's member takes as long to find as the rest of `classify`.
_NEW_LONG, _SMALL = TurnClass.NEW_LONG_PREFIX, TurnClass.SMALL_INCREMENT
_LONG_OUTPUT, _CONTINUATION = TurnClass.LONG_TOOL_OUTPUT, TurnClass.DECODE_CONTINUATION
_FORKED, _COLD = TurnClass.FORKED_ROLLOUT, TurnClass.COLD_RESUME


_DEVICE = Tier.DEVICE
"""An enum's member costs a look-up in its class each time: not on this path."""


class EligibleWorkers(Protocol):
    """The workers that a policy may choose from (fleet.Candidates), as far as a request looks at
    them."""

    def __contains__(self, worker: Worker, /) -> bool: ...
    def can_prefill(self, worker: Worker) -> bool:
        """Return whether `worker` prefills for others."""


class RoutingRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A routing request is a turn as a policy sees it. Every token count is the router's
    estimate."""

    prompt_tokens: int
    session: SessionId | None = None
    turn: TurnClass = TurnClass.SMALL_INCREMENT
    turns: int = 0
    """Earlier requests of the session that were dispatched."""
    home: Worker | None = None
    """Where the session's next turn goes unless there is a better place; None when it is new, or
    that worker is gone or no candidate."""
    owner: Worker | None = None
    """The worker that has the session, and alone can hand it over: its home, but while a turn
    that was sent elsewhere is not answered. None as for `home`."""
    copies: tuple[Copy, ...] = ()
    """Copies of the beginning of the prompt. Only copies that can be used now; the owner's too."""
    spec_digest: str = ""
    """The spec under which the state was computed: only workers of this digest can use `copies`."""
    known_tokens: int = 0
    """How much of the prompt was computed once, wherever it lies now."""
    is_emptied: bool = False
    """Whether its home has said that nothing of it is left on its device."""
    output_tokens: int = 0
    own_pending_tokens: int = 0
    """Prefill of the session's own other requests that its home has not begun to answer."""
    idle_s: float = 0.0
    """Since the session's last turn ended."""
    since_move_s: float = float("inf")
    """Since the session last changed its owner for load's sake."""
    now_s: float = 0.0

    def cached_on(self, worker: Worker) -> int:
        """Return how many tokens of the prompt lie on `worker`'s device, so that they cost it
        nothing."""
        tokens = 0
        for copy in self.copies:
            if copy.worker is worker and copy.tier is _DEVICE and copy.tokens > tokens:
                tokens = copy.tokens
        return tokens if tokens < self.known_tokens else self.known_tokens if tokens else 0

    def reusable_on(self, worker: Worker) -> int:
        """Return how many tokens of the prompt `worker` has in any tier of its own and need not
        compute: on its device, or below it where it loads them sooner than it computes them."""
        tokens = self.cached_on(worker)
        for copy in self.copies:
            if copy.worker is worker and copy.tokens > tokens and copy.tier is not _DEVICE:
                count = copy.tokens if copy.tokens < self.known_tokens else self.known_tokens
                if count > tokens and _is_loaded(copy, count, worker.speed):
                    tokens = count
        return tokens

    def lost_tokens(self, home: Worker) -> int:
        """Return how many tokens of the prompt its home had once and would compute again, by the
        home's own word; 0 where it has said nothing."""
        held = self.reusable_on(home)
        return self.known_tokens - held if held or self.is_emptied else 0

    def holders(self, fleet: EligibleWorkers) -> list[Worker]:
        """Return the workers of `fleet` that hold the beginning of the prompt, in whatever tier."""
        copies = self.copies
        if len(copies) == 1:  # as for most turns
            worker = copies[0].worker
            return [] if worker is None or worker not in fleet else [worker]
        return [worker for worker in self._holding() if worker in fleet]

    def prefill_holders(self, fleet: EligibleWorkers) -> list[Worker]:
        """Return the workers that hold the beginning of the prompt and prefill for others."""
        return [worker for worker in self._holding() if fleet.can_prefill(worker)]

    def _holding(self) -> list[Worker]:
        workers = dict.fromkeys(copy.worker for copy in self.copies)
        return [worker for worker in workers if worker is not None]


def _is_loaded(copy: Copy, tokens: int, speed: Speed) -> bool:
    """Return whether a worker of that speed loads `tokens` of a copy in a tier of its own rather
    than compute them: by its own word, else by its prices."""
    if copy.use is not Use.BY_PRICE:
        return copy.use is Use.LOADED
    load_ms = speed.media[copy.tier].ms(speed.sequence_bytes(tokens))
    return load_ms < speed.prefill.ms(tokens, 0)


class Option(msgspec.Struct, frozen=True, gc=False):
    """An option is one way to place a turn, with its price (pricing.py). All `_ms` terms add up to
    `total_ms`.

    `cached_tokens` of the prompt need no prefill this way; the state of `moved_tokens` is brought.
    """

    action: PlacementAction
    worker: Worker
    cached_tokens: int
    queue_ms: float
    compute_ms: float
    network_ms: float
    restore_ms: float
    memory_ms: float
    duplicate_ms: float
    interference_ms: float
    total_ms: float
    moved_tokens: int = 0
    source: Copy | None = None
    prefill: Worker | None = None

    def terms(self) -> dict[str, float]:
        """Return the terms of the cost by name, in ms."""
        return {name: getattr(self, f"{name}_ms") for name in TERMS}


TERMS = ("queue", "compute", "network", "restore", "memory", "duplicate", "interference")


class Move(msgspec.Struct, frozen=True, gc=False):
    """A move says that a session's state, and its ownership, should go from `source` to `target`.
    `gain_ms`: what a turn is expected to be spared by it, were it made before the turn comes."""

    source: Worker
    target: Worker
    tokens: int
    gain_ms: float = 0.0


class Replica(msgspec.Struct, frozen=True, gc=False):
    """A replica says that `target` should have a read-only copy of the prefix that `source` holds.
    `gain_ms`: what a fork is expected to be spared by it, were it made before the fork comes."""

    source: Worker
    target: Worker
    tokens: int
    gain_ms: float = 0.0


class BesideDecision(msgspec.Struct, frozen=True, gc=False):
    """A beside decision is what the policy named `policy` would have done with a turn that another
    decided, and that nobody does (rollout/shadow.py). `regret_ms`: what was done is expected to
    cost so much more."""

    policy: str
    worker: Worker
    action: PlacementAction
    reason: DispatchReason
    cached_tokens: int
    regret_ms: float


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A decision says that the turn runs on `worker`, by which action and why.

    `cached_tokens`: how much of the prompt it is expected not to compute (compared later with what
    the engine reports). `prefill`: the worker that computes the prompt (remote_prefill). `source`:
    where to bring the state of `moved_tokens` from (artifact_fetch, state_migration,
    tail_recompute); with remote_prefill they come from `prefill`. `wanted`: a migration that would
    be right, but that the worker can't perform or for which the turn would wait too long; the
    action is the next best (gap_moves.py has it made between turns); of a fork, a replica that
    would have made another worker the better one (hot_prefixes.py). `alternatives`: the options
    that were priced, cheapest first; empty for policies that do not price. `beside`: what a shadow
    would have done.
    """

    worker: Worker
    action: PlacementAction
    reason: DispatchReason
    cached_tokens: int = 0
    prefill: Worker | None = None
    source: Copy | None = None
    moved_tokens: int = 0
    wanted: Move | Replica | None = None
    alternatives: tuple[Option, ...] = ()
    beside: BesideDecision | None = None


def run_at(
    request: RoutingRequest, worker: Worker, reason: DispatchReason, *, wanted: Move | None = None
) -> Decision:
    """Decide to run the turn at `worker` on what its device holds, with nothing brought from
    elsewhere."""
    cached = request.cached_on(worker)
    is_going_on = cached > 0 and request.turn is TurnClass.DECODE_CONTINUATION
    action = _DECODE_CONTINUATION if is_going_on else _COLOCATED_PREFILL
    return Decision(worker, action, reason, cached, wanted=wanted)


def bring_to(
    request: RoutingRequest,
    worker: Worker,
    reason: DispatchReason,
    *,
    action: PlacementAction,
    source: Copy,
    wanted: Move | None = None,
) -> Decision:
    """Decide to run the turn at `worker`, with the state that it lacks brought from `source` by
    `action`."""
    cached = min(source.tokens, request.known_tokens)
    moved = cached - request.cached_on(worker)
    return Decision(
        worker, action, reason, cached, source=source, moved_tokens=moved, wanted=wanted
    )


def start_at(request: RoutingRequest, worker: Worker) -> Decision:
    """Decide to run the turn at `worker` because it has no owner: a first turn, a lost owner, no
    session."""
    if request.session is None:
        reason = DispatchReason.NO_SESSION
    else:
        reason = DispatchReason.OWNER_LOST if request.turns else DispatchReason.NEW_SESSION
    return run_at(request, worker, reason)


def split_over(
    request: RoutingRequest, worker: Worker, prefill: Worker, *, moved_tokens: int
) -> Decision:
    """Decide to prefill at `prefill`, send the state of `moved_tokens`, and decode at `worker`."""
    return Decision(
        worker,
        PlacementAction.REMOTE_PREFILL,
        DispatchReason.SPLIT,
        request.cached_on(prefill),
        prefill=prefill,
        moved_tokens=moved_tokens,
    )


def take(
    option: Option,
    reason: DispatchReason,
    *,
    ranked: Sequence[Option],
    wanted: Move | Replica | None = None,
) -> Decision:
    """Make the decision that carries out `option`, the best of `ranked`, for `reason`."""
    return Decision(
        option.worker, option.action, reason, option.cached_tokens, option.prefill, option.source,
        option.moved_tokens, wanted, tuple(ranked),
    )  # fmt: skip


def move_of(decision: Decision, owner: Worker) -> Move | None:
    """Return the move of the session away from its owner that the decision wants, or makes with the
    turn; None: it has none."""
    if isinstance(decision.wanted, Move):
        return decision.wanted if decision.wanted.source is owner else None
    source, ways = decision.source, decision.alternatives
    if decision.action is not _MIGRATION or source is None or source.worker is not owner:
        return None
    gain_ms = owner.queue_ms - decision.worker.queue_ms
    stay_ms = [way.total_ms for way in ways if way.worker is owner]
    if stay_ms:
        gain_ms = stay_ms[0] - ways[0].total_ms + ways[0].network_ms
    return Move(owner, decision.worker, decision.cached_tokens, gain_ms)


_MIGRATION = PlacementAction.STATE_MIGRATION
_COLOCATED_PREFILL = PlacementAction.COLOCATED_PREFILL
_DECODE_CONTINUATION = PlacementAction.DECODE_CONTINUATION
