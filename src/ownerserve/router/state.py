"""RouterState decides where each turn runs: events in, outcomes out; no clock, socket or
randomness.

| event | does | outcome |
|---|---|---|
| WorkerUp, WorkerDown | candidates change; a new life unbinds what the old one held | Noted |
| WorkerLeft | a worker that is down and runs nothing is forgotten | Noted |
| Stamped | the worker's word on its load replaces what was known | Noted |
| Reported, Gone, Claimed | the dated copy of extents and owners follows | Noted |
| TakenOver, LeftToStore | the same, of a session of which no turn ran | Noted |
| Arrive | the policy decides, load is counted, the session's home is there | Dispatch, Refuse |
| FirstByte | the prefill part of the load comes off; the session's owner is there, | Noted |
| | unless the answer names another than whom the session left by this turn | |
| | where it computed itself what was split, the other worker's part comes off whole | |
| ComputedApart | the prefill part comes off where it was computed apart | Noted |
| NotComputedApart | the prefill part is counted where the turn decodes | Dispatch, the same |
| CarryOn | the load comes off; another attempt, within a budget, or as Broken | Dispatch, Refuse |
| MovedOn | the load comes off, and is counted where the turn goes on | Dispatch, Refuse |
| Hedge | the policy decides among the others: a second leg | Dispatch, Noted: there is none |
| Outrun, LegFailed | one of two legs comes off as if it had not been sent | Noted |
| Broken, Aborted | the rest comes off | Noted |
| Done | the same; teaches extents and constants | AskRelease of its owner, Noted |
| ReleaseEnded | who handed the session over is not known as its owner any more | Noted |
| Failed | the load comes off; another attempt, within a budget | Dispatch, Refuse |
| Unpromised | as Failed; when nobody is left to ask, once more among all | Dispatch, Refuse |
| Misjudged | the load comes off; decided anew, by what was told since | Dispatch, Refuse |
| SessionEnd | the session is forgotten | Noted |
| Drain | every later Arrive is refused | Noted |

Home is where the next turn goes, owner who has the session (sessions.py). A dispatch that ends
before its first byte (Failed, Unpromised, Broken, Aborted), or whose first byte is of an error,
leaves home with the owner. `Claimed` sets the owner by the directory's word; an answer that begins
does too, until workers say themselves what they own: its lines name the worker and its life (the
stamp) and that it serves the turn (status, mode). Of two answers that of the later dispatch counts.

Owns the live dispatches and their receipts. A dispatch is live from Dispatch until its receipt is
given back by Done, Failed, Unpromised, Misjudged, Broken or Aborted; giving back twice raises. A
worker that goes down keeps the load of its live dispatches until each is reported: their fate is
not yet known. Retries are a share of all requests (RetryBudget), so that a dying fleet is not
stormed by its own router.

`check()` verifies invariants 3 and 5 of docs/invariants.md and that sums agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import msgspec

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import ExecutionMode, PlacementAction
from ownerserve.router.account import Account, Books, audit
from ownerserve.router.asking import ask
from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates, Fleet
from ownerserve.router.idle import IdleDecisions
from ownerserve.router.knowledge import Handovers, Knowledge
from ownerserve.router.learning import Learning
from ownerserve.router.messages import (
    NOTED,
    Aborted,
    Answer,
    Arrive,
    AskRelease,
    Broken,
    CarryOn,
    Claimed,
    ComputedApart,
    Dispatch,
    Done,
    Down,
    Drain,
    Event,
    Failed,
    Failure,
    FirstByte,
    Gone,
    Hedge,
    LeftToStore,
    LegFailed,
    LetGo,
    Misjudged,
    MovedOn,
    NotComputedApart,
    Noted,
    Outcome,
    Outrun,
    Placing,
    Refusal,
    Refuse,
    ReleaseEnded,
    Reported,
    SessionEnd,
    Settling,
    Stamped,
    TakenOver,
    Unpromised,
    WorkerDown,
    WorkerLeft,
    WorkerUp,
)
from ownerserve.router.opening import NEVER_OPENING, OpeningRule
from ownerserve.router.policies.base import RoutingPolicy
from ownerserve.router.requests.body import Prompt, Usage, believed
from ownerserve.router.rollout.steering import Steering
from ownerserve.router.sessions import RoutedSession, SessionTable
from ownerserve.router.settings import DEFAULTS, Settings
from ownerserve.router.worker import Load, Receipt, Worker
from ownerserve.router.workload import EndedTurn


class RetryBudget:
    """The budget limits retries like a purse: each arrival puts `share` in, each retry takes 1 out,
    and one request has at most `attempts` tries."""

    def __init__(self, *, share: float = 0.2, purse_max: float = 64.0, attempts: int = 3) -> None:
        self._share = share
        self._purse_max = purse_max
        self._attempts = attempts
        self._purse = purse_max

    def earn(self) -> None:
        """Put a share of a retry into the purse, as a request has arrived."""
        purse = self._purse + self._share
        self._purse = purse if purse < self._purse_max else self._purse_max

    def spend(self, failed_attempts: int) -> bool:
        """Pay for another try of a request that failed `failed_attempts` times; return whether it
        may be made."""
        if failed_attempts >= self._attempts or self._purse < 1:
            return False
        self._purse -= 1
        return True


class _Live(msgspec.Struct, gc=False):
    """A live dispatch is one whose end is not yet known; `loads` are in the order of `parts`."""

    arrive: Arrive
    name: SessionId | None
    session: RoutedSession | None
    decision: Decision
    life: int
    loads: tuple[Load, ...]
    reason: DispatchReason
    prefill_life: int = 0
    """That of the worker that computes the prompt apart."""
    known_tokens: int = 0
    """What of the prompt was computed before, as it was sent."""
    attempt: int = 1
    tried: tuple[Worker, ...] = ()
    has_answered: bool = False
    is_computed_apart: bool = False
    """Whether the gateway has heard from the worker that computes the prompt apart."""
    is_unasked: bool = False
    """All have refused it for room, and it goes on without a promise."""
    down_asked: int = 0
    """How many workers were asked that are down, since nobody is up."""

    def parts(self) -> tuple[tuple[Worker, Load], ...]:
        """Return what the dispatch counts for where it runs and, apart from it, where its prompt is
        computed."""
        worker, prefill = self.decision.worker, self.decision.prefill
        if prefill is None:
            return ((worker, self.loads[0]),)
        return (worker, self.loads[0]), (prefill, self.loads[1])


class RouterState:
    """The router's state decides where each request goes, and keeps the account of all requests so
    far."""

    def __init__(
        self,
        policy: RoutingPolicy,
        *,
        settings: Settings = DEFAULTS,
        retries: RetryBudget | None = None,
        down_asked_max: int = 0,
        opening: OpeningRule = NEVER_OPENING,
        learning: Learning | None = None,
    ) -> None:
        self.fleet = Fleet()
        self.sessions = SessionTable()
        self.account = Account()
        self._knowledge = Knowledge(self.fleet, self.sessions)
        self._steering = Steering(policy=policy)
        self.idle = IdleDecisions(
            self.fleet, self.sessions, lambda: (self._steering, self._settings)
        )
        self.learning = learning
        """What the derived settings follow; None: they stay as they are."""
        self._settings = settings
        self._retries = retries or RetryBudget()
        self._handovers = Handovers()
        self._live: dict[Receipt, _Live] = {}
        self._issued = 0
        self._draining = False
        self._down_asked_max = down_asked_max
        self._opening = opening
        self._on: dict[type, Callable[[Any, float], Outcome]] = {
            WorkerUp: self._worker_up,
            WorkerDown: self._worker_down,
            WorkerLeft: self._worker_left,
            Drain: self._drain,
            Stamped: self._stamped,
            Reported: self._knowledge.reported,
            Gone: self._knowledge.gone,
            Claimed: self._knowledge.claimed,
            TakenOver: self._knowledge.taken_over,
            LeftToStore: self._knowledge.left_to_store,
            Arrive: self._arrive,
            FirstByte: self._first_byte,
            ComputedApart: self._prefilled,
            NotComputedApart: self._not_prefilled,
            Done: self._done,
            ReleaseEnded: self._release_ended,
            Failed: self._failed,
            Unpromised: self._unpromised,
            Misjudged: self._misjudged,
            CarryOn: self._carry_on,
            MovedOn: self._moved_on,
            Hedge: self._hedge,
            Outrun: self._outrun,
            LegFailed: self._leg_failed,
            Broken: self._broken,
            Aborted: self._aborted,
            SessionEnd: self._session_end,
        }

    @overload
    def handle(self, event: NotComputedApart, now: float) -> Dispatch: ...
    @overload
    def handle(self, event: Placing, now: float) -> Dispatch | Refuse: ...
    @overload
    def handle(self, event: Hedge, now: float) -> Dispatch | Noted: ...
    @overload
    def handle(self, event: FirstByte, now: float) -> LetGo | Noted: ...
    @overload
    def handle(self, event: Done, now: float) -> AskRelease | Noted: ...
    @overload
    def handle(self, event: Settling, now: float) -> Noted: ...
    def handle(self, event: Event, now: float) -> Outcome:
        """Take in one event at time `now` (seconds, never going back)."""
        return self._on[type(event)](event, now)

    def steer(self, steering: Steering, settings: Settings) -> None:
        """Have turns that come from now on decided by `steering`, under `settings`, and by what was
        learnt where that is not by hand."""
        self._steering, self._settings = steering, settings
        if self.learning is not None:
            self._tune(self.learning.learnt or settings)

    @property
    def settings(self) -> Settings:
        """The settings in force now."""
        return self._settings

    def _tune(self, derived: Settings) -> None:
        self._settings = self._settings.following(derived)
        self._steering.tune(self._settings)

    @property
    def live(self) -> int:
        """How many dispatches are live: their ends are not yet known."""
        return len(self._live)

    # Workers

    def _worker_up(self, event: WorkerUp, now: float) -> Noted:
        self.fleet.raise_up(event)
        return NOTED

    def _worker_down(self, event: WorkerDown, now: float) -> Noted:
        if self.fleet.take_down(event.worker, event.why):
            self.account.downs[event.why] += 1
        return NOTED

    def _worker_left(self, event: WorkerLeft, now: float) -> Noted:
        self.fleet.forget(event.worker)
        return NOTED

    def _drain(self, event: Drain, now: float) -> Noted:
        self._draining = True
        return NOTED

    def _stamped(self, event: Stamped, now: float) -> Noted:
        self.fleet.heard(event.status, now)
        return NOTED

    # A request

    def _arrive(self, event: Arrive, now: float) -> Dispatch | Refuse:
        self.account.received += 1
        if self._draining:
            return self._refuse(Refusal.DRAINING)
        candidates = self._candidates(event)
        if not candidates and self._down_asked_max:
            candidates = self.fleet.down(event.model)
        if not candidates:
            return self._refuse(
                Refusal.NO_SUCH_MODEL if self.fleet.candidates(None) else Refusal.NO_WORKER
            )
        self._retries.earn()
        name, session = None, None
        if event.session is not None:
            name = self.sessions.resolve(event.session)
            session = self.sessions.touch(name, now)
            if event.parent is not None and not session.turns:
                self._knowledge.fork(session, event)
        request = ask(event, session, candidates, limits=self._settings, now_s=now)
        decision = self._steering.decide(request, candidates, event.arm)
        decision = self._opening.revised(decision, request, candidates, name=name)
        decision = self._steering.watched(decision, request, candidates)
        live = _Live(event, name, session, decision, 0, (), decision.reason)
        if not decision.worker.up:
            live.down_asked, live.reason = 1, DispatchReason.NOBODY_UP
        return self._dispatch(live, request)

    def _dispatch(self, live: _Live, request: RoutingRequest) -> Dispatch:
        """Count `live` at its workers, make it its session's home, make its receipt."""
        decision, session = live.decision, live.session
        worker, prefill = decision.worker, decision.prefill
        self._issued += 1
        receipt = Receipt(self._issued)
        prompt_tokens = request.prompt_tokens
        prefill_tokens = _to_compute(request, decision)
        if prefill is None:
            load = Load(request.now_s, prefill_tokens, prompt_tokens)
            live.loads = (load,)
        else:
            load = Load(request.now_s, 0, prompt_tokens)
            apart = Load(request.now_s, prefill_tokens, 0)
            live.loads = (load, apart)
            live.prefill_life = prefill.life
            prefill.add(apart)
        if session is None:
            worker.passed = self._issued
        worker.add(load)
        live.life, live.has_answered = worker.life, False
        live.known_tokens = request.known_tokens
        if session is not None:
            session.turns += 1
            session.pending += live.parts()
            if worker is not request.home and request.home is not None:
                session.left_at_s = request.now_s
            self.sessions.send(session, worker, receipt)
        self._live[receipt] = live
        self.account.reasons[live.reason] += 1
        parent = live.arrive.parent
        if parent is not None:
            parent = self.sessions.resolve(parent) if request.turns == 0 else None
        return _told(live, receipt, request, parent=parent)

    def _refuse(self, refusal: Refusal) -> Refuse:
        self.account.refusals[refusal] += 1
        return Refuse(refusal)

    def _first_byte(self, event: FirstByte, now: float) -> LetGo | Noted:
        live = self._live.get(event.receipt)
        if live is None:
            raise InvariantViolated(f"invariant 5: first byte for no receipt {event.receipt}")
        if event.mode not in _APART and live.decision.prefill and not live.is_computed_apart:
            self._computed_on_the_spot(live)
        for worker, load in live.parts():
            worker.take_prefill(load)
        life = live.life
        if event.status is not None:
            self.fleet.heard(event.status, now)
            if self.fleet.find(event.status.unit) is live.decision.worker:
                life = live.decision.worker.life  # who answers may be younger than was known
        is_behind = event.claimed is not None and self._is_behind(live, event, event.claimed)
        former = None if live.has_answered else self._answered(live, event, life)
        if event.claimed is not None:
            hear = self._knowledge.named if is_behind else self._knowledge.answered
            hear(event.claimed, now)
        if former is None or former.unit is None or live.name is None:
            return NOTED
        return LetGo(live.name, former.unit)

    def _is_behind(self, live: _Live, event: FirstByte, claimed: Claimed) -> bool:
        """Return whether the session is beyond whom a turn's answer names: it leaves there by this
        turn, or a later one was answered before."""
        session, named = live.session, self.fleet.find(claimed.unit)
        if session is None or named is None or event.answer is Answer.ERROR:
            return False
        was_there = session.owner is named and session.owner_life == named.life
        is_left = was_there and live.decision.worker is not named
        return is_left or event.receipt < session.answered_by

    def _split(self, receipt: Receipt) -> _Live:
        live = self._live.get(receipt)
        if live is None or live.decision.prefill is None:
            raise InvariantViolated(f"invariant 5: receipt {receipt} is of no split dispatch")
        return live

    def _prefilled(self, event: ComputedApart, now: float) -> Noted:
        live = self._split(event.receipt)
        _, (prefill, apart) = live.parts()
        prefill.take_prefill(apart)
        live.is_computed_apart = True
        return NOTED

    def _computed_on_the_spot(self, live: _Live) -> None:
        """Take the part of a split dispatch off the worker that was to compute its prompt: it has
        not, and holds nothing of it."""
        (worker, load), (prefill, apart) = live.parts()
        prefill.take(apart)
        if live.session is not None:
            live.session.ended((apart,))
        live.decision = Decision(worker, _COLOCATED, DispatchReason.NOT_SPLIT)
        live.loads = (load,)

    def _not_prefilled(self, event: NotComputedApart, now: float) -> Dispatch:
        live, failure = self._split(event.receipt), event.failure
        (worker, _), (prefill, _) = live.parts()
        self._take_loads(live)
        if failure is not Failure.UNFIT:
            self.account.failures[failure] += 1
        if failure is Failure.CONNECT:
            self._worker_down(WorkerDown(prefill.id, Down.UNREACHABLE), now)
        session = live.session
        if session is not None:
            session.turns -= 1  # as when it was decided
        request = self._ask_again(live, self._candidates(live.arrive), now)
        live.decision = run_at(request, worker, DispatchReason.NOT_SPLIT)
        live.reason = live.decision.reason
        load = Load(now, _to_compute(request, live.decision), request.prompt_tokens)
        live.loads = (load,)
        worker.add(load)
        if session is not None:
            session.turns += 1
            session.pending += live.parts()
        return _told(live, event.receipt, request)

    def _answered(self, live: _Live, event: FirstByte | Done, life: int) -> Worker | None:
        """Note that an answer of the worker's `life` begins, by what its own lines say of the
        session; return who had the session until now."""
        if isinstance(event, FirstByte) and event.answer is Answer.ERROR:
            self._came_to_nothing(live, event.receipt)
            return None
        live.has_answered = True
        session, worker = live.session, live.decision.worker
        if session is None:
            return None
        if worker.life == life:
            return self.sessions.answered(session, worker, event.receipt)
        self.sessions.lost(session, event.receipt)  # that state is gone
        return None

    def _came_to_nothing(self, live: _Live, receipt: Receipt) -> None:
        """Undo a dispatch that ended without a turn's first byte: as if it had not been sent."""
        if live.has_answered:
            return
        live.has_answered = True
        if live.session is not None:
            live.session.turns -= 1
            self.sessions.lost(live.session, receipt)

    def _done(self, event: Done, now: float) -> AskRelease | Noted:
        live = self._release(event.receipt)
        self.account.finished += 1
        if event.status is not None:
            self.fleet.heard(event.status, now)
        if not live.has_answered:
            self._answered(live, event, live.life)
        worker, session = live.decision.worker, live.session
        usage = believed(event.usage, worker.profile.sequence_tokens)
        if usage is not event.usage:
            self.account.usages_refused += 1
        is_there = worker.up and worker.life == live.life
        alias = event.alias
        if session is None and alias and is_there:
            # The client can only name this session by its answer's id.
            session = live.session = self.sessions.touch(alias, now)
            session.turns += 1
            self.sessions.answered(session, worker, event.receipt)
        elif alias and live.name is not None:
            self.sessions.alias(alias, live.name)
        if session is None:
            return NOTED
        session.idle_since_s = now
        if usage is not None and worker.life == live.life:
            if self.learning is not None:
                turn = _turn_of(live, live.name or alias, usage)
                if self.learning.took(turn, now):
                    self._learn(self.learning, now)
            prompt_bytes = live.arrive.prompt_bytes if event.prompt is Prompt.IN_BODY else 0
            session.grow(worker, usage, prompt_bytes=prompt_bytes)
            prefill = live.decision.prefill
            if prefill is not None and prefill.life == live.prefill_life:
                session.lent(prefill, usage.prompt_tokens)
            if live.decision.action is PlacementAction.STATE_MIGRATION:
                session.released(live.decision.source)
        if live.name is None or session.is_forgotten or worker.life != live.life:
            return NOTED
        return self._handovers.done(live.name, session, worker)

    def _learn(self, learning: Learning, now: float) -> None:
        derived = learning.derive(self.fleet.up, now)
        if derived is not None:
            self._tune(derived)

    def _release_ended(self, event: ReleaseEnded, now: float) -> Noted:
        self._handovers.ended(event, self.sessions.get(event.session))
        return NOTED

    def _broken(self, event: Broken, now: float) -> Noted:
        self._came_to_nothing(self._release(event.receipt), event.receipt)
        self.account.broken += 1
        return NOTED

    def _aborted(self, event: Aborted, now: float) -> Noted:
        self._came_to_nothing(self._release(event.receipt), event.receipt)
        self.account.aborted += 1
        return NOTED

    def _failed(self, event: Failed, now: float) -> Dispatch | Refuse:
        live = self._take_back(event.receipt, event.failure)
        worker = live.decision.worker
        if (
            event.failure is Failure.STALE
            and live.reason is not DispatchReason.RETRY_NEW_CONNECTION
        ):
            candidates = self._candidates(live.arrive)
            live.attempt, live.reason = live.attempt + 1, DispatchReason.RETRY_NEW_CONNECTION
            return self._dispatch(live, self._ask_again(live, candidates, now))
        if event.failure is Failure.OURS:
            return self._refuse(Refusal.EXHAUSTED)
        if event.failure is Failure.CONNECT:
            self._worker_down(WorkerDown(worker.id, Down.UNREACHABLE), now)
        outcome = self._elsewhere(live, now)
        return self._refuse(outcome) if isinstance(outcome, Refusal) else outcome

    def _unpromised(self, event: Unpromised, now: float) -> Dispatch | Refuse:
        live = self._take_back(event.receipt, Failure.REFUSED)
        outcome = self._elsewhere(live, now)
        if isinstance(outcome, Dispatch):
            return outcome
        candidates = self._candidates(live.arrive)
        if live.is_unasked or not candidates:
            return self._refuse(outcome)
        live.is_unasked, live.tried = True, ()
        return self._again(live, candidates, DispatchReason.RETRY_UNASKED, now_s=now)

    def _misjudged(self, event: Misjudged, now: float) -> Dispatch | Refuse:
        live = self._take_back(event.receipt)
        candidates = self._candidates(live.arrive).without(live.tried)
        if not candidates:
            return self._refuse(Refusal.NO_WORKER)
        return self._again(live, candidates, None, now_s=now)

    def _carry_on(self, event: CarryOn, now: float) -> Dispatch | Refuse:
        live = self._take_back(event.receipt, event.failure)
        if live.session is not None:
            live.session.turns -= 1  # the same turn is dispatched anew
        outcome = self._elsewhere(live, now, DispatchReason.CARRIED_ON)
        if isinstance(outcome, Dispatch):
            return outcome
        if live.session is not None:
            live.session.turns += 1
        self.account.broken += 1
        return Refuse(outcome)

    def _moved_on(self, event: MovedOn, now: float) -> Dispatch | Refuse:
        first = self._live.get(event.receipt)
        has_begun = first is not None and first.has_answered
        live = self._take_back(event.receipt)
        worker = self.fleet.find(event.target)
        if worker is None or not worker.up:
            if not has_begun:
                outcome = self._elsewhere(live, now)
                return self._refuse(outcome) if isinstance(outcome, Refusal) else outcome
            self.account.broken += 1
            return Refuse(Refusal.NO_WORKER)
        if has_begun and live.session is not None:
            live.session.turns -= 1  # the same turn is dispatched anew
        live.tried += (live.decision.worker,)
        request = self._ask_again(live, self._candidates(live.arrive), now)
        live.decision = run_at(request, worker, DispatchReason.MOVED)
        live.attempt, live.reason = live.attempt + 1, DispatchReason.MOVED
        return self._dispatch(live, request)

    def _hedge(self, event: Hedge, now: float) -> Dispatch | Noted:
        first = self._live.get(event.receipt)
        if first is None or first.has_answered:
            raise InvariantViolated(f"invariant 5: receipt {event.receipt} waits for no answer")
        tried = (*first.tried, first.decision.worker)
        candidates = self._candidates(first.arrive).without(tried)
        if not candidates or not self._retries.spend(len(tried)):
            return NOTED
        session = None if first.name is None else self.sessions.get(first.name)
        live = _Live(
            first.arrive, first.name, session, first.decision, 0, (), DispatchReason.HEDGED,
            attempt=first.attempt + 1, tried=tried,
        )  # fmt: skip
        request = self._ask_again(live, candidates, now)
        worker = self._steering.decide(request, candidates, live.arrive.arm).worker
        live.decision = run_at(request, worker, DispatchReason.HEDGED)
        self.account.legs_begun += 1
        return self._dispatch(live, request)

    def _outrun(self, event: Outrun, now: float) -> Noted:
        self._take_back(event.receipt)
        self.account.legs_ended += 1
        return NOTED

    def _leg_failed(self, event: LegFailed, now: float) -> Noted:
        live = self._take_back(event.receipt, event.failure)
        if event.failure is Failure.CONNECT:
            self._worker_down(WorkerDown(live.decision.worker.id, Down.UNREACHABLE), now)
        self.account.legs_ended += 1
        return NOTED

    def _take_back(self, receipt: Receipt, failure: Failure | None = None) -> _Live:
        """Take back a dispatch that nobody began to answer, as if it had not been sent, and count
        the failure; None: there was none."""
        live = self._release(receipt)
        self._came_to_nothing(live, receipt)
        if failure is not None:
            self.account.failures[failure] += 1
        if live.name is not None:
            live.session = self.sessions.get(live.name)  # it may have ended meanwhile
        return live

    def _elsewhere(
        self,
        live: _Live,
        now: float,
        reason: DispatchReason = DispatchReason.RETRY_OTHER_WORKER,
    ) -> Dispatch | Refusal:
        """Dispatch to another worker, of those that were not tried, or return why there is none."""
        live.tried += (live.decision.worker,)
        model = live.arrive.model
        everyone = self._candidates(live.arrive)
        candidates = everyone.without(live.tried)
        if everyone and not candidates:  # its arm's are all tried
            candidates = self.fleet.candidates(model).without(live.tried)
        if not everyone and self._down_asked_max:
            if live.down_asked < self._down_asked_max:
                candidates = self.fleet.down(model).without(live.tried)
            live.down_asked, reason = live.down_asked + 1, DispatchReason.NOBODY_UP
        if not candidates:
            return Refusal.ALL_TRIED if everyone or not self._down_asked_max else Refusal.NO_WORKER
        if not self._retries.spend(len(live.tried)):
            return Refusal.RETRY_BUDGET
        return self._again(live, candidates, reason, now_s=now)

    def _again(
        self, live: _Live, candidates: Candidates, reason: DispatchReason | None, *, now_s: float
    ) -> Dispatch:
        """Decide anew among the candidates, and dispatch; `reason` None: the decision's own."""
        request = self._ask_again(live, candidates, now_s)
        live.decision = self._steering.decide(request, candidates, live.arrive.arm)
        live.attempt, live.reason = live.attempt + 1, reason or live.decision.reason
        return self._dispatch(live, request)

    def _candidates(self, arrive: Arrive) -> Candidates:
        """Return the workers that are up and where a turn may run."""
        return self._steering.eligible(self.fleet.candidates(arrive.model), arrive.arm)

    def _ask_again(self, live: _Live, candidates: Candidates, now: float) -> RoutingRequest:
        return ask(live.arrive, live.session, candidates, limits=self._settings, now_s=now)

    def _session_end(self, event: SessionEnd, now: float) -> Noted:
        name = self.sessions.resolve(event.session)
        self.sessions.forget(name)
        self._knowledge.ended(name)
        self._handovers.over(name)
        return NOTED

    def _release(self, receipt: Receipt) -> _Live:
        """Take the dispatch's load off its workers and return it; nothing else ends a receipt.
        Raises InvariantViolated for one that was given back before."""
        live = self._live.pop(receipt, None)
        if live is None:
            raise InvariantViolated(f"invariant 5: receipt {receipt} was given back before")
        self._take_loads(live)
        return live

    def _take_loads(self, live: _Live) -> None:
        """Take what the dispatch counts for off its workers, and out of its session."""
        for worker, load in live.parts():
            worker.take(load)
        if live.session is not None:
            live.session.ended(live.loads)

    def check(self) -> None:
        """Raise InvariantViolated unless the account adds up and the books agree (invariants 3 and
        5)."""
        account, live = self.account, len(self._live)
        begun = account.received + account.legs_begun
        if begun != account.done + account.rejected + account.legs_ended + live:
            raise InvariantViolated(
                f"invariant 3: {account.received} in, {account.legs_begun} second legs, "
                f"{account.legs_ended} of them over, {account.done} done, "
                f"{account.rejected} rejected, {live} live"
            )
        audit(self.fleet, self.sessions, Books(
            loads=[part for one in self._live.values() for part in one.parts()],
            unanswered={receipt for receipt, one in self._live.items() if not one.has_answered},
        ))  # fmt: skip


