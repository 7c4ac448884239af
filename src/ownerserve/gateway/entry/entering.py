"""Entering is how a turn gets from its reading to its first decision: past its tenant's rate
limits, then through the queue before the fleet.

Owns the limits' levels, the queue, and the timer by which time alone lets somebody in or turns
somebody away. What is decided is router.entry's. Without limits it costs a turn two comparisons.

A client says in two headers how its turn waits; both go no further:

    x-ownerserve-deadline-ms   it may begin so long after it came here, in ms; later it is no use
    x-ownerserve-class         batch: background work; interactive: as without it
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from math import inf
from typing import Protocol

from msgspec import structs

from ownerserve.gateway.asking import IdentifiedRequest
from ownerserve.gateway.entry.telling import limit_lines, over_limit
from ownerserve.gateway.http.callers import Caller
from ownerserve.gateway.http.heads import RequestHead
from ownerserve.gateway.http.replies import Rejected
from ownerserve.kv.wire.headers import CLASS_HEADER, DEADLINE_HEADER
from ownerserve.router.admission import SeatSettings, SessionAdmission, forked_from
from ownerserve.router.entry.limits import LimitKind, RateLimits
from ownerserve.router.entry.queue import (
    AdmissionQueue,
    Entrant,
    HeldTurn,
    QueueSettings,
    QueueWatch,
)
from ownerserve.router.entry.running import RunningLimit
from ownerserve.router.entry.terms import (
    EnteringTurn,
    TenantTerms,
    absent_tokens,
    class_of,
    expected_cost,
)
from ownerserve.router.requests.body import Usage
from ownerserve.router.sessions import DEFAULT_BYTES_PER_TOKEN, RoutedSession
from ownerserve.router.state import RouterState

_DEADLINE = DEADLINE_HEADER.encode()
_CLASS = CLASS_HEADER.encode()
DEADLINE_MAX_MS = 3_600_000
SOON_S = 0.005
"""The timer is set no nearer than this: time is not looked at more often."""


class EntryWatch(QueueWatch, Protocol):
    """An entry's watch counts whom it keeps out."""

    def limited(self, terms: TenantTerms, kind: LimitKind) -> None:
        """Hear that a request is over its tenant's rate limit."""
        ...


