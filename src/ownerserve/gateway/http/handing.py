"""A connection may be another process's to answer: here is what a client connection knows of that.

    read ──> whose is it? ──> ours: answered here
               │
               └─> Elsewhere(process): the socket goes there, with the input that nobody answered

Owns the input that must go along (`KeptInput`). Who is asked whose a request is, and how a socket
gets to another process, is a `Handing`'s: gateway/processes has one. Nothing here knows a session.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Protocol

import httptools

from ownerserve.gateway.http.heads import RequestHead

SLICE_BYTES = 1024


class Elsewhere(Exception):
    """The request is another process's to answer: `process` is its number."""

    def __init__(self, process: int) -> None:
        super().__init__(process)
        self.process = process


class Given(Enum):
    """This says how a client was given away."""

    WHOLE = "whole"
    """Its socket is the other process's: the transport here is to be closed."""
    BY_BYTES = "by_bytes"
    """Its bytes are: the transport is used on, and tells the client connection when it is lost."""


class Handing(Protocol):
    """A handing says whose requests are, and gives connections away."""

    def is_here(self, head: RequestHead) -> bool:
        """Return whether the head alone says that the request is ours. Raises Elsewhere when it
        says that it is another process's."""
        ...

    def give(self, process: int, transport: asyncio.Transport, unanswered: bytes) -> Given:
        """Give a client to another process, with the input that is not answered yet. Raises
        Rejected when it can't be given."""
        ...


class KeptInput:
    """The kept input is what a client has sent from its first request on that is not known to be
    answered here.

        kept    | request that is looked at | pipelined ones, whole or not ...

    Of a request whose head alone says that it is ours nothing is kept (`skip`), so that a long body
    is in memory once; other bodies are there twice until they are whole.
    """

    __slots__ = ("_kept", "_skip_bytes", "_was_skipped")

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._skip_bytes = 0
        self._was_skipped = False

    def add(self, data: bytes) -> None:
        """Keep what has come, behind what is skipped."""
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(data))
            self._skip_bytes -= skipped
            data = data[skipped:]
        if data:
            self._kept.append(data)

    def skip(self, rest_bytes: int) -> None:
        """Keep nothing of the request that is being read, of which `rest_bytes` are to come."""
        self._kept.clear()
        self._skip_bytes = rest_bytes
        self._was_skipped = True

    def drop_first(self) -> None:
        """Keep the first request no longer, as it is answered here and others have come behind
        it."""
        if self._was_skipped:
            self._was_skipped = False
        else:
            kept = self.whole()
            self._kept = [kept[first_end(kept) :]]

    def drop_only(self) -> None:
        """Keep the first request no longer, as it is answered here, and nothing came behind it."""
        self._was_skipped = False
        self._kept.clear()

    def whole(self) -> bytes:
        """Return all that is kept."""
        return self._kept[0] if len(self._kept) == 1 else b"".join(self._kept)


class _Ends:
    """Counts the messages that end."""

    def __init__(self) -> None:
        self.count = 0

    def on_message_complete(self) -> None:
        self.count += 1


def first_end(data: bytes) -> int:
    """Return where the first request in `data` ends; it is whole, and has been read once without
    an error. The parser tells that it ended, not where: it is fed in ever smaller parts."""
    begin, end, step = 0, len(data), SLICE_BYTES
    while step:
        ends = _Ends()
        parser = httptools.HttpRequestParser(ends)
        parser.feed_data(data[:begin])
        at = begin
        while not ends.count and at < end:
            parser.feed_data(data[at : at + step])
            at += step
        begin, end = at - step, min(at, end)
        step = 0 if step == 1 else max(step // 32, 1)
    return end
