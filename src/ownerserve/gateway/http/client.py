"""A client connection takes requests in, in order, and has one answered at a time.

RequestReader turns bytes into requests, message by message: it owns the parser and the message that
is being read, does no I/O and answers nobody. It gives whole requests and, at most once and last, a
refusal, past which nothing of the input can be believed.

ClientConnection owns the order of answers. What follows a request (pipelining) waits in the queue,
and behind a few waiting requests the socket is not read any more. While a request is being answered
the socket is read, so that a hang-up is seen at once; a half-closed client counts as gone, as with
nginx. A request that is refused while another is being answered gets its answer after that, then
the connection closes: past a refused head nobody can say where the next one starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Set
from http import HTTPStatus
from typing import Protocol, cast

import httptools
import msgspec

from ownerserve.gateway.http.bodies import BodyBudget, HeldBody
from ownerserve.gateway.http.callers import Callers
from ownerserve.gateway.http.heads import HEALTH, Header, RequestHead, read_request_head
from ownerserve.gateway.http.model_list import Models, model_answer
from ownerserve.gateway.http.replies import Rejected, error_reply, fault, refused, reply
from ownerserve.router.messages import Refusal

log = logging.getLogger("ownerserve.gateway")


class HttpRequest(msgspec.Struct, frozen=True):
    """A request is whole, as the client sent it. `keep_alive`: another may follow. `held`: what its
    body takes of the gateway's memory."""

    head: RequestHead
    body: bytes
    keep_alive: bool
    held: HeldBody


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits say who is let in, what a client may send, how long it may take, and which of its
    headers go no further."""

    head_max_bytes: int
    body_max_bytes: int
    head_timeout_s: float
    body_timeout_s: float
    idle_timeout_s: float
    replaced: Set[bytes]
    callers: Callers


class RequestReader:
    """The reader feeds the parser and collects the requests that become whole."""

    def __init__(self, limits: ClientLimits, budget: BodyBudget) -> None:
        self.in_message = False
        self.over = False
        """A request was refused: nothing more is read."""
        self._head_max_bytes = limits.head_max_bytes
        self._body_max_bytes = limits.body_max_bytes
        self._replaced = limits.replaced
        self._callers = limits.callers
        self._parser = httptools.HttpRequestParser(self)
        self._items: list[HttpRequest | Rejected] = []
        self._url = b""
        self._headers: list[Header] = []
        self._head: RequestHead | None = None
        self._read_bytes: int | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._budget = budget
        self._held = budget.open()

    @property
    def in_head(self) -> bool:
        """`in_head` tells whether a head has begun and is not whole."""
        return self.in_message and self._head is None

    @property
    def awaits_continue(self) -> bool:
        """Whether the client has sent a head and wants to hear that its body is welcome."""
        if not self.in_message or self._head is None or self._body:
            return False
        return self._head.special.get(b"expect", b"").lower() == b"100-continue"

    def feed(self, data: bytes) -> list[HttpRequest | Rejected]:
        """Return the requests that are whole with `data`; a refusal comes last, and nothing after
        it."""
        if self.over:
            return []
        try:
            self._parser.feed_data(data)
            if self.in_message and self._head is None:
                self._count_read(len(data))
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, Rejected):
                raise
            self.refuse(error.__context__)
        except httptools.HttpParserError as error:
            self.refuse(Rejected(HTTPStatus.BAD_REQUEST, "malformed", f"request: {error}"))
        except Rejected as rejected:
            self.refuse(rejected)
        items = self._items
        if items:
            self._items = []
        return items

    def refuse(self, rejected: Rejected) -> None:
        """Read nothing more; the next `feed` or `rest` gives the refusal."""
        self.close()
        self._items.append(rejected)

    def close(self) -> None:
        """Read nothing more, and let go what is held of a message that is not whole."""
        self.over = True
        self._body = []
        self._held.let_go()

    def rest(self) -> list[HttpRequest | Rejected]:
        """Return what is whole and was not given out yet."""
        items, self._items = self._items, []
        return items

    def _count_read(self, read_bytes: int) -> None:
        """Bound a head whose end does not come: the parser holds it until a header is whole.

        The read in which the message began is not counted: earlier messages may share it.
        """
        self._read_bytes = 0 if self._read_bytes is None else self._read_bytes + read_bytes
        if self._read_bytes > self._head_max_bytes:
            raise self._head_too_large()

    def _head_too_large(self) -> Rejected:
        return Rejected(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            "head_too_large",
            f"headers: over {self._head_max_bytes} bytes; send fewer or shorter ones",
        )

    def _body_too_large(self) -> Rejected:
        return Rejected(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "body_too_large",
            f"body: over {self._body_max_bytes} bytes; send less, or raise the gateway's limit",
        )

    # httptools callbacks

    def on_message_begin(self) -> None:
        self.in_message = True
        self._url = b""
        self._headers = []
        self._head = self._read_bytes = None
        self._body = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:  # else a trailer, which is not passed on
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        version = parser.get_http_version()
        head = self._head = read_request_head(
            parser.get_method(),
            self._url,
            b"1.1" if version == "1.1" else version.encode(),
            headers=self._headers,
            replaced=self._replaced,
            callers=self._callers,
        )
        if head.bytes_held > self._head_max_bytes:
            raise self._head_too_large()
        length = head.special.get(b"content-length")
        if length is not None and int(length) > self._body_max_bytes:
            raise self._body_too_large()
        self._held = self._budget.open()
        if length is not None:
            self._held.grow(int(length))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > self._body_max_bytes:
            raise self._body_too_large()
        self._held.grow(self._body_bytes)

    def on_message_complete(self) -> None:
        assert self._head is not None
        self.in_message = False
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        keep_alive = self._parser.should_keep_alive()
        self._items.append(HttpRequest(self._head, body, keep_alive, self._held))
        self._held = self._budget.open()


QUEUE_MAX = 4
CUT_SHORT_S = 10.0
"""How long a client has to read what it was sent of an answer that stops in its middle."""
LINGER_S = 2.0
"""How long a refused client's input is read and dropped, so that it can read its answer."""

