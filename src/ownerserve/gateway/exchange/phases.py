"""The phases of an exchange up to its worker: a phase has only what exists in it, and gives it back
when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from ownerserve.gateway.asking import IdentifiedRequest
from ownerserve.gateway.entry.telling import not_let_in
from ownerserve.gateway.exchange.attempt import Attempt, give_back
from ownerserve.gateway.exchange.refusing import turn_away
from ownerserve.gateway.http.upstream import UpstreamConnection
from ownerserve.gateway.turns import NotLetIn
from ownerserve.gateway.workers.rpc import HeldPlace
from ownerserve.router.entry.queue import HeldTurn
from ownerserve.router.entry.terms import TurnedAway, TurnWait
from ownerserve.router.messages import Failure

if TYPE_CHECKING:
    from ownerserve.gateway.exchange.exchange import Exchange


class Phase:
    """A phase is where an exchange stands."""

    __slots__ = ()

    def is_waiting_for(self, task: asyncio.Task[None]) -> bool:
        """Return whether that task's end is what comes next."""
        return False

    def abort(self) -> None:
        """End the phase and give back what it holds: the client is gone, or a fault ends the
        request."""

    # Where a turn has one leg; Hedged has two

    def with_leg(self, leg: Leg) -> Phase:
        """Return the phase once `leg` stands where its attempt did."""
        return leg

    def begins(self, attempt: Attempt) -> None:
        """Hear that the attempt's worker begins to answer: no other leg goes on."""

    def goes_on_without(self, attempt: Attempt, failure: Failure) -> bool:
        """Return whether another leg goes on, as the attempt has failed."""
        return False

    def pause(self) -> None:
        """Stop reading the answer: the client reads too slowly."""

    def resume(self) -> None:
        """Go on reading the answer: the client reads again."""


class Leg(Phase):
    """A leg is an attempt on its way to a worker, or at it."""

    __slots__ = ("attempt",)

    attempt: Attempt

    def hang_up(self) -> None:
        """Give back what the leg holds, but its receipt."""


OVER = Phase()
"""Nothing of the turn runs: not begun, answered, refused or aborted."""


class Reading(Phase):
    """In this phase it is known who asks, and the directory is asked who owns the session."""

    __slots__ = ("asked", "exchange", "task")

    def __init__(
        self, exchange: Exchange, asked: IdentifiedRequest, task: asyncio.Task[None]
    ) -> None:
        self.exchange = exchange
        self.asked = asked
        self.task = task

    def is_waiting_for(self, task: asyncio.Task[None]) -> bool:
        """Return whether `task` is the one that asks the directory."""
        return task is self.task

    def abort(self) -> None:
        """Stop asking the directory; the turn was not let in."""
        self.task.cancel()
        self.exchange.turns.ended(self.asked, NotLetIn())


class Queued(Phase):
    """In this phase the turn asks to be let in, or waits for it: `held` by the queue before the
    fleet. Let in, it is decided (`decide`)."""

    __slots__ = ("asked", "decide", "exchange", "held")

    def __init__(
        self,
        exchange: Exchange,
        asked: IdentifiedRequest,
        decide: Callable[[IdentifiedRequest], None],
    ) -> None:
        self.exchange = exchange
        self.asked = asked
        self.decide = decide
        self.held: HeldTurn | None = None

    def go(self, now_s: float) -> None:
        """Decide where the turn runs: it is let in."""
        waits = self._waits()
        self.decide(structs.replace(self.asked, waits=waits) if waits else self.asked)

    def turned_away(self, no: TurnedAway) -> None:
        """Tell the client that the turn is not let in. Where it waited this is called in the midst
        of another request's end: a fault ends this request and no other."""
        exchange = self.exchange
        try:
            told = not_let_in(no, self._waits())
            turn_away(exchange, self.asked, told)
            exchange.phase = OVER
            exchange.begun.reject(exchange, told)
        except Exception as error:  # noqa: BLE001 - a request's root: it is logged there
            exchange.failed(error)

    def _waits(self) -> tuple[TurnWait, ...]:
        return () if self.held is None else tuple(self.held.waited)

    def abort(self) -> None:
        """Leave the queue; the turn was not let in."""
        self.exchange.turns.ended(self.asked, NotLetIn(self.held))


class Deciding(Phase):
    """In this phase the session is inside and no dispatch of the turn is live: one is being
    decided."""

    __slots__ = ("asked", "exchange")

    def __init__(self, exchange: Exchange, asked: IdentifiedRequest) -> None:
        self.exchange = exchange
        self.asked = asked

    def abort(self) -> None:
        """End a turn of which no dispatch is live."""
        self.exchange.turns.ended(self.asked)


class Connecting(Leg):
    """In this phase a worker is chosen: it is asked for a place, or a connection to it is made."""

    __slots__ = ("place", "task")

    def __init__(self, attempt: Attempt, place: HeldPlace | None, task: asyncio.Task[None]) -> None:
        self.attempt = attempt
        self.place = place
        self.task = task

    def is_waiting_for(self, task: asyncio.Task[None]) -> bool:
        """Return whether `task` is the one that asks for a place or connects."""
        return task is self.task

    def hang_up(self) -> None:
        """Stop connecting and give the place back."""
        self.task.cancel()
        give_back(self.place)

    def abort(self) -> None:
        """Stop connecting and give place and receipt back."""
        self.hang_up()
        self.attempt.abort()


class Sent(Leg):
    """In this phase the turn is at a worker, over `upstream`."""

    __slots__ = ("upstream",)

    def __init__(self, attempt: Attempt, upstream: UpstreamConnection) -> None:
        self.attempt = attempt
        self.upstream = upstream

    def hang_up(self) -> None:
        """Hang up on the worker."""
        self.upstream.abort()

    def abort(self) -> None:
        """Hang up on the worker and give the receipt back."""
        self.hang_up()
        self.attempt.abort()

    def pause(self) -> None:
        """Stop reading the worker's answer."""
        self.upstream.pause()

    def resume(self) -> None:
        """Go on reading the worker's answer."""
        self.upstream.resume()

    def answer_fault(self, error: Exception) -> None:
        """End the request, as the gateway failed at what the worker sent."""
        self.attempt.exchange.failed(error)
