"""One client connection: requests in, in order; one is answered at a time.

Owns the order of answers. What follows a request (pipelining) waits in the queue, and behind a few
waiting requests the socket is not read any more. While a request is being answered the socket is
read, so that a hang-up is seen at once; a half-closed client counts as gone, as with nginx.
A request that is refused while another is being answered gets its answer after that, then the
connection closes: past a refused head nobody can say where the next one starts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from ownerserve.gateway.exchange import Exchange
from ownerserve.gateway.http.replies import Rejected, error_reply, refused, reply
from ownerserve.gateway.http.requests import Request, RequestReader
from ownerserve.gateway.workers.model_list import model_answer
from ownerserve.router.messages import Refusal

if TYPE_CHECKING:
    from ownerserve.gateway.service import Gateway

QUEUE_MAX = 4
LINGER_S = 2.0
"""How long a refused client's input is read and dropped, so that it can read its answer."""

_CLOSE_LINE = b"connection: close\r\n"


class ClientConnection(asyncio.Protocol):
    """A client."""

    def __init__(self, gateway: Gateway) -> None:
        self.connection_line = b""
        """The Connection header line of the present answer."""
        self._gateway = gateway
        self._reader = RequestReader(gateway.config)
        self._transport: asyncio.Transport | None = None
        self._queue: deque[Request | Rejected] = deque()
        self._exchange: Exchange | None = None
        self._waiting_since_s = gateway.now()
        self._reading = self._writable = True
        self._closing = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._gateway.clients.add(self)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        reader = self._reader
        idle = not reader.in_message
        items = reader.feed(data)
        if items:
            self._queue.extend(items)
            self._advance()
        elif reader.in_message and self._exchange is None:
            if idle:  # from here on the client is late, not idle
                self._waiting_since_s = self._gateway.now()
            if reader.awaits_continue:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closing = True
        self._queue.clear()
        self._gateway.clients.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abort()

    def pause_writing(self) -> None:
        self._writable = False
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self._writable = True
        if self._exchange is not None:
            self._exchange.resume()
        else:
            self._advance()

    # The request queue

    def _advance(self) -> None:
        """Start the next request when none is being answered; keep the queue short."""
        queue = self._queue
        while queue and self._exchange is None and self._writable and not self._closing:
            item = queue.popleft()
            if isinstance(item, Rejected):
                self._refuse_and_linger(item)
                return
            head = item.head
            keeps = (
                item.keep_alive
                and head.version == b"1.1"
                and head.method != b"HEAD"  # an error's body would be taken for the next answer
                and not self._gateway.draining
            )
            self.connection_line = b"" if keeps else _CLOSE_LINE
            if head.target == b"/health":
                self._answer_health()
                continue
            path = head.target.partition(b"?")[0]
            if head.method == b"GET" and (path + b"/").startswith(b"/v1/models/"):
                self._answer_models(path)
                continue
            self._exchange = Exchange(self._gateway, self, item)
            self._exchange.start()
        self._balance_reading()

    def _balance_reading(self) -> None:
        """Stop reading behind a deep queue, go on when it is short again."""
        reading = len(self._queue) < QUEUE_MAX
        transport = self._transport
        if reading is self._reading or transport is None or transport.is_closing():
            return
        self._reading = reading
        if reading:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def _answer_health(self) -> None:
        up = len(self._gateway.state.fleet.up)
        status = HTTPStatus.OK if up else HTTPStatus.SERVICE_UNAVAILABLE
        self.write(
            reply(
                status,
                b'{"workers_up":%d}' % up,
                request_id=self._gateway.next_request_id(),
                connection=b"close" if self.connection_line else b"keep-alive",
            )
        )
        self.answer_complete()

    def _answer_models(self, path: bytes) -> None:
        """The union of what the workers serve: no worker is asked."""
        gateway = self._gateway
        request_id = gateway.next_request_id()
        if not gateway.state.fleet.up:
            self.answer_rejected(refused(Refusal.NO_WORKER), request_id)
            return
        body = model_answer(path, gateway.models())
        if body is None:
            self.answer_rejected(refused(Refusal.NO_SUCH_MODEL), request_id)
            return
        connection = b"close" if self.connection_line else b"keep-alive"
        self.write(reply(HTTPStatus.OK, body, request_id=request_id, connection=connection))
        self.answer_complete()

    def _refuse_and_linger(self, rejected: Rejected) -> None:
        """Refuse, then read and drop input for a while: closing at once would reset the answer."""
        request_id = self._gateway.next_request_id()
        self._gateway.observer.rejected(rejected)
        self.write(error_reply(rejected, request_id=request_id, connection=b"close"))
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
        self._queue.clear()
        self._balance_reading()
        self._closing = True
        asyncio.get_running_loop().call_later(LINGER_S, self.close)

    # What an exchange does

    def write(self, data: bytes) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def close_after_answer(self) -> None:
        """The present answer can only end by closing the connection."""
        self.connection_line = _CLOSE_LINE

    def answer_rejected(self, rejected: Rejected, request_id: bytes) -> None:
        """Nothing was sent to a worker, or nothing came back."""
        self._gateway.observer.rejected(rejected)
        connection = b"close" if self.connection_line else b"keep-alive"
        self.write(error_reply(rejected, request_id=request_id, connection=connection))
        self.answer_complete()

    def answer_complete(self) -> None:
        """The answer is written; on to the next request, or close."""
        self._exchange = None
        self._waiting_since_s = self._gateway.now()
        if self.connection_line:
            self.close()
        elif self._queue:
            asyncio.get_running_loop().call_soon(self._advance)

    def answer_cut_off(self) -> None:
        """The worker died in mid-answer: end the stream so that the client can see it is short."""
        self._exchange = None
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    # What the service does

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def expire(self, now: float) -> None:
        """Close when the client has kept us waiting for a request too long."""
        if self._exchange is not None or self._closing:
            return
        config, reader, waited_s = self._gateway.config, self._reader, now - self._waiting_since_s
        if not reader.in_message:
            if waited_s > config.idle_timeout_s:
                self.close()
        elif waited_s > (config.head_timeout_s if reader.in_head else config.body_timeout_s):
            self._refuse_and_linger(
                Rejected(HTTPStatus.REQUEST_TIMEOUT, "timeout", "request: came in too slowly")
            )
