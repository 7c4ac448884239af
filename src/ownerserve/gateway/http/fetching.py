"""This module sends one small GET to a worker and reads the answer whole: so the gateway asks a
worker about itself.

`fetch` has a connection of its own for its question. A `KeptLine` keeps one for the next question,
for who asks often: to open one costs the worker as much as most answers.
"""

from __future__ import annotations

import asyncio

import httptools

from ownerserve.gateway.http.access import Access, Address, connected
from ownerserve.gateway.http.heads import Header, read_response_head
from ownerserve.kv.units import KIB, MIB

ANSWER_MAX_BYTES = 4 * MIB
"""A list of a thousand models with all that vLLM says of each."""


class SmallAnswer:
    """A small answer is read whole; its `status` is 0 when it is no HTTP. `may_go_on`: another
    question may follow on its connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.body = b""
        self.has_head = self.is_whole = self.may_go_on = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Take in the next bytes of it; none: its connection has ended. Raises HttpParserError for
        bytes that are no answer."""
        if data:
            self._parser.feed_data(data)
        else:
            head = read_response_head(self._parser.get_status_code(), b"", self.headers)
            self.is_whole = self.has_head and head.ends_by_close
        self.status = self._parser.get_status_code()

    @property
    def is_good(self) -> bool:
        """`is_good` tells an answer that is whole and 2xx from others."""
        return self.is_whole and 200 <= self.status < 300

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_whole = True
        self.may_go_on = self._parser.should_keep_alive()  # the parser knows only now


class _Unanswered(ConnectionResetError):
    """An `_Unanswered` is a connection that ended before a byte of the answer came."""


class _Connection:
    """A connection to one worker, on which one question follows the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, request: bytes) -> SmallAnswer:
        """Send the request and return its answer. Raises OSError when the connection breaks."""
        answer = SmallAnswer()
        self._writer.write(request)
        read_bytes = 0
        try:
            while not answer.is_whole and read_bytes < ANSWER_MAX_BYTES:
                data = await self._read(read_bytes)
                answer.feed(data)
                read_bytes += len(data)
                if not data:
                    break
        except httptools.HttpParserError:
            answer.status = 0
        return answer

    async def _read(self, read_bytes: int) -> bytes:
        """Return the next bytes, none where an answer of so many bytes ends with the connection."""
        try:
            data = await self._reader.read(16 * KIB)
        except ConnectionError as error:
            if read_bytes:
                raise
            raise _Unanswered(*error.args) from error
        if not data and not read_bytes:
            raise _Unanswered("it ended without an answer")
        return data

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


async def fetch(address: Address, target: bytes, access: Access) -> SmallAnswer:
    """Send GET `target` and return the answer. Raises OSError when there is no connection, or it
    breaks."""
    connection = await _opened(address, access)
    try:
        return await connection.ask(_request(address, target, access, b"Connection: close\r\n"))
    finally:
        connection.close()


class KeptLine:
    """A kept line asks one worker, one question after the other, and owns the connection for them.
    It is opened by the first question, and anew when the worker has closed it."""

    def __init__(self, address: Address, access: Access) -> None:
        self._address = address
        self._access = access
        self._idle: _Connection | None = None

    async def fetch(self, target: bytes) -> SmallAnswer:
        """Send GET `target` and return the answer. Raises OSError when there is no connection, or
        it breaks; one that was closed since the last question is no error."""
        request = _request(self._address, target, self._access)
        idle, self._idle = self._idle, None
        if idle is not None:
            try:
                return await self._asked(idle, request)
            except _Unanswered:
                pass  # nobody has heard the question, or it does not matter: it changes nothing
        return await self._asked(await _opened(self._address, self._access), request)

    def close(self) -> None:
        """End the connection, if there is one."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    async def _asked(self, connection: _Connection, request: bytes) -> SmallAnswer:
        try:
            answer = await connection.ask(request)
            if answer.may_go_on:
                self._idle = connection
            return answer
        finally:
            if self._idle is not connection:
                connection.close()


async def _opened(address: Address, access: Access) -> _Connection:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport = await connected(address, access.tls, lambda: protocol)
    loop = asyncio.get_running_loop()
    return _Connection(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


def _request(address: Address, target: bytes, access: Access, more: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: %b:%d\r\n%b%b\r\n" % (
        target, address.host.encode(), address.port, access.line, more,
    )  # fmt: skip
