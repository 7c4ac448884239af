"""A gateway's part is what one of its processes has of the others: where sessions are at home, and
how a connection gets there.

    ClientConnection ── whose is it? ──> SessionHanding ── Asking, Homes
                     ── take it ───────>                ── Post ──> the other process's mailbox
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol, cast

import msgspec

from ownerserve.gateway.http.handing import Given, Handing
from ownerserve.gateway.http.heads import RequestHead
from ownerserve.gateway.http.pump import pump
from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.processes.homes import Homes
from ownerserve.gateway.processes.mail import Parcel, ParcelKind, Post


class HeadReader(Protocol):
    """A head reader knows sessions by the heads of requests (asking.Asking)."""

    def is_here(self, head: RequestHead) -> bool:
        """Return whether the head alone names a session that is at home here. Raises Elsewhere."""
        ...


class GatewayPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part is one process's; `life`: how many processes have been it so far, this one too."""

    homes: Homes
    post: Post
    life: int

    def handing(self, reader: HeadReader) -> Handing:
        """Make what client connections ask whose their requests are."""
        return SessionHanding(reader, self.post)


class SessionHanding:
    """The handing gives connections to the processes where their sessions are at home."""

    def __init__(self, reader: HeadReader, post: Post) -> None:
        self._reader = reader
        self._post = post
        self._beginning = set[asyncio.Task[None]]()

    def is_here(self, head: RequestHead) -> bool:
        """Return whether the head alone says that the request is ours. Raises Elsewhere."""
        return self._reader.is_here(head)

    def give(self, process: int, transport: asyncio.Transport, unanswered: bytes) -> Given:
        """Give a client to another process. Raises Rejected."""
        if transport.get_extra_info("sslcontext") is not None:
            here, there = socket.socketpair()
            with there:
                try:
                    self._send(process, there, unanswered)
                except Rejected:
                    here.close()
                    raise
            here.settimeout(0)
            protocol = cast(asyncio.Protocol, transport.get_protocol())
            task = asyncio.ensure_future(pump(transport, here, protocol.connection_lost))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)
            return Given.BY_BYTES
        self._send(process, transport.get_extra_info("socket"), unanswered)
        return Given.WHOLE

    def _send(self, process: int, client: socket.socket, unanswered: bytes) -> None:
        self._post.send(process, Parcel(ParcelKind.CLIENT, client.fileno(), unanswered))
