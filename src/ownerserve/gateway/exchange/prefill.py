"""The phases of a leg that only computes a turn's prompt, at another worker than the one that
answers, where the gateway asks it itself: engines whose operator says what they are for. A worker
that speaks our protocol is asked by the one that answers, and its turn goes there at once
(rpc.WorkerLines.prefiller_of).

    Deciding ─ Dispatch with a prefill worker ─> PrefillConnecting ──> Prefilling ──> Connecting
                                                    │                     │           (to D, with
                                                    └── whatever fails ───┴─────────>  what P said)
                                                        NotComputedApart: D computes the prompt

Whatever goes wrong here costs time and nothing else: the turn goes on at its worker without the
state. The dispatch is one, and so is its receipt; it counts at both workers until the prompt is
computed.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from msgspec import structs

from ownerserve.gateway.exchange.apart import handed_over, prefill_saids
from ownerserve.gateway.exchange.attempt import Attempt
from ownerserve.gateway.exchange.phases import Phase, Sent
from ownerserve.gateway.http.door import is_ours
from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.gateway.http.upstream import BodySink, UpstreamConnection
from ownerserve.kv.units import MIB
from ownerserve.router.messages import Failure

ANSWER_MAX_BYTES = 4 * MIB
"""A longer answer of one token is none."""


class PrefillConnecting(Phase):
    """In this phase a connection is made to the worker that is to compute the prompt."""

    __slots__ = ("attempt", "task")

    def __init__(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        self.attempt = attempt
        self.task = task

    def is_waiting_for(self, task: asyncio.Task[None]) -> bool:
        """Return whether `task` is the one that connects."""
        return task is self.task

    def abort(self) -> None:
        """Stop connecting and give the receipt back."""
        self.task.cancel()
        self.attempt.abort()


class Prefilling(Sent):
    """In this phase a worker computes the prompt (upstream.HeadSink, upstream.BodySink); its answer
    is read to its end and not passed on."""

    __slots__ = ("_parts", "_size")

    def __init__(self, attempt: Attempt, upstream: UpstreamConnection) -> None:
        super().__init__(attempt, upstream)
        self._parts: list[bytes] = []
        self._size = 0

    def answer_begin(self, head: ResponseHead, first: bytes) -> BodySink:
        """Take in the head; an error is heard no further."""
        if head.status >= HTTPStatus.BAD_REQUEST:
            self._give_up(Failure.REFUSED)
        else:
            self._keep()
        return self

    def answer_failed(self, failure: Failure) -> None:
        """Send it again where a kept connection was found closed; else go on without it."""
        if failure is Failure.STALE:
            _connect(self.attempt)
        else:
            _compute_on_the_spot(self.attempt, failure)

    def answer_bytes(self, data: bytes) -> None:
        """Keep a part of the answer."""
        self._keep()

    def answer_end(self, tail: bytes) -> None:
        """Send the turn to its worker, with what this one says of the state."""
        attempt = self.attempt
        saids = handed_over(b"".join(self._parts))
        if saids is None:
            _compute_on_the_spot(attempt, Failure.MALFORMED)
            return
        attempt.exchange.legs.prefilled(attempt.dispatch)
        attempt.exchange.proceed(structs.replace(attempt, saids=tuple(saids)))

    def answer_broken(self, failure: Failure) -> None:
        """Go on without it: what the answer would have said is not known."""
        _compute_on_the_spot(self.attempt, failure)

    def _keep(self) -> None:
        payload = self.upstream.reader.payload.now
        self._size += len(payload)
        if self._size > ANSWER_MAX_BYTES:
            self._give_up(Failure.MALFORMED)
        else:
            self._parts.append(payload)

    def _give_up(self, failure: Failure) -> None:
        self.upstream.abort()
        _compute_on_the_spot(self.attempt, failure)


def begin_prefill(attempt: Attempt) -> None:
    """Have the prompt computed where it was decided, over a kept connection or a new one."""
    pool = attempt.route.prefill_pool
    if pool is None or not prefill_saids(
        attempt.exchange.request.head.target, attempt.asked.fields
    ):
        _compute_on_the_spot(attempt, Failure.UNFIT)
        return
    kept = pool.take()
    if kept is None:
        _connect(attempt)
    else:
        _send(attempt, kept)


def _connect(attempt: Attempt) -> None:
    exchange = attempt.exchange
    exchange.phase = PrefillConnecting(attempt, exchange.run(_open(attempt)))


async def _open(attempt: Attempt) -> None:
    pool = attempt.route.prefill_pool
    assert pool is not None
    try:
        upstream = await pool.connect()
    except OSError as error:
        _compute_on_the_spot(attempt, Failure.OURS if is_ours(error) else Failure.CONNECT)
        return
    _send(attempt, upstream)


def _send(attempt: Attempt, upstream: UpstreamConnection) -> None:
    exchange, asked = attempt.exchange, attempt.asked
    head = exchange.request.head
    body = asked.body_for(exchange.request.body, None, *prefill_saids(head.target, asked.fields))
    sent = head.to_worker(exchange.request_id, sum(map(len, body)), orders=attempt.route.leg_lines)
    exchange.phase = prefilling = Prefilling(attempt, upstream)
    patience_s = exchange.legs.prompt_patience_s
    upstream.send(sent, body, method=head.method, sink=prefilling, patience_s=patience_s)


def _compute_on_the_spot(attempt: Attempt, failure: Failure) -> None:
    """Bring the turn to its worker, which computes the prompt itself: nobody else could."""
    exchange = attempt.exchange
    route = exchange.legs.not_prefilled(
        attempt.asked, attempt.dispatch, failure, request_id=exchange.request_id
    )
    exchange.proceed(structs.replace(attempt, route=route))
