"""The phase of a turn that two workers are asked for, since the first of them sent nothing of an
answer for too long.

    AwaitingHead ── hedge_after_s ──> Hedged: first AwaitingHead, second Connecting ──> AwaitingHead
                                        │
        one's head comes  ──────────────┤ the other is hung up on: Outrun
        one fails, or says no ──────────┤ LegFailed: the other goes on, alone
        the client hangs up ────────────┘ both are hung up on: Outrun, Aborted

Each leg has a receipt of its own, given back once. What is asked twice changes nothing at a worker
but its cache: the second one serves the turn as a guest, as it would any turn of a session that
another owns (docs/protocol.md, rule 1). So turns that would are asked once: the last one of a
session, which gives up its state, and those that name or leave something at one worker alone
(stored responses). So are those that are not streamed: their head comes with their last token, and
says nothing of who is slow.
"""

from __future__ import annotations

import asyncio
from weakref import ref

from ownerserve.gateway.exchange.attempt import Attempt
from ownerserve.gateway.exchange.awaiting import AwaitingHead
from ownerserve.gateway.exchange.begun import NothingSaid
from ownerserve.gateway.exchange.phases import Leg, Phase
from ownerserve.gateway.turns import Route
from ownerserve.gateway.workers.rpc import Manner, is_turn
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import Failure

_STORED = (b"/v1/responses",)
_ABSENT = (None, b"null")


def may_run_twice(attempt: Attempt) -> bool:
    """Return whether the turn may be asked of a second worker while the first one has it."""
    head, asked = attempt.exchange.request.head, attempt.asked
    raw = asked.fields.raw
    return (
        isinstance(attempt.exchange.begun, NothingSaid)
        and is_turn(head)
        and raw("stream") == b"true"
        and not asked.identity.final
        and raw("previous_response_id") in _ABSENT
        and raw("conversation") in _ABSENT
        and (not head.target.startswith(_STORED) or raw("store") == b"false")
        and attempt.dispatch.decision.prefill is None
        and attempt.dispatch.reason is not DispatchReason.NOBODY_UP
    )


def hedge_later(awaiting: AwaitingHead) -> None:
    """Ask a second worker too when nothing has come of the answer for long, where that is wanted
    and may be."""
    after_s = awaiting.attempt.exchange.legs.hedge_after_s
    if after_s is not None and may_run_twice(awaiting.attempt):
        asyncio.get_running_loop().call_later(after_s, _look, ref(awaiting))


def _look(late: ref[AwaitingHead]) -> None:
    awaiting = late()
    if awaiting is None or awaiting.attempt.exchange.phase is not awaiting:
        return
    try:
        _hedge(awaiting)
    except Exception as error:  # noqa: BLE001 - a timer's root: the fault ends its request
        awaiting.attempt.exchange.failed(error)


def _hedge(first: AwaitingHead) -> None:
    exchange, asked = first.attempt.exchange, first.attempt.asked
    route = exchange.legs.hedge(asked, first.attempt.dispatch, request_id=exchange.request_id)
    if isinstance(route, Route):
        second = Attempt(exchange, asked, route, Manner.UNASKED)
        exchange.phase = Hedging(first, second)
        exchange.connect(second, None)


class Hedging(Phase):
    """In this phase a second worker is decided for, and nothing has been done yet to reach it."""

    __slots__ = ("first", "second")

    def __init__(self, first: AwaitingHead, second: Attempt) -> None:
        self.first = first
        self.second = second

    def with_leg(self, leg: Leg) -> Phase:
        """Return the phase with both legs under way."""
        return Hedged(self.first, leg)

    def abort(self) -> None:
        """Give both receipts back, and hang up on the first worker."""
        self.second.exchange.legs.outrun(self.second.dispatch, "aborted")
        self.first.abort()


class Hedged(Phase):
    """In this phase two workers have the turn, and nothing of an answer has come of either."""

    __slots__ = ("first", "second")

    def __init__(self, first: Leg, second: Leg) -> None:
        self.first = first
        self.second = second

    def is_waiting_for(self, task: asyncio.Task[None]) -> bool:
        """Return whether `task` is one that connects."""
        return self.first.is_waiting_for(task) or self.second.is_waiting_for(task)

    def with_leg(self, leg: Leg) -> Phase:
        """Return the phase with one leg a step further."""
        if leg.attempt is self.first.attempt:
            return Hedged(leg, self.second)
        return Hedged(self.first, leg)

    def begins(self, attempt: Attempt) -> None:
        """Hang up on the other worker: this one was faster."""
        own, other = self._sides(attempt)
        attempt.exchange.phase = own
        other.hang_up()
        attempt.exchange.legs.outrun(
            other.attempt.dispatch, "won" if own is self.second else "outrun"
        )

    def goes_on_without(self, attempt: Attempt, failure: Failure) -> bool:
        """Go on with the other leg alone."""
        own, other = self._sides(attempt)
        attempt.exchange.phase = other
        attempt.exchange.legs.failed(
            attempt.dispatch, failure, "failed" if own is self.second else "instead"
        )
        return True

    def abort(self) -> None:
        """Hang up on both workers and give both receipts back."""
        self.second.hang_up()
        self.first.attempt.exchange.legs.outrun(self.second.attempt.dispatch, "aborted")
        self.first.abort()

    def pause(self) -> None:
        """Stop reading both answers."""
        self.first.pause()
        self.second.pause()

    def resume(self) -> None:
        """Go on reading both answers."""
        self.first.resume()
        self.second.resume()

    def _sides(self, attempt: Attempt) -> tuple[Leg, Leg]:
        """Return the attempt's leg, and the other one."""
        if attempt is self.second.attempt:
            return self.second, self.first
        return self.first, self.second