_CLOSE_LINE = b"connection: close\r\n"


def _log_fault(error: Exception) -> None:
    log.error("a client's connection: a fault of the gateway's", exc_info=error)


class Answering(Protocol):
    """An answering is whatever has one request answered (an exchange)."""

    def start(self) -> None:
        """Begin to answer the request."""
        ...

    def abort(self) -> None:
        """End without an answer, as the client is gone."""
        ...

    def pause(self) -> None:
        """Stop reading the answer: the client reads too slowly."""
        ...

    def resume(self) -> None:
        """Go on reading the answer."""
        ...

    def stop(self) -> None:
        """End as the gateway ends, with a word to the client where it can be said."""
        ...


class ClientPort(Protocol):
    """The port is what a client connection asks of the gateway."""

    draining: bool
    bodies: BodyBudget

    @property
    def limits(self) -> ClientLimits:
        """`limits` are what clients may take, in bytes and seconds."""
        ...

    @property
    def workers_up(self) -> int:
        """`workers_up` counts the workers that may be chosen."""
        ...

    def came(self, client: ClientConnection) -> None:
        """Hear that a client is inside."""
        ...

    def left(self, client: ClientConnection) -> None:
        """Hear that a client is gone."""
        ...

    def now(self) -> float:
        """Return the event loop's time, in seconds."""
        ...

    def next_request_id(self) -> bytes:
        """Make an id for a request that came without one."""
        ...

    def models(self) -> Models:
        """Return what the workers that are up serve, together."""
        ...

    def rejected(self, rejected: Rejected) -> None:
        """Count a request that is told no."""
        ...

    def begin(self, client: ClientConnection, request: HttpRequest) -> Answering:
        """Make what answers the request; it is not started."""
        ...


