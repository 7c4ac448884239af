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
from collections.abc import Callable, Set
from http import HTTPStatus
from typing import Protocol, cast

import httptools
import msgspec

from ownerserve.gateway.http.bodies import BodyBudget, HeldBody
from ownerserve.gateway.http.callers import Callers
from ownerserve.gateway.http.handing import Elsewhere, Given, Handing, KeptInput
from ownerserve.gateway.http.heads import (
    HEALTH,
    Header,
    RequestHead,
    fit_request_id,
    read_request_head,
)
from ownerserve.gateway.http.known_heads import KnownHeads, head_bytes
from ownerserve.gateway.http.model_list import Models, model_answer
from ownerserve.gateway.http.replies import (
    RefusedRequest,
    Rejected,
    error_reply,
    fault,
    refused,
    reply,
)
from ownerserve.gateway.http.trace_context import TRACE_HEADERS
from ownerserve.router.messages import Refusal

log = logging.getLogger("ownerserve.gateway")


class HttpRequest(msgspec.Struct, frozen=True):
    """A request is whole, as the client sent it. `keep_alive`: another may follow. `held`: what its
    body takes of the gateway's memory. `is_here`: it is known to be this process's to answer."""

    head: RequestHead
    body: bytes
    keep_alive: bool
    held: HeldBody
    is_here: bool = False


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
    known: KnownHeads = msgspec.field(default_factory=KnownHeads)
    """The heads that passed all of this before."""


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
        self.method = self.target = b""
        """What the newest request asks for, as far as it was read."""
        self._headers: list[Header] = []
        self.head: RequestHead | None = None
        """The head of the message that is being read, once it is whole."""
        self._read_bytes: int | None = None
        self._body: list[bytes] = []
        self.body_bytes = 0
        self.is_here = False
        """Whether the message that is being read is known to be this process's to answer."""
        self.next_is_here = False
        """Whether another process has said so of the next message."""
        self._missing_bytes = 0
        """What is missing of a body behind a known head, which the parser does not see."""
        self._unknown: bytes | None = None
        """The bytes of a head that may be known from now on."""
        self._known = limits.known
        self._budget = budget
        self._held = budget.open()

    def refused(self, next_id: Callable[[], bytes], client: str | None) -> RefusedRequest:
        """Return what was read of the newest request, which is refused: of its headers those of its
        trace alone, where not all have come or fit. `next_id` makes an id where it has none."""
        said = {name.lower(): value for name, value in self._headers}
        head = self.head
        if head is not None:
            special, tenant = head.special, head.caller.tenant
        else:
            special, tenant = {name: said[name] for name in TRACE_HEADERS if name in said}, None
        given = [value for name, value in self._headers if name.lower() == b"x-request-id"]
        is_told = self.in_message and len(given) == 1
        request_id = (fit_request_id(given[0]) if is_told else None) or next_id()
        return RefusedRequest(request_id, self.method, self.target, special, client, tenant)

    @property
    def in_head(self) -> bool:
        """`in_head` tells whether a head has begun and is not whole."""
        return self.in_message and self.head is None

    @property
    def awaits_continue(self) -> bool:
        """Whether the client has sent a head and wants to hear that its body is welcome."""
        if not self.in_message or self.head is None or self._body:
            return False
        return self.head.special.get(b"expect", b"").lower() == b"100-continue"

    def feed(self, data: bytes) -> list[HttpRequest | Rejected]:
        """Return the requests that are whole with `data`; a refusal comes last, and nothing after
        it."""
        if self.over:
            return []
        try:
            if self._missing_bytes:
                data = self._take_body(data)
            while data and not self.in_message:
                rest = self._take_known(data)
                if rest is None:
                    break
                data = rest
            if data and not self._missing_bytes:
                self._parser.feed_data(data)
                if self.in_message and self.head is None:
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
        """Read nothing more; the next `feed` gives the refusal."""
        if not self.in_message:  # it has no begin: what was read was of the message before
            self.method = self.target = b""
            self.head, self._headers = None, []
        self.close()
        self._items.append(rejected)

    def close(self) -> None:
        """Read nothing more, and let go what is held of a message that is not whole."""
        self.over = True
        self._body = []
        self._held.let_go()

    def _take_known(self, data: bytes) -> bytes | None:
        """Take in a request, or its begin, whose head is known, and return what follows it; None
        when it is not known. Raises Rejected."""
        found = head_bytes(data)
        if found is None:
            return None
        key, length, body_at = found
        head = self._known.get(key)
        if head is None:
            self._unknown = key
            return None
        self.in_message, self.head = True, head
        self.method, self.target = head.method, head.target
        self._headers = []  # those of the message before are not this one's
        self.body_bytes = 0
        self.is_here, self.next_is_here = self.next_is_here, False
        self._hold(length)
        self._missing_bytes = length
        return self._take_body(data[body_at:])

    def _take_body(self, data: bytes) -> bytes:
        """Take in what is missing of the body, and return what follows it."""
        missing = self._missing_bytes
        part = data if len(data) <= missing else data[:missing]
        self._body.append(part)
        self.body_bytes += len(part)
        self._missing_bytes = missing - len(part)
        if not self._missing_bytes:
            self._is_whole(keep_alive=True)
        return data[missing:]

    def _hold(self, body_bytes: int) -> None:
        """Take memory for a body of that length. Raises Rejected."""
        if body_bytes > self._body_max_bytes:
            raise self._body_too_large()
        self._held = self._budget.open()
        self._held.grow(body_bytes)

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
        self.method = self.target = b""
        self._headers = []
        self.head = self._read_bytes = None
        self._body = []
        self.body_bytes = 0
        self.is_here, self.next_is_here = self.next_is_here, False

    def on_url(self, url: bytes) -> None:
        if not self.target:
            self.method = self._parser.get_method()
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is None:  # else a trailer, which is not passed on
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        version = parser.get_http_version()
        head = self.head = read_request_head(
            self.method,
            self.target,
            b"1.1" if version == "1.1" else version.encode(),
            headers=self._headers,
            replaced=self._replaced,
            callers=self._callers,
        )
        if head.bytes_held > self._head_max_bytes:
            raise self._head_too_large()
        self._hold(int(head.special.get(b"content-length", 0)))
        if self._unknown is not None:
            self._known.learn(self._unknown, head)
            self._unknown = None

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self.body_bytes += len(body)
        if self.body_bytes > self._body_max_bytes:
            raise self._body_too_large()
        self._held.grow(self.body_bytes)

    def on_message_complete(self) -> None:
        self._is_whole(keep_alive=self._parser.should_keep_alive())

    def _is_whole(self, *, keep_alive: bool) -> None:
        """Give the request out that was read."""
        assert self.head is not None
        self.in_message = False
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._items.append(HttpRequest(self.head, body, keep_alive, self._held, self.is_here))
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
        """Begin to answer the request. Raises Elsewhere when another process is to answer it."""
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


