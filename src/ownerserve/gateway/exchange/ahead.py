"""A leg ahead asks the worker that computes a turn's prompt at once, while the turn goes to the
worker that answers: that one asks it too, by the leg's number, and reads what it computes.

    Deciding ─ Dispatch ─┬─> Connecting ──> AwaitingHead ──> Relaying     the turn, at D
                         └─> asked ─────────────│────────> computed       its prompt, at P
                               `─ failed        `─ hung up: the answer begins, the turn ends,
                                                   or is decided anew

It is beside the turn's phases and changes none of them: whatever becomes of it, the turn goes on at
D, which asks P by itself or computes the prompt.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

from ownerserve.gateway.exchange.apart import one_token_saids
from ownerserve.gateway.exchange.attempt import Attempt
from ownerserve.gateway.exchange.legs import COMPUTED
from ownerserve.gateway.http.door import is_ours
from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.gateway.http.upstream import BodySink, UpstreamConnection
from ownerserve.gateway.stamps import order_lines
from ownerserve.kv.wire.rpc import new_nonce
from ownerserve.router.messages import Failure

if TYPE_CHECKING:
    from ownerserve.gateway.exchange.exchange import Exchange

FAULT = "fault"
UNWANTED = "unwanted"


class NothingAhead:
    """Nobody is asked ahead."""

    __slots__ = ()

    def end(self) -> None:
        """Ask no more."""


NOTHING_AHEAD = NothingAhead()


class LegAhead(NothingAhead):
    """A leg ahead is under way from its making until one outcome is noted
    (upstream.HeadSink, upstream.BodySink)."""

    __slots__ = ("_attempt", "_status", "_task", "_upstream")

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._status = 0
        self._upstream: UpstreamConnection | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Ask over a kept connection, or a new one."""
        pool = self._attempt.route.prefill_pool
        assert pool is not None, "somebody computes the prompt"
        kept = pool.take()
        if kept is not None:
            self._send(kept)
        else:
            self._connect()

    def end(self) -> None:
        """Hang up on who computes, if it still does: the turn needs it no more."""
        if self._task is not None:
            self._task.cancel()
        if self._upstream is not None:
            self._upstream.abort()
        self._note(UNWANTED)

    def _connect(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        pool = self._attempt.route.prefill_pool
        assert pool is not None
        try:
            upstream = await pool.connect()
            self._send(upstream)
        except OSError as error:
            self._note(Failure.OURS if is_ours(error) else Failure.CONNECT)
        except Exception as error:  # noqa: BLE001 - a task's root: the turn goes on without it
            self.answer_fault(error)

    def _send(self, upstream: UpstreamConnection) -> None:
        attempt, self._task, self._upstream = self._attempt, None, upstream
        exchange, asked, route = attempt.exchange, attempt.asked, attempt.route
        head = exchange.request.head
        saids = one_token_saids(head.target, asked.fields)
        body = asked.body_for(exchange.request.body, None, *saids)
        lines = route.leg_lines + order_lines(route.prompt_line())
        sent = head.to_worker(exchange.request_id, sum(map(len, body)), orders=lines)
        patience_s = exchange.turns.patience_s(asked)
        upstream.send(sent, body, method=head.method, sink=self, patience_s=patience_s)

    def _note(self, outcome: str) -> None:
        """Note the outcome, once: nothing of the leg is under way any more."""
        exchange = self._attempt.exchange
        self._task = self._upstream = None
        if exchange.ahead is self:
            exchange.ahead = NOTHING_AHEAD
            exchange.legs.ahead(self._attempt.dispatch, outcome)

    # What the worker says

    def answer_begin(self, head: ResponseHead, first: bytes) -> BodySink:
        """Take in the head: whether it is computed."""
        self._status = head.status
        return self

    def answer_failed(self, failure: Failure) -> None:
        """Ask again where a kept connection was found closed; else there is no leg."""
        if failure is Failure.STALE:
            self._connect()
        else:
            self._note(failure)

    def answer_bytes(self, data: bytes) -> None:
        """Drop what is nobody's."""

    def answer_end(self, tail: bytes) -> None:
        """Note that the prompt is computed, or that the worker would not."""
        is_computed = self._status < HTTPStatus.BAD_REQUEST
        self._note(COMPUTED if is_computed else Failure.REFUSED)

    def answer_broken(self, failure: Failure) -> None:
        """Note that nobody can say whether it is computed."""
        self._note(failure)

    def answer_fault(self, error: Exception) -> None:
        """Log a fault of the gateway's own: the turn goes on without the leg."""
        self._attempt.exchange.log_fault(error)
        self._note(FAULT)


def ask_ahead(exchange: Exchange, attempt: Attempt) -> None:
    """Have the turn's prompt computed where it was decided, at once, where both workers speak our
    protocol and the gateway asks both."""
    route, head = attempt.route, exchange.request.head
    if route.prefiller is None or not exchange.legs.sends_ahead:
        return
    if not one_token_saids(head.target, attempt.asked.fields):
        return
    route.leg = new_nonce()
    exchange.ahead = ahead = LegAhead(attempt)
    try:
        ahead.begin()
    except Exception as error:  # noqa: BLE001 - it fails no turn
        ahead.answer_fault(error)
