"""RouterState: the fleet's brain. Events in, outcomes out; no clock, socket or randomness.

| event | does | outcome |
|---|---|---|
| WorkerUp, WorkerDown | candidates change; a lost worker's bindings are dropped | Noted |
| Arrive | the policy chooses, load is counted, the session is bound | Dispatch, Refuse |
| FirstByte | the prefill part of the load comes off | Noted |
| Done, Broken, Aborted | the rest comes off; Done teaches the session's ratio and extent | Noted |
| Failed | the load comes off; another attempt, within a budget | Dispatch, Refuse |
| SessionEnd | the session is forgotten | Noted |
| Drain | every later Arrive is refused | Noted |

Owns the live dispatches and their receipts. A dispatch is live from Dispatch until its receipt is
given back by Done, Failed, Broken or Aborted; giving back twice raises. A worker that goes down
keeps the load of its live dispatches until each is reported: their fate is not yet known.

`check()` verifies invariants 3 and 5 of docs/invariants.md and that sums agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import msgspec

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.account import Account
from ownerserve.router.fleet import Fleet, Load, Worker
from ownerserve.router.messages import (
    NOTED,
    Aborted,
    Arrive,
    Broken,
    Dispatch,
    Done,
    Down,
    Drain,
    Event,
    Failed,
    Failure,
    FirstByte,
    Noted,
    Outcome,
    Reason,
    Receipt,
    Refusal,
    Refuse,
    SessionEnd,
    Settling,
    WorkerDown,
    WorkerUp,
)
from ownerserve.router.policies.base import Policy, Request
from ownerserve.router.retries import RetryBudget
from ownerserve.router.sessions import DEFAULT_BYTES_PER_TOKEN, Session, SessionTable


class _Live(msgspec.Struct, gc=False):
    """A dispatch whose end is not yet known."""

    worker: Worker
    load: Load
    session: SessionId | None
    prompt_bytes: int
    reason: Reason
    attempt: int
    tried: tuple[WorkerId, ...]


_NO_LOAD = Load(0, 0)


class RouterState:
    """Where each request goes, and the account of all requests so far."""

    def __init__(self, policy: Policy, *, retries: RetryBudget | None = None) -> None:
        self.fleet = Fleet()
        self.sessions = SessionTable(self.fleet)
        self.account = Account()
        self._policy = policy
        self._retries = retries or RetryBudget()
        self._live: dict[Receipt, _Live] = {}
        self._issued = 0
        self._draining = False
        self._on: dict[type, Callable[[Any, float], Outcome]] = {
            WorkerUp: self._worker_up,
            WorkerDown: self._worker_down,
            Drain: self._drain,
            Arrive: self._arrive,
            FirstByte: self._first_byte,
            Done: self._done,
            Failed: self._failed,
            Broken: self._broken,
            Aborted: self._aborted,
            SessionEnd: self._session_end,
        }

    @overload
    def handle(self, event: Arrive | Failed, now: float) -> Dispatch | Refuse: ...
    @overload
    def handle(self, event: Settling, now: float) -> Noted: ...
    def handle(self, event: Event, now: float) -> Outcome:
        """Take in one event at time `now` (seconds, never going back)."""
        return self._on[type(event)](event, now)

    @property
    def live(self) -> int:
        """Dispatches whose end is not yet known."""
        return len(self._live)

    # Workers

    def _worker_up(self, event: WorkerUp, now: float) -> Noted:
        self.fleet.raise_up(event.worker)
        return NOTED

    def _worker_down(self, event: WorkerDown, now: float) -> Noted:
        if self.fleet.take_down(event.worker) is not None:
            self.account.downs[event.why] += 1
            self.sessions.drop_bindings(event.worker)
        return NOTED

    def _drain(self, event: Drain, now: float) -> Noted:
        self._draining = True
        return NOTED

    # A request

    def _arrive(self, event: Arrive, now: float) -> Dispatch | Refuse:
        self.account.received += 1
        if self._draining:
            return self._refuse(Refusal.DRAINING)
        candidates = self.fleet.up
        if not candidates:
            return self._refuse(Refusal.NO_WORKER)
        self._retries.earn()
        name, session = event.session, None
        if name is not None:
            name = self.sessions.resolve(name)
            session = self.sessions.touch(name, now)
        request = Request(
            session=name,
            owner=session.owner if session else None,
            turns=session.turns if session else 0,
            prompt_tokens=_prompt_tokens(session, event.prompt_bytes),
        )
        if session is not None:
            session.turns += 1
        choice = self._policy.choose(request, candidates)
        live = _Live(
            worker=choice.worker,
            load=_NO_LOAD,
            session=name,
            prompt_bytes=event.prompt_bytes,
            reason=choice.reason,
            attempt=1,
            tried=(),
        )
        return self._dispatch(live)

    def _dispatch(self, live: _Live) -> Dispatch:
        """Count `live` at its worker, bind its session there, make its receipt."""
        worker, session = live.worker, None
        if live.session is not None:
            session = self.sessions.get(live.session)
            if session is not None and session.owner != worker.id and worker.up:
                self.sessions.bind(live.session, worker.id)
        prompt_tokens = _prompt_tokens(session, live.prompt_bytes)
        known_tokens = session.extent_tokens if session else 0
        live.load = Load(
            prefill_tokens=max(prompt_tokens - known_tokens, 1), held_tokens=prompt_tokens
        )
        self.fleet.count(worker, live.load)
        self._issued += 1
        receipt = Receipt(self._issued)
        self._live[receipt] = live
        self.account.reasons[live.reason] += 1
        return Dispatch(
            receipt=receipt,
            worker=worker.id,
            reason=live.reason,
            attempt=live.attempt,
            prefill_tokens=live.load.prefill_tokens,
        )

    def _refuse(self, refusal: Refusal) -> Refuse:
        self.account.refusals[refusal] += 1
        return Refuse(refusal)

    def _first_byte(self, event: FirstByte, now: float) -> Noted:
        live = self._live.get(event.receipt)
        if live is None:
            raise InvariantViolated(f"invariant 5: first byte for no receipt {event.receipt}")
        self.fleet.release_prefill(live.worker, live.load)
        return NOTED

    def _done(self, event: Done, now: float) -> Noted:
        live = self._release(event.receipt)
        self.account.finished += 1
        name = live.session
        if name is None and event.alias is not None and live.worker.up:
            name = event.alias  # the client can only name this session by its answer's id
            self.sessions.touch(name, now).turns += 1
            self.sessions.bind(name, live.worker.id)
        if name is None:
            return NOTED
        session = self.sessions.get(name)
        if session is not None:
            if event.alias is not None:
                self.sessions.alias(event.alias, name)
            if event.usage is not None and session.owner == live.worker.id:
                session.learn(event.usage, prompt_bytes=live.prompt_bytes)
        return NOTED

    def _broken(self, event: Broken, now: float) -> Noted:
        self._release(event.receipt)
        self.account.broken += 1
        return NOTED

    def _aborted(self, event: Aborted, now: float) -> Noted:
        self._release(event.receipt)
        self.account.aborted += 1
        return NOTED

    def _failed(self, event: Failed, now: float) -> Dispatch | Refuse:
        live = self._release(event.receipt)
        self.account.failures[event.failure] += 1
        if event.failure is Failure.STALE and live.reason is not Reason.RETRY_NEW_CONNECTION:
            live.attempt, live.reason = live.attempt + 1, Reason.RETRY_NEW_CONNECTION
            return self._dispatch(live)
        if event.failure is Failure.CONNECT:
            self._worker_down(WorkerDown(live.worker.id, Down.UNREACHABLE), now)
        live.tried += (live.worker.id,)
        candidates = [worker for worker in self.fleet.up if worker.id not in live.tried]
        if not candidates:
            return self._refuse(Refusal.ALL_TRIED)
        if not self._retries.spend(len(live.tried)):
            return self._refuse(Refusal.RETRY_BUDGET)
        request = Request(
            session=live.session,
            owner=None,
            turns=1,
            prompt_tokens=live.load.held_tokens,
        )
        live.worker = self._policy.choose(request, candidates).worker
        live.attempt, live.reason = live.attempt + 1, Reason.RETRY_OTHER_WORKER
        return self._dispatch(live)

    def _session_end(self, event: SessionEnd, now: float) -> Noted:
        self.sessions.forget(self.sessions.resolve(event.session))
        return NOTED

    def _release(self, receipt: Receipt) -> _Live:
        """Take the dispatch's load off its worker. The only place where a receipt ends."""
        live = self._live.pop(receipt, None)
        if live is None:
            raise InvariantViolated(f"invariant 5: receipt {receipt} was given back before")
        self.fleet.release(live.worker, live.load)
        return live

    def check(self) -> None:
        """Raise InvariantViolated unless the account is whole."""
        account, live = self.account, len(self._live)
        if account.received != account.done + account.rejected + live:
            raise InvariantViolated(
                f"invariant 3: {account.received} in, {account.done} done, "
                f"{account.rejected} rejected, {live} live"
            )
        for worker in self.fleet:
            loads = [live.load for live in self._live.values() if live.worker is worker]
            expected = (
                len(loads),
                sum(load.prefill_tokens for load in loads),
                sum(load.held_tokens for load in loads),
            )
            counted = (worker.requests, worker.pending_prefill_tokens, worker.held_tokens)
            if counted != expected:
                raise InvariantViolated(f"invariant 5: {worker.id} has {counted}, not {expected}")
            bound = {name for name, session in self.sessions.items() if session.owner == worker.id}
            if bound != worker.sessions or (bound and not worker.up):
                raise InvariantViolated(f"bindings of {worker.id} disagree, or outlive it")


def _prompt_tokens(session: Session | None, prompt_bytes: int) -> int:
    """Tokens of a prompt from its bytes, by the session's own ratio when it has shown one."""
    ratio = session.bytes_per_token if session else DEFAULT_BYTES_PER_TOKEN
    return max(int(prompt_bytes / ratio), 1)
