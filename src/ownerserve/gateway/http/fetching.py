"""This module sends one small GET to a worker and reads the answer whole: so the gateway asks a
worker about itself.

Owns no connection: each question has its own, which is closed after the answer.
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
    """A small answer is read whole; its `status` is 0 when it is no HTTP."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.body = b""
        self.has_head = self.is_whole = False

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


async def fetch(address: Address, target: bytes, access: Access) -> SmallAnswer:
    """Send GET `target` and return the answer. Raises OSError when there is no connection, or it
    breaks."""
    answer = SmallAnswer()
    parser = httptools.HttpResponseParser(answer)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport = await connected(address, access.tls, lambda: protocol)
    writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
    try:
        writer.write(
            b"GET %b HTTP/1.1\r\nHost: %b:%d\r\n%bConnection: close\r\n\r\n"
            % (target, address.host.encode(), address.port, access.line)
        )
        read_bytes = 0
        while not answer.is_whole and read_bytes < ANSWER_MAX_BYTES:
            data = await reader.read(16 * KIB)
            if not data:
                if not read_bytes:
                    raise ConnectionResetError("it ended without an answer")
                head = read_response_head(parser.get_status_code(), b"", answer.headers)
                answer.is_whole = answer.has_head and head.ends_by_close
                break
            read_bytes += len(data)
            parser.feed_data(data)
        answer.status = parser.get_status_code()
    except httptools.HttpParserError:
        answer.status = 0
    finally:
        writer.close()
    return answer
