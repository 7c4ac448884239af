"""A client whose streamed turn waits before the fleet is held: after some seconds it gets its
answer's head and a comment, then one as often, until the worker's events follow on the same
connection.

    Queued ── every_s ──> HeadSaid: 200, text/event-stream, ": waiting for a seat, place 3 of 12"
                             │  every_s: one more, also while its worker computes the prompt
       events come ──────────┤ they follow; the worker's head is dropped, its receipt is a comment
       no, an error, a fault ┘ one error event, in the client's dialect; the stream ends short

Who is let in sooner, or does not stream, hears nothing before the answer. Behind the head no status
can be told, nor Retry-After: the event's message says it.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from weakref import ref

import msgspec

from ownerserve.gateway.exchange.attempt import Attempt
from ownerserve.gateway.exchange.begun import NOTHING_SAID, NothingSaid, going_on_as, let_body_go
from ownerserve.gateway.exchange.carrying import last_words
from ownerserve.gateway.exchange.phases import OVER, Queued
from ownerserve.gateway.exchange.relaying import (
    Relaying,
    Streaming,
    StreamingDechunked,
    StreamingDechunkedQuietly,
    StreamingRechunked,
)
from ownerserve.gateway.http.events import chunk, comment, rejected_event
from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.gateway.http.replies import STOPPED, CutShort, Rejected
from ownerserve.gateway.http.upstream import BodySink, UpstreamConnection
from ownerserve.gateway.turns import BegunAnswer
from ownerserve.gateway.workers.rpc import is_turn
from ownerserve.kv.errors import UNREADABLE
from ownerserve.kv.units import KIB

if TYPE_CHECKING:
    from ownerserve.gateway.exchange.exchange import Exchange

_LINES = b"content-type: text/event-stream\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
"""nginx buffers what it does not know to be live."""
_ERROR_MAX_BYTES = 64 * KIB
"""So much is read of a worker's error."""
_STATUSES = frozenset(HTTPStatus)


def hold(queued: Queued) -> None:
    """Have a streamed turn that waits told so, as long as it does."""
    exchange = queued.exchange
    head, every_s = exchange.request.head, exchange.turns.comments.every_s
    if every_s and is_turn(head) and queued.asked.fields.raw("stream") == b"true":
        asyncio.get_running_loop().call_later(every_s, _look, ref(exchange))


def _look(late: ref[Exchange]) -> None:
    exchange = late()
    if exchange is None:
        return
    try:
        every_s = exchange.turns.comments.every_s
        if every_s and _say(exchange):
            asyncio.get_running_loop().call_later(every_s, _look, late)
    except Exception as error:  # noqa: BLE001 - a timer's root: the fault ends its request
        exchange.failed(error)


def _say(exchange: Exchange) -> bool:
    """Say to the client where its turn stands; return whether there is more to say later."""
    phase, client = exchange.phase, exchange.client
    if exchange.begun is NOTHING_SAID and isinstance(phase, Queued):
        exchange.begun = HEAD_SAID
        _begin(exchange)
    elif exchange.begun is not HEAD_SAID or phase is OVER or isinstance(phase, Relaying):
        return False
    if client.takes_more:
        comments = exchange.turns.comments
        waited_s = asyncio.get_running_loop().time() - exchange.started_s
        if isinstance(phase, Queued) and phase.held is not None:
            said = comments.waiting(phase.held, waited_s)
        else:
            said = comments.let_in(waited_s)
        client.write(_framed(exchange, said))
    return True


def _begin(exchange: Exchange) -> None:
    """Send the head of an answer of which nothing is known, but that it is to be a stream."""
    client, is_chunked = exchange.client, exchange.request.head.version != b"1.0"
    if not is_chunked:
        client.close_after_answer()
    client.write(
        b"HTTP/1.1 200 OK\r\n%b%bx-request-id: %b\r\n%b\r\n"
        % (
            _LINES,
            b"transfer-encoding: chunked\r\n" if is_chunked else b"",
            exchange.request_id,
            client.connection_line,
        )
    )


