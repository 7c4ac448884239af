"""The connections to workers send a request out, take its answer in, and go back to the pool.

Bytes of the body are handed on as they came, chunk frames and all; never bytes past the end. The
reader (AnswerReader) only watches for a body's end and shows its payload (without chunk frames), of
which the last bytes are kept for the usage scan. What comes as one whole chunk, as events do,
passes its parser by. A pool owns who is idle and who is not; the last
connection used is the first one taken: it is the least likely to be stale.

    IDLE ─send─> WAITING ─head─> BODY ─end─> IDLE (kept) | CLOSED
                    └──────lost───┴──────lost──────────────> CLOSED

The head of a stream of events is held until the first bytes of its body: engines send it before
they compute, and while nothing else has come another worker can be asked.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Protocol, cast

import httptools

from ownerserve.gateway.http.access import Access, Address, connected
from ownerserve.gateway.http.door import is_ours
from ownerserve.gateway.http.heads import Header, ResponseHead, read_response_head
from ownerserve.gateway.http.payload import AnswerPayload
from ownerserve.kv.units import KIB
from ownerserve.router.messages import Failure

log = logging.getLogger("ownerserve.gateway")

_HEAD_END = b"\r\n\r\n"
_INTERIM = b"HTTP/1.1 1"
_HEAD_MAX_BYTES = 64 * KIB
_LINE_END = b"\r\n"
_CHUNK_MAX_BYTES = 4 * KIB
_SIZE_LINES = {
    size + len(b"%x" % size) + 4: b"%x\r\n" % size for size in range(1, _CHUNK_MAX_BYTES)
}
"""What a whole chunk begins with, frame and all, by its length."""


class Malformed(Exception):
    """The worker's bytes are no answer, or more than one."""


class AnswerReader:
    """The reader parses one answer after another; `begin` stands between two."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.begin(b"")

    def begin(self, method: bytes) -> None:
        """Begin the answer to a request of `method`, to which the next bytes belong."""
        self.head: ResponseHead | None = None
        self._is_between_chunks = False
        """Whether the parser stands where a chunk begins, so that a whole one may pass it by."""
        self.complete = self.keep_alive = False
        self.in_chunk = False
        """Whether the last read ended amid a chunk."""
        self.pending = b""
        """Bytes of a head that is not whole yet."""
        self._bodiless = method == b"HEAD"
        self._overrun = False
        self._phrase = b""
        self._headers: list[Header] = []
        self.payload = AnswerPayload()

    def feed_head(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """Return None until the head is whole, then the head and the body bytes that came after it.

        Raises Malformed.
        """
        data = self.pending + data if self.pending else data
        while (end := data.find(_HEAD_END)) >= 0:
            end += len(_HEAD_END)
            if not data.startswith(_INTERIM):
                break
            self._feed(data[:end])  # 100, 103: not for the client
            data, self._headers, self.complete = data[end:], [], False
        else:
            self.pending = data
            if len(data) > _HEAD_MAX_BYTES:
                raise Malformed("a worker's head is too large")
            return None
        self._feed(data[:end] if self._bodiless else data)
        status = self._parser.get_status_code()
        self.head = read_response_head(status, self._phrase, self._headers)
        self._look_where(data)
        if self._bodiless:
            self.complete, self.keep_alive = True, False
            return self.head, b""
        return self.head, data[end:]

    def feed_body(self, data: bytes) -> None:
        """Parse body bytes, to be passed on as they are when this returns. Raises Malformed."""
        self.payload.parts.clear()
        self._feed(data)
        self._look_where(data)

    def skip(self, data: bytes) -> bool:
        """Take in body bytes that are one whole chunk and stand where one begins, and return True;
        else do nothing. A chunk whose size is not written as most write it is the parser's."""
        if not self._is_between_chunks:
            return False
        line = _SIZE_LINES.get(len(data))
        if line is None or not data.startswith(line) or not data.endswith(_LINE_END):
            return False
        part, payload = data[len(line) : -2], self.payload
        payload.parts = [part]
        payload.take(part)
        return True

    def _look_where(self, data: bytes) -> None:
        """Look whether the parser stands between two chunks, as `data` was parsed."""
        head = self.head
        self._is_between_chunks = (
            head is not None
            and head.chunked
            and data[-2:] == _LINE_END
            and not (self.in_chunk or self.complete)
        )

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Malformed(str(error)) from error
        if self._overrun:
            raise Malformed("a worker sent more than its answer")
        for part in self.payload.parts:
            self.payload.take(part)

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self.complete:
            self._overrun = True

    def on_status(self, phrase: bytes) -> None:
        self._phrase = phrase

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.payload.parts.append(body)

    def on_chunk_header(self) -> None:
        self.in_chunk = True

    def on_chunk_complete(self) -> None:
        self.in_chunk = False

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep_alive = self._parser.should_keep_alive()  # the parser knows only now