class RefusalPort(Protocol):
    """A refusal port is told of requests that are refused before anything of them is decided."""

    def unread(self, request: RefusedRequest, rejected: Rejected) -> None:
        """Tell the operator of one that is told no by what was read of it so far."""
        ...


class ClientPort(Protocol):
    """The port is what a client connection asks of the gateway."""

    draining: bool
    bodies: BodyBudget
    handing: Handing | None
    """Knows which requests are other processes' to answer; None: there are no others."""

    @property
    def refusals(self) -> RefusalPort:
        """`refusals` tell the operator of requests that are told no."""
        ...

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
    answers. `given`: what another process had read of it and not answered."""

    def __init__(self, gateway: ClientPort, given: bytes = b"") -> None:
        self.connection_line = b""
        """The Connection header line of the present answer."""
        self.address: str | None = None
        """The client's own, or its proxy's; None at a Unix socket."""
        self._gateway = gateway
        self._reader = RequestReader(gateway.limits, gateway.bodies)
        self._transport: asyncio.Transport | None = None
        self._queue: deque[HttpRequest | Rejected] = deque()
        self.answering: Answering | None = None
        """What has the present request answered; None: nothing is."""
        self._held: HeldBody | None = None
        """What the body of the request that is being answered holds."""
        self._target = b""
        """What the request that is being answered asks for."""
        self._waiting_since_s = gateway.now()
        self._reading = True
        self.takes_more = True
        """Whether the client reads as fast as it is sent to."""
        self._closing = False
        self._given = given
        self._reader.next_is_here = bool(given)
        self._kept = None if gateway.handing is None else KeptInput()
        self._leaves_for: int | None = None
        """The process that the connection goes to once all is written."""
        self.is_pumped = False
        """Whether another process answers, over bytes that are passed on here."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else None
        self._gateway.came(self)
        if self._given:  # not from in here: the transport does not read yet, and can't be paused
            asyncio.get_running_loop().call_soon(self._take_given)

    def _take_given(self) -> None:
        given, self._given = self._given, b""
        self.data_received(given)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._given:
            self._given += data
            return
        try:
            self._take(data)
        except Exception as error:  # noqa: BLE001 - a protocol callback
            self._failed(error)

    def _take(self, data: bytes) -> None:
        """Take in what the client sent, and answer what is whole of it."""
        reader = self._reader
        idle = not reader.in_message
        if self._kept is not None:
            self._kept.add(data)
        items = reader.feed(data)
        if items:
            self._queue.extend(items)
            self._advance()
        elif reader.in_message and self.answering is None:
            if idle:  # from here on the client is late, not idle
                self._waiting_since_s = self._gateway.now()
            if self._kept is not None and not self._queue and self._goes(self._kept):
                return
            if reader.awaits_continue:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closing = True
        self._reader.close()
        self._drop_queue()
        self._gateway.left(self)
        exchange = self.answering
        self._answered()
        if exchange is not None:
            try:
                exchange.abort()
            except Exception as error:  # noqa: BLE001 - a protocol callback
                _log_fault(error)

    def pause_writing(self) -> None:
        self.takes_more = False
        if self.answering is not None:
            self.answering.pause()

    def resume_writing(self) -> None:
        self.takes_more = True
        if self._leaves_for is not None:
            self._leave(self._leaves_for)
        elif self.answering is not None:
            self.answering.resume()
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
        if self.answering is None and not self._closing:
            self._refuse_and_linger(fault())
        else:
            self.answer_cut_off()

    def _advance(self) -> None:
        """Start the next request when none is being answered; keep the queue short."""
        queue = self._queue
        while queue and self.answering is None and self.takes_more and not self._closing:
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
            self._target = head.target
            if head.target == HEALTH:
                item.held.let_go()
                self._answer_health(self._id_of(head))
                self._stays()
                continue
            path = head.target.partition(b"?")[0]
            if head.method == b"GET" and (path + b"/").startswith(b"/v1/models/"):
                item.held.let_go()
                self._answer_models(path, self._id_of(head))
                self._stays()
                continue
            self.answering, self._held = self._gateway.begin(self, item), item.held
            try:
                self.answering.start()
            except Elsewhere as elsewhere:
                self._hand_over(elsewhere.process)
                return
            self._stays()
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

    # Whose request it is

    def _stays(self) -> None:
        """Let the input of the request go that is answered here."""
        if self._kept is None:
            return
        if self._queue or self._reader.in_message:
            self._kept.drop_first()
        else:
            self._kept.drop_only()

    def _goes(self, kept: KeptInput) -> bool:
        """Return whether the connection goes to another process, by the head of a request whose
        body is to come."""
        reader, handing = self._reader, self._gateway.handing
        if reader.head is None or reader.is_here or handing is None:
            return False
        try:
            length = reader.head.special.get(b"content-length")
            if handing.is_here(reader.head) and length is not None:
                reader.is_here = True
                kept.skip(int(length) - reader.body_bytes)
        except Elsewhere as elsewhere:
            self._hand_over(elsewhere.process)
            return True
        return False

    def _hand_over(self, process: int) -> None:
        """Have another process answer what is read and all that comes; not before the client has
        all that was written to it."""
        transport = self._transport
        self._closing = True
        self._answered()
        self._drop_queue()
        self._reader.close()
        if transport is None or transport.is_closing():
            return
        if self._reading:
            self._reading = False
            transport.pause_reading()
        self._leaves_for = process
        self._waiting_since_s = self._gateway.now()
        # Under TLS the transport stays, and its limits: bytes are passed on behind what is written.
        is_kept = transport.get_extra_info("sslcontext") is not None
        if transport.get_write_buffer_size() and not is_kept:
            transport.set_write_buffer_limits(0)
        else:
            self._leave(process)

    def _leave(self, process: int) -> None:
        transport, handing, kept = self._transport, self._gateway.handing, self._kept
        assert transport is not None and handing is not None and kept is not None
        try:
            given = handing.give(process, transport, kept.whole())
        except Rejected as rejected:
            self._leaves_for = None
            self._refuse_and_linger(rejected)
            return
        self._leaves_for = None
        if given is Given.WHOLE:
            transport.abort()
        else:
            self.is_pumped = True

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _id_of(self, head: RequestHead) -> bytes:
        """Return the request's id: the client's own, or a new one."""
        return head.request_id or self._gateway.next_request_id()

    def _answer_health(self, request_id: bytes) -> None:
        up, is_ending = self._gateway.workers_up, self._gateway.draining
        is_well = up and not is_ending
        self.write(
            reply(
                HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE,
                b'{"workers_up":%d%b}' % (up, b',"draining":true' if is_ending else b""),
                request_id=request_id,
                connection=b"close" if self.connection_line else b"keep-alive",
            )
        )
        self.answer_complete()

    def _answer_models(self, path: bytes, request_id: bytes) -> None:
        """Answer with the union of what the workers serve, without asking a worker."""
        gateway = self._gateway
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
        gateway = self._gateway
        request = self._reader.refused(gateway.next_request_id, self.address)
        gateway.rejected(rejected)
        gateway.refusals.unread(request, rejected)
        target, request_id = request.target, request.request_id
        self.write(error_reply(rejected, target, request_id=request_id, connection=b"close"))
        transport = self._transport
        if transport is not None and not transport.is_closing() and transport.can_write_eof():
            transport.write_eof()
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
        self.write(
            error_reply(rejected, self._target, request_id=request_id, connection=connection)
        )
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
        self.answering = None
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
        if self.answering is not None:
            self.answering.stop()
        self._close()

    def _close(self) -> None:
        """Close the connection, whatever is under way."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def expire(self, now: float, *, idle_timeout_s: float) -> None:
        """Close when the client has kept us waiting for a request too long."""
        limits, reader, waited_s = self._gateway.limits, self._reader, now - self._waiting_since_s
        if self._leaves_for is not None and waited_s > limits.body_timeout_s:
            self._abort()
        if self.answering is not None or self._closing:
            return
        if not reader.in_message:
            if waited_s > idle_timeout_s:
                self._close()
        elif waited_s > (limits.head_timeout_s if reader.in_head else limits.body_timeout_s):
            self._refuse_and_linger(
                Rejected(HTTPStatus.REQUEST_TIMEOUT, "timeout", "request: came in too slowly")
            )
