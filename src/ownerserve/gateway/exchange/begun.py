"""What the client has of an answer: nothing, or a part of one (carrying.py). It decides what an
answer's head begins, and how a client is told that there is no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from ownerserve.gateway.exchange.attempt import Attempt
from ownerserve.gateway.exchange.carrying import (
    CarriedStream,
    FirstOfStream,
    may_be_carried_on,
)
from ownerserve.gateway.exchange.relaying import (
    Dechunking,
    Relaying,
    Streaming,
    StreamingDechunked,
    StreamingDechunkedQuietly,
    StreamingQuietly,
)
from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.gateway.http.replies import Rejected, fault
from ownerserve.gateway.http.upstream import BodySink, UpstreamConnection
from ownerserve.gateway.turns import BegunAnswer
from ownerserve.router.requests.body import TAIL_BYTES, scan_response_id

if TYPE_CHECKING:
    from ownerserve.gateway.exchange.exchange import Exchange


class NothingSaid:
    """The client has nothing of an answer."""

    __slots__ = ()

    @property
    def can_be_told_anew(self) -> bool:
        """Whether a worker that begins the answer anew may be asked for it."""
        return True

    def reject(self, exchange: Exchange, told: Rejected) -> None:
        """Answer with an error of the gateway's own."""
        exchange.client.answer_rejected(told, exchange.request_id)

    def fault(self, exchange: Exchange) -> None:
        """Answer that a fault of the gateway's own ended the request."""
        self.reject(exchange, fault())

    def stop(self, exchange: Exchange) -> None:
        """Say nothing: the client sees its connection close before any answer."""

    def begin(
        self,
        attempt: Attempt,
        upstream: UpstreamConnection,
        came: BegunAnswer,
        *,
        head: ResponseHead,
        first: bytes,
    ) -> BodySink:
        """Begin the answer, and return the phase in which it goes on."""
        exchange = attempt.exchange
        is_old = head.chunked and exchange.request.head.version == b"1.0"
        relaying: type[Relaying] = Streaming if head.has_events and head.chunked else Relaying
        if is_old:
            relaying = StreamingDechunked if head.has_events else Dechunking
        if head.has_events and exchange.asks_usage:
            is_framed = relaying is Streaming  # events that end by close have no frames either
            relaying = StreamingQuietly if is_framed else StreamingDechunkedQuietly
        going_on = going_on_as(relaying, attempt, upstream, came=came, head=head)
        if is_old:
            head = head.unchunked()
        client = exchange.client
        if head.ends_by_close:
            client.close_after_answer()
        lines = b"%bx-request-id: %b\r\n%b" % (
            exchange.turns.receipt(attempt.asked, attempt.dispatch, head),
            exchange.request_id,
            client.connection_line,
        )
        client.write(head.to_client(lines) + going_on.passed(first))
        let_body_go(going_on)
        return going_on


NOTHING_SAID = NothingSaid()


def going_on_as(
    relaying: type[Relaying],
    attempt: Attempt,
    upstream: UpstreamConnection,
    *,
    came: BegunAnswer,
    head: ResponseHead,
) -> Relaying:
    """Let the exchange go on in the phase `relaying`, or in that of a stream that may be carried
    on, and return it."""
    exchange = attempt.exchange
    if attempt.asked.untold_tokens and came.says_kept:
        attempt = attempt.kept()
    response_id = None
    if exchange.request.head.target.startswith(b"/v1/responses"):
        response_id = scan_response_id(upstream.reader.payload.now[:TAIL_BYTES])
    going_on: Relaying
    if may_be_carried_on(attempt, head):
        going_on = CarriedStream(attempt, upstream, came, FirstOfStream())
    else:
        going_on = relaying(attempt, upstream, came, response_id)
    exchange.phase = going_on
    return going_on


def let_body_go(going_on: Relaying) -> None:
    """Let the request's body go as its answer begins, where nobody else will be asked."""
    if isinstance(going_on, CarriedStream):
        return
    exchange = going_on.attempt.exchange
    exchange.request.held.let_go()
    exchange.request = structs.replace(exchange.request, body=b"")
    going_on.attempt = going_on.attempt.without_body()