class Entering:
    """Entering lets turns of one gateway in, when limits and queue allow it."""

    def __init__(
        self,
        state: RouterState,
        *,
        seats: SeatSettings | None,
        queue: QueueSettings,
        watch: EntryWatch,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._state = state
        self._watch = watch
        self._limits = RateLimits()
        running_max = queue.running_max
        self.queue = AdmissionQueue(
            None if seats is None else SessionAdmission(state.fleet, seats),
            None if running_max is None else RunningLimit(state.fleet, running_max),
            settings=queue,
            running=lambda: state.live,
            watch=watch,
        )
        self._timer: asyncio.TimerHandle | None = None

    # Rate limits

    def check(self, caller: Caller) -> None:
        """Raise Rejected where a tenant has used up its requests, or its tokens: before anything of
        the body is looked at."""
        self._look(caller.tenant, caller.terms, 0)

    def charged(self, asked: IdentifiedRequest) -> IdentifiedRequest:
        """Take what the request is expected to need from its tenant's limits, and return it with
        what was taken. Raises Rejected where that is too much just now."""
        tenant, terms = asked.scope.tenant, asked.terms
        tokens = self._cost(asked)
        self._look(tenant, terms, tokens)
        self._limits.take(tenant, terms, tokens, now_s=self._loop.time())
        untold = max(self._prompt_tokens(asked) - tokens, 0)
        return structs.replace(asked, charged_tokens=tokens, untold_tokens=untold)

    def settle(self, asked: IdentifiedRequest, usage: Usage | None) -> None:
        """Correct what a turn was charged by what it took, as its answer tells; None: it ran, and
        nobody tells."""
        more = asked.untold_tokens
        if usage is not None:
            took = usage.prompt_tokens - usage.cached_tokens + usage.output_tokens
            more = took - asked.charged_tokens
        self._settle(asked, more)

    def refund(self, asked: IdentifiedRequest) -> None:
        """Give back what a turn was charged of which nothing ran."""
        self._settle(asked, -asked.charged_tokens)

    def _settle(self, asked: IdentifiedRequest, more: int) -> None:
        self._limits.settle(asked.scope.tenant, asked.terms, more, now_s=self._loop.time())

    def limit_lines(self, tenant: str, terms: TenantTerms) -> bytes:
        """Return the header lines that tell a tenant what is left of its limits."""
        return limit_lines(self._limits.states(tenant, terms, self._loop.time()))

    def _look(self, tenant: str, terms: TenantTerms, tokens: int) -> None:
        now_s = self._loop.time()
        over = self._limits.look(tenant, terms, tokens, now_s=now_s)
        if over is not None:
            self._watch.limited(terms, over.kind)
            raise over_limit(over, self._limits.states(tenant, terms, now_s))

    # The queue

    def enter(
        self, asked: IdentifiedRequest, head: RequestHead, entrant: Entrant, *, came_s: float
    ) -> HeldTurn | None:
        """Let the turn, which came at `came_s`, in or turn it away at once, or hold it: what is
        returned is for `leave`. Raises Rejected for a header that says nothing."""
        now_s = self._loop.time()
        queue, arrive = self.queue, asked.arrive
        if queue.is_open or not arrive.prompt_bytes:  # a request without a body is no turn
            entrant.go(now_s)
            return None
        parent = forked_from(
            asked.named_parent,
            arrive.parent,
            shared=arrive.shared_bytes or 0,
            prompt=arrive.prompt_bytes,
        )
        sessions = self._state.sessions
        turn = EnteringTurn(
            session=arrive.session,
            prompt_tokens=int(arrive.prompt_bytes / DEFAULT_BYTES_PER_TOKEN),
            cost_tokens=self._cost(asked),
            absent_tokens=absent_tokens(self._prompt_tokens(asked), self._known(asked)),
            parent=parent,
            tenant=asked.scope.tenant,
            terms=asked.terms,
            session_class=class_of(
                self._known(asked),
                None if parent is None else sessions.get(parent),
                is_batch=_is_batch(head, asked.terms),
            ),
            model=arrive.model,
            came_s=came_s,
            deadline_s=came_s + _deadline_s(head),
        )
        held = queue.enter(turn, entrant, now_s=now_s)
        if held is not None:
            self._arm()
        return held

    def leave(self, held: HeldTurn) -> None:
        """Take the turn of a client that hung up out of the queue."""
        self.queue.leave(held, self._loop.time())

    def ended(self, asked: IdentifiedRequest, tokens: int) -> None:
        """Note that a turn that was let in is over, and let in whom that makes room for; its
        session's context is `tokens` (0: not told)."""
        queue = self.queue
        if queue.is_open:
            return
        now_s = self._loop.time()
        if asked.arrive.prompt_bytes:
            queue.ended(asked.arrive.session, tokens, now_s)
        else:
            queue.look(now_s)

    def close(self) -> None:
        """Look no more at who waits."""
        if self._timer is not None:
            self._timer.cancel()

    def _known(self, asked: IdentifiedRequest) -> RoutedSession | None:
        name = asked.arrive.session
        return None if name is None else self._state.sessions.get(name)

    def _cost(self, asked: IdentifiedRequest) -> int:
        if not asked.arrive.prompt_bytes:
            return 0
        return expected_cost(self._prompt_tokens(asked), self._known(asked))

    def _prompt_tokens(self, asked: IdentifiedRequest) -> int:
        known = self._known(asked)
        ratio = DEFAULT_BYTES_PER_TOKEN if known is None else known.bytes_per_token
        return int(asked.arrive.prompt_bytes / ratio)

    def _arm(self) -> None:
        """Set the timer to when time alone changes something."""
        now_s = self._loop.time()
        due_s = self.queue.next_due_s(now_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            self._timer = self._loop.call_at(max(due_s, now_s + SOON_S), self._look_at_queue)

    def _look_at_queue(self) -> None:
        self._timer = None
        self.queue.look(self._loop.time())
        self._arm()


def _is_batch(head: RequestHead, terms: TenantTerms) -> bool:
    """Return whether a turn is background work. Raises Rejected for another word."""
    said = head.special.get(_CLASS)
    if said is None or said == b"interactive":
        return terms.is_batch
    if said != b"batch":
        problem = f"{CLASS_HEADER}: is no class; use batch or interactive"
        raise Rejected(HTTPStatus.BAD_REQUEST, "invalid_class", problem)
    return True


def _deadline_s(head: RequestHead) -> float:
    """Return how long the client waits for its turn to begin. Raises Rejected for what is no
    number of ms."""
    said = head.special.get(_DEADLINE)
    if said is None:
        return inf
    if not said.isdigit() or len(said) > 7 or not 0 < int(said) <= DEADLINE_MAX_MS:
        problem = f"{DEADLINE_HEADER}: is no number of ms from 1 to {DEADLINE_MAX_MS}"
        raise Rejected(HTTPStatus.BAD_REQUEST, "invalid_deadline", problem)
    return int(said) / 1000.0