RECEIVE_BUFFER_BYTES = 64 * KIB
"""The kernel's for each connection: so much more than a slow client's own buffer may come at once,
and is held until it reads. Left to itself the kernel takes megabytes."""
_JOIN_MAX_BYTES = 16 * KIB
"""Below this, copying a body behind its head is cheaper than a second buffer."""


class BodySink(Protocol):
    """A body sink gets an answer's body as it comes. After an end of any kind it hears nothing
    more."""

    def answer_bytes(self, data: bytes) -> None:
        """Take in a part of the body."""
        ...

    def answer_end(self, tail: bytes) -> None:
        """Take in the body's end; `tail` are its last bytes."""
        ...

    def answer_broken(self, failure: Failure) -> None:
        """Hear that the answer stops in its middle, and what went wrong."""
        ...

    def answer_fault(self, error: Exception) -> None:
        """Hear that what came could not be dealt with: a fault of the gateway's own."""
        ...


class HeadSink(Protocol):
    """A head sink waits for an answer to begin."""

    def answer_begin(self, head: ResponseHead, first: bytes) -> BodySink:
        """Take the head, and `first` of the body behind it; return the sink for the rest."""
        ...

    def answer_failed(self, failure: Failure) -> None:
        """Hear that nothing of an answer has come; another worker may be asked."""
        ...

    def answer_fault(self, error: Exception) -> None:
        """Hear that what came could not be dealt with: a fault of the gateway's own."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """An upstream connection leads to one worker and carries one exchange at a time."""

    def __init__(self, pool: WorkerPool) -> None:
        self.kept = False
        """Whether it had lain idle before its present exchange."""
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self.reader = AnswerReader()
        """What came of the present answer; who is not this connection only reads it."""
        self._awaiting: HeadSink | None = None
        self._relaying: BodySink | None = None
        self._opened: ResponseHead | None = None
        """The head of a stream of events of which no event has come."""
        self._paused = False
        self._was_silent = False
        """Whether it was asked to give up, and has heard nothing since."""
        self._has_heard = False
        """Whether it has heard something since it was last looked at."""
        self._patience_s = 0.0
        self._quiet_since_s = 0.0

    # What an exchange may do

    def send(
        self,
        head: bytes,
        body: Sequence[bytes | memoryview],
        *,
        method: bytes,
        sink: HeadSink,
        patience_s: float,
    ) -> None:
        """Send a request, its body in pieces, and report the answer to `sink`; who hears nothing
        for `patience_s` gives it up (`look`)."""
        self._awaiting, self._relaying, self._opened = sink, None, None
        self._was_silent = False
        self._has_heard, self._patience_s = True, patience_s
        self.reader.begin(method)
        transport = self._transport
        if transport is None or transport.is_closing():  # the loop has not told us yet
            self._lose(Failure.CLOSED)
        elif sum(map(len, body)) <= _JOIN_MAX_BYTES:
            transport.write(b"".join((head, *body)))
        else:
            transport.writelines((head, *body))

    def abort(self) -> None:
        """Hang up; the worker sees it and stops. The sink hears nothing more."""
        self._awaiting = self._relaying = None
        if self._transport is not None:
            self._transport.abort()

    def hand_to(self, sink: BodySink) -> None:
        """Report the rest of the answer, which has begun, to another sink."""
        self._relaying = sink

    def pause(self) -> None:
        """Stop reading, as the client is slow, so that the worker is slowed too."""
        transport = self._transport
        if not self._paused and transport is not None and not transport.is_closing():
            self._paused = True
            transport.pause_reading()

    def resume(self) -> None:
        """Go on reading the answer."""
        transport = self._transport
        if self._paused and transport is not None and not transport.is_closing():
            self._paused = False
            transport.resume_reading()

    def look(self, now_s: float) -> None:
        """End the wait for a worker that is up and has sent nothing of the answer for too long,
        unless the client is who keeps us waiting."""
        if self._awaiting is None and self._relaying is None:
            return
        if self._has_heard or self._paused:
            self._has_heard, self._quiet_since_s = False, now_s
        elif now_s - self._quiet_since_s > self._patience_s:
            self._lose(Failure.LATE)

    def give_up_if_silent(self) -> None:
        """End the wait for a worker that is out of reach, unless something has come since this was
        last called, or the client is who keeps us waiting."""
        is_idle = self._awaiting is None and self._relaying is None
        if is_idle or self._paused:
            return
        if self._was_silent:
            self._lose(Failure.SILENT)
        else:
            self._was_silent = True

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def bound_receiving(self) -> None:
        """Let the kernel take little of an answer ahead of its client."""
        if self._transport is not None:
            self._transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES
            )

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.begun(self)

    def data_received(self, data: bytes) -> None:
        body = self._relaying
        sink = body or self._awaiting
        try:
            if body is not None and self.reader.skip(data):
                self._was_silent, self._has_heard = False, True
                body.answer_bytes(data)
            else:
                self._take(data)
        except Exception as error:  # noqa: BLE001 - a protocol callback: the request's root logs it
            self._failed(sink, error)

    def connection_lost(self, exc: Exception | None) -> None:
        sink = self._relaying or self._awaiting
        try:
            self._lost(exc)
        except Exception as error:  # noqa: BLE001 - a protocol callback: the request's root logs it
            self._failed(sink, error)

    def _failed(self, sink: BodySink | HeadSink | None, error: Exception) -> None:
        """Hang up after a fault, which ends the exchange that met it and no other."""
        self.abort()
        if sink is not None:
            sink.answer_fault(error)
        else:
            log.error("a connection to %s: a fault", self._pool.address, exc_info=error)

    def _take(self, data: bytes) -> None:
        """Take in what the worker sent."""
        reader, body = self.reader, self._relaying
        self._was_silent = False
        self._has_heard = True
        try:
            if body is not None:
                reader.feed_body(data)
                body.answer_bytes(data)
                reader.payload.parts.clear()  # the client may be long in coming for more
            elif self._awaiting is None:  # a worker that speaks out of turn can't be trusted
                self.abort()
                return
            else:
                begun = self._begun(data)
                if begun is None:
                    return
                awaiting = self._awaiting
                body = awaiting.answer_begin(*begun)
                if self._awaiting is not awaiting:
                    return
                self._awaiting, self._relaying = None, body
                reader.payload.parts.clear()
        except Malformed:
            self._lose(Failure.MALFORMED)
            return
        if reader.complete and self._relaying is body:
            self._end(body)

    def _begun(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """Return the answer's head and what came of its body, once the answer has begun. Raises
        Malformed."""
        reader, head = self.reader, self._opened
        if head is not None:
            reader.feed_body(data)
            self._opened = None
            return head, data
        begun = reader.feed_head(data)
        if begun is not None and begun[0].has_events and not (begun[1] or reader.complete):
            self._opened = begun[0]
            return None
        return begun

    def _lost(self, exc: Exception | None) -> None:
        """End what is under way: the connection is gone."""
        self._transport = None
        self._pool.forget(self)
        body, head = self._relaying, self.reader.head
        if body is not None and head is not None and head.ends_by_close and exc is None:
            self._end(body)
        else:
            self._lose(Failure.CLOSED)

    def _end(self, body: BodySink) -> None:
        """Report the end of a whole answer; the connection is freed first, so that it can be used
        at once."""
        reader = self.reader
        tail, keeps = reader.payload.tail, reader.keep_alive
        reader.begin(b"")  # an idle connection keeps nothing of its last answer
        self._relaying = None
        transport = self._transport
        if keeps and transport is not None and not transport.is_closing():
            self.resume()
            self._pool.give_back(self)
        else:
            self.close()
        body.answer_end(tail)

    def _lose(self, failure: Failure) -> None:
        """Hang up and report that the answer will not come, or not to its end."""
        awaiting, body, reader = self._awaiting, self._relaying, self.reader
        silent = failure is Failure.CLOSED and not reader.pending and reader.head is None
        self.abort()
        if body is not None:
            body.answer_broken(failure)
        elif awaiting is not None:
            awaiting.answer_failed(Failure.STALE if silent and self.kept else failure)


IDLE_MAX = 1024
SHORTAGE_S = 0.05
"""How long nothing is tried for want of a descriptor or the like."""


class WorkerPool:
    """A pool holds the connections to one worker: who is idle and who is not."""

    def __init__(
        self,
        address: Address,
        access: Access,
        *,
        connect_timeout_s: float,
        idle_max: int = IDLE_MAX,
    ) -> None:
        self.address = address
        self.opened = 0
        self.reused = 0
        self._tls = access.tls
        self._connect_timeout_s = connect_timeout_s
        self._idle_max = idle_max
        self._idle: dict[UpstreamConnection, None] = {}
        self._busy: set[UpstreamConnection] = set()

    @property
    def idle(self) -> int:
        """Return how many connections wait for a request."""
        return len(self._idle)

    def take(self) -> UpstreamConnection | None:
        """Take the idle connection that was used last; None when there is none."""
        if not self._idle:
            return None
        connection, _ = self._idle.popitem()
        self._busy.add(connection)
        self.reused += 1
        return connection

    async def connect(self) -> UpstreamConnection:
        """Open a new connection. Raises OSError (TimeoutError among them) when there is none.

        For want of something of the gateway's own it waits until there may be one again.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._connect_timeout_s
        while True:
            try:
                return await self.open()
            except OSError as error:
                if not is_ours(error) or loop.time() + SHORTAGE_S > until_s:
                    raise
            await asyncio.sleep(SHORTAGE_S)

    async def open(self) -> UpstreamConnection:
        """Open a new connection at once. Raises OSError (TimeoutError among them)."""
        connection = UpstreamConnection(self)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await connected(self.address, self._tls, lambda: connection)
        except BaseException:
            connection.abort()  # cancelled just as it came about: nobody else would close it
            raise
        connection.bound_receiving()
        self.opened += 1
        return connection

    def begun(self, connection: UpstreamConnection) -> None:
        """Count `connection`, which is open, as busy for whoever had it made."""
        self._busy.add(connection)

    def give_back(self, connection: UpstreamConnection) -> None:
        """Keep `connection`, which has finished an exchange and may carry another, as idle; close
        it beyond what may be kept."""
        self._busy.discard(connection)
        if len(self._idle) >= self._idle_max:
            connection.close()
            return
        connection.kept = True
        self._idle[connection] = None

    def forget(self, connection: UpstreamConnection) -> None:
        """Forget `connection`, which is closed."""
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def found_out(self) -> None:
        """End the waits at a worker that a probe found out of reach.

        Only who has heard nothing since the last such probe waits no longer.
        """
        for connection in list(self._busy):
            connection.give_up_if_silent()

    def look(self, now_s: float) -> None:
        """End the waits that are over, at a worker that is up."""
        for connection in list(self._busy):
            connection.look(now_s)

    def close_idle(self) -> None:
        """Close the connections that wait for a request."""
        for connection in list(self._idle):
            connection.close()
        self._idle.clear()