_COLOCATED = PlacementAction.COLOCATED_PREFILL
_APART = (None, ExecutionMode.REMOTE_PREFILL)
"""What is said of a prompt that was computed where it was decided."""


def _to_compute(request: RoutingRequest, decision: Decision) -> int:
    """Return how many tokens of the prompt are to be computed, by the router's estimate."""
    tokens = request.prompt_tokens - decision.cached_tokens
    return tokens if tokens > 1 else 1


def _turn_of(live: _Live, name: SessionId | None, usage: Usage) -> EndedTurn:
    """Return what a turn that has ended was like; what was known of its session is what was known
    when it was sent, since news of what it leaves may come before its end."""
    batch = live.decision.worker.batch + 1
    return EndedTurn(name, usage.prompt_tokens, usage.output_tokens, live.known_tokens, batch)


def _told(
    live: _Live, receipt: Receipt, request: RoutingRequest, *, parent: SessionId | None = None
) -> Dispatch:
    """Return the dispatch as the runtime hears of it. `parent`: of a first turn, whose prefix its
    session stands on."""
    decision = live.decision
    return Dispatch(
        receipt, decision.worker.id, live.reason, live.attempt, _to_compute(request, decision),
        decision, request.turn, live.name, request.prompt_tokens, decision.worker.dp_rank,
        live.arrive.arm, parent,
    )  # fmt: skip
