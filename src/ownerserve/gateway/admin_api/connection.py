"""A connection to the admin port takes a bounded part of the gateway, whoever is at its other end:
nobody has shown a key before a head is whole.

Owns the bounds: how many connections there are, how long a head may take, and how long it may be.
All else of HTTP is uvicorn's.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ownerserve.gateway.http.door import ADMIN_CLIENTS

HEAD_S = 10.0
"""How long a connection may stand open before a request's head is whole."""
HEAD_BYTES_MAX = 64 * 1024
HEAD_END = b"\r\n\r\n"


class AdminConnection(HttpToolsProtocol):
    """An admin connection is closed where there are ADMIN_CLIENTS already, or its head does not
    come."""

    _awaiting: asyncio.TimerHandle | None = None
    """Ends the wait for a head; None: none is awaited."""
    _head_bytes = 0
    _head_tail = b""
    """The last bytes that came of a head, in which its end may have begun."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let one in more, if there is room."""
        super().connection_made(transport)
        if len(self.connections) > ADMIN_CLIENTS:
            transport.abort()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._await_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in what came, unless it is too much of a head."""
        if self._awaiting is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        if self._awaiting is not None:
            seen = self._head_tail + data
            end = seen.find(HEAD_END)  # behind it comes a body
            self._head_bytes += len(data) if end < 0 else end
            self._head_tail = seen[-3:]
            if self._head_bytes > HEAD_BYTES_MAX:
                self.transport.abort()
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        self._await_nothing()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_bytes, self._head_tail = 0, b""
        self._awaiting = self.loop.call_later(HEAD_S, self.transport.abort)

    def _await_nothing(self) -> None:
        if self._awaiting is not None:
            self._awaiting.cancel()
            self._awaiting = None
