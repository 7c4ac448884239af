"""One connection to a worker: a request out, its answer in, then back to the pool.

Bytes of the body are handed on as they came, chunk frames and all; never bytes past the end.

    IDLE ─send─> WAITING ─head─> BODY ─end─> IDLE (kept) | CLOSED
                    └──────lost───┴──────lost──────────────> CLOSED
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

from ownerserve.gateway.http.answers import AnswerReader, Malformed
from ownerserve.gateway.http.heads import ResponseHead
from ownerserve.kv.units import KIB
from ownerserve.router.messages import Failure

if TYPE_CHECKING:
    from ownerserve.gateway.http.pool import WorkerPool

_JOIN_MAX_BYTES = 16 * KIB
"""Below this, copying a body behind its head is cheaper than a second buffer."""


class Sink(Protocol):
    """Who asked: told of the answer as it comes. After an end of any kind: nothing more."""

    def answer_begin(self, head: ResponseHead, first: bytes) -> None: ...
    def answer_bytes(self, data: bytes) -> None: ...
    def answer_end(self, tail: bytes) -> None: ...

    def answer_failed(self, failure: Failure) -> None:
        """Nothing of an answer has come; another worker may be asked."""

    def answer_broken(self) -> None:
        """The answer stops in its middle."""


class UpstreamConnection(asyncio.Protocol):
    """A connection to one worker; carries one exchange at a time."""

    def __init__(self, pool: WorkerPool) -> None:
        self.kept = False
        """Whether it had lain idle before its present exchange."""
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._reader = AnswerReader()
        self._sink: Sink | None = None
        self._paused = False
        self._was_silent = False
        """Whether it was asked to give up, and has heard nothing since."""

    # What an exchange may do

    def send(self, head: bytes, body: bytes, *, method: bytes, sink: Sink) -> None:
        """Send a request and report the answer to `sink`."""
        self._sink = sink
        self._was_silent = False
        self._reader.begin(method)
        transport = self._transport
        if transport is None or transport.is_closing():  # the loop has not told us yet
            self._lose(Failure.CLOSED)
        elif len(body) <= _JOIN_MAX_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def abort(self) -> None:
        """Hang up; the worker sees it and stops. The sink hears nothing more."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """The client is slow: stop reading, so that the worker is slowed too."""
        transport = self._transport
        if not self._paused and transport is not None and not transport.is_closing():
            self._paused = True
            transport.pause_reading()

    def resume(self) -> None:
        transport = self._transport
        if self._paused and transport is not None and not transport.is_closing():
            self._paused = False
            transport.resume_reading()

    def payload(self) -> bytes:
        """Body bytes of the last read, without chunk frames."""
        return self._reader.payload

    def give_up_if_silent(self) -> None:
        """The worker is out of reach: end the wait, unless something has come since this was last
        called, or the client is who keeps us waiting."""
        if self._sink is None or self._paused:
            return
        if self._was_silent:
            self._lose(Failure.SILENT)
        else:
            self._was_silent = True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.begun(self)

    def data_received(self, data: bytes) -> None:
        sink, reader = self._sink, self._reader
        self._was_silent = False
        if sink is None:  # a worker speaks out of turn: what follows can't be trusted
            self.abort()
            return
        try:
            if reader.head is not None:
                reader.feed_body(data)
                sink.answer_bytes(data)
            else:
                begun = reader.feed_head(data)
                if begun is not None:
                    sink.answer_begin(*begun)
        except Malformed:
            self._lose(Failure.MALFORMED)
            return
        if reader.complete and self._sink is sink:
            self._end(sink)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        sink, head = self._sink, self._reader.head
        if sink is None:
            return
        if head is not None and head.ends_by_close and exc is None:
            self._end(sink)
        else:
            self._lose(Failure.CLOSED)

    def _end(self, sink: Sink) -> None:
        """The answer is whole: free the connection first, so that it can be used at once."""
        reader = self._reader
        self._sink = None
        transport = self._transport
        if reader.keep_alive and transport is not None and not transport.is_closing():
            self.resume()
            self._pool.give_back(self)
        else:
            self.close()
        sink.answer_end(reader.tail)

    def _lose(self, failure: Failure) -> None:
        """The answer will not come, or not to its end."""
        sink, reader = self._sink, self._reader
        silent = failure is Failure.CLOSED and not reader.pending
        self.abort()
        if sink is None:
            return
        if reader.head is not None:
            sink.answer_broken()
        else:
            sink.answer_failed(Failure.STALE if silent and self.kept else failure)