def _framed(exchange: Exchange, payload: bytes) -> bytes:
    """Return payload as the client gets it: some are too old for chunks."""
    return payload if exchange.request.head.version == b"1.0" else chunk(payload)


class HeadSaid(NothingSaid):
    """The client has the head of a stream, and comments."""

    __slots__ = ()

    def reject(self, exchange: Exchange, told: Rejected) -> None:
        """Say the error in the stream, which ends short."""
        exchange.turns.refusals.in_stream(told)
        event = rejected_event(exchange.request.head.target, told)
        exchange.client.answer_cut_off(_framed(exchange, event))

    def stop(self, exchange: Exchange) -> None:
        """Tell the client that the gateway ends."""
        exchange.client.answer_cut_off(last_words(exchange, STOPPED))

    def begin(
        self,
        attempt: Attempt,
        upstream: UpstreamConnection,
        came: BegunAnswer,
        *,
        head: ResponseHead,
        first: bytes,
    ) -> BodySink:
        """Have the worker's events follow; what is no stream of them is told as an error."""
        exchange = attempt.exchange
        if not head.has_events:
            exchange.phase = telling = TellingError(attempt, upstream, came, head.status)
            telling.answer_bytes(first)
            let_body_go(telling)
            return telling
        relaying: type[Streaming] = StreamingRechunked
        if exchange.request.head.version == b"1.0":
            relaying = StreamingDechunkedQuietly if exchange.asks_usage else StreamingDechunked
        going_on = going_on_as(relaying, attempt, upstream, came=came, head=head)
        receipt = exchange.turns.receipt(attempt.asked, attempt.dispatch, head).decode("latin-1")
        exchange.client.write(_framed(exchange, comment(receipt)) + going_on.passed(first))
        let_body_go(going_on)
        return going_on


class TellingError(Relaying):
    """In this phase a worker's answer that is no stream of events is read to its end: its client
    hears it as the error that it is, or that it is none of what was asked for."""

    __slots__ = ("_said", "_status")

    def __init__(
        self, attempt: Attempt, upstream: UpstreamConnection, begun: BegunAnswer, status: int
    ) -> None:
        super().__init__(attempt, upstream, begun, None)
        self._status = status
        self._said = b""

    def answer_bytes(self, data: bytes) -> None:
        """Keep what may be the error's text."""
        if len(self._said) < _ERROR_MAX_BYTES:
            self._said += self.upstream.reader.payload.now

    def answer_end(self, tail: bytes) -> None:
        """Tell the error, and close the books of an answer that is whole."""
        exchange = self.attempt.exchange
        exchange.phase = OVER
        self.finished(tail)
        event = rejected_event(
            exchange.request.head.target, said_by_worker(self._status, self._said)
        )
        self._client.answer_cut_off(_framed(exchange, event))

    def cut_short(self, why: CutShort) -> None:
        """Tell the client why nothing comes."""
        self._client.answer_cut_off(last_words(self.attempt.exchange, why))


HEAD_SAID = HeadSaid()


def said_by_worker(status: int, body: bytes) -> Rejected:
    """Return a worker's answer of `status` that is no stream as the error that its client is
    told, with the worker's own message where it says one."""
    if status < HTTPStatus.BAD_REQUEST:
        message = f"the worker answered {status}, and not with the stream that was asked for"
        return Rejected(HTTPStatus.BAD_GATEWAY, "no_stream", message)
    try:
        said = msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        said = {}
    inner = said.get("error")
    told = inner if isinstance(inner, dict) else said
    text, code = told.get("message"), told.get("code")
    known = status if status in _STATUSES else status // 100 * 100
    return Rejected(
        HTTPStatus(known if known in _STATUSES else HTTPStatus.BAD_GATEWAY),
        code if isinstance(code, str) else "worker_error",
        text if isinstance(text, str) else f"the worker answered {status}",
    )