class ClientConnection(asyncio.Protocol):
    """A client connection owns one client's socket, the queue of its requests and the order of
    answers."""

    def __init__(self, gateway: ClientPort) -> None:
        self.connection_line = b""
        """The Connection header line of the present answer."""
        self._gateway = gateway
        self._reader = RequestReader(gateway.limits, gateway.bodies)
        self._transport: asyncio.Transport | None = None
        self._queue: deque[HttpRequest | Rejected] = deque()
        self._exchange: Answering | None = None
        self._held: HeldBody | None = None
        """What the body of the request that is being answered holds."""
        self._waiting_since_s = gateway.now()
        self._reading = self._writable = True
        self._closing = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._gateway.came(self)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        try:
            self._take(data)
        except Exception as error:  # noqa: BLE001 - a protocol callback
            self._failed(error)

    def _take(self, data: bytes) -> None:
        """Take in what the client sent, and answer what is whole of it."""
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
        self._reader.close()
        self._drop_queue()
        self._gateway.left(self)
        exchange = self._exchange
        self._answered()
        if exchange is not None:
            try:
                exchange.abort()
            except Exception as error:  # noqa: BLE001 - a protocol callback
                _log_fault(error)

    def pause_writing(self) -> None:
        self._writable = False
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self._writable = True
        if self._exchange is not None:
            self._exchange.resume()
        else:
            self._go_on()

    # The request queue

    def _go_on(self) -> None:
        """Start the next request, in a callback of its own."""
        try:
            self._advance()
        except Exception as error:  # noqa: BLE001 - a callback of the event loop
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """End the connection after a fault of ours, with an answer where none is under way."""
        _log_fault(error)
        if self._exchange is None and not self._closing:
            self._refuse_and_linger(fault())
        else:
            self.answer_cut_off()

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
            if head.target == HEALTH:
                item.held.let_go()
                self._answer_health()
                continue
            path = head.target.partition(b"?")[0]
            if head.method == b"GET" and (path + b"/").startswith(b"/v1/models/"):
                item.held.let_go()
                self._answer_models(path)
                continue
            self._exchange, self._held = self._gateway.begin(self, item), item.held
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
        up = self._gateway.workers_up
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
        """Answer with the union of what the workers serve, without asking a worker."""
        gateway = self._gateway
        request_id = gateway.next_request_id()
        if not gateway.workers_up:
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
        self._gateway.rejected(rejected)
        self.write(error_reply(rejected, request_id=request_id, connection=b"close"))
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
        self._drop_queue()
        self._balance_reading()
        self._closing = True
        asyncio.get_running_loop().call_later(LINGER_S, self._close)

    # What an exchange does

    def write(self, data: bytes) -> None:
        """Send bytes of an answer to the client."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def close_after_answer(self) -> None:
        """Say `connection: close`: the present answer can only end by closing the connection."""
        self.connection_line = _CLOSE_LINE

    def answer_rejected(self, rejected: Rejected, request_id: bytes) -> None:
        """Answer with an error of the gateway's own: nothing was sent to a worker, or nothing came
        back."""
        self._gateway.rejected(rejected)
        connection = b"close" if self.connection_line else b"keep-alive"
        self.write(error_reply(rejected, request_id=request_id, connection=connection))
        self.answer_complete()

    def answer_complete(self) -> None:
        """Go on to the next request, or close, as the answer is written."""
        self._answered()
        self._waiting_since_s = self._gateway.now()
        if self.connection_line:
            self._close()
        elif self._queue:
            asyncio.get_running_loop().call_soon(self._go_on)

    def answer_cut_off(self, last: bytes = b"") -> None:
        """Close the connection without the end of the present answer, so that the client can see
        that it is short; behind `last`, where that can tell it why."""
        self.write(last)
        self._answered()
        self._closing = True
        transport = self._transport
        if transport is None:
            return
        if last:
            transport.close()
            asyncio.get_running_loop().call_later(CUT_SHORT_S, transport.abort)
        else:
            transport.abort()

    def _answered(self) -> None:
        """Note that no request is being answered, and let its body go."""
        self._exchange = None
        if self._held is not None:
            self._held.let_go()
            self._held = None

    def _drop_queue(self) -> None:
        """Forget the requests that wait behind the present one."""
        for item in self._queue:
            if isinstance(item, HttpRequest):
                item.held.let_go()
        self._queue.clear()

    # What the service does

    def stop(self) -> None:
        """Close the connection, as the gateway ends; whose answer is under way hears it, if it can
        be said."""
        if self._exchange is not None:
            self._exchange.stop()
        self._close()

    def _close(self) -> None:
        """Close the connection, whatever is under way."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def expire(self, now: float, *, idle_timeout_s: float) -> None:
        """Close when the client has kept us waiting for a request too long."""
        if self._exchange is not None or self._closing:
            return
        limits, reader, waited_s = self._gateway.limits, self._reader, now - self._waiting_since_s
        if not reader.in_message:
            if waited_s > idle_timeout_s:
                self._close()
        elif waited_s > (limits.head_timeout_s if reader.in_head else limits.body_timeout_s):
            self._refuse_and_linger(
                Rejected(HTTPStatus.REQUEST_TIMEOUT, "timeout", "request: came in too slowly")
            )
