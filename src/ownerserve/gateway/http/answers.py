"""Bytes to answers: where one worker's answer begins and ends in its byte stream.

Owns the parser. The body is not decoded: the parser only watches for its end and shows its payload
(without chunk frames), of which the last bytes are kept for the usage scan.
"""

from __future__ import annotations

import httptools

from ownerserve.gateway.http.heads import Header, ResponseHead, read_response_head
from ownerserve.kv.units import KIB
from ownerserve.router.requests.body import TAIL_BYTES

_HEAD_END = b"\r\n\r\n"
_INTERIM = b"HTTP/1.1 1"
_HEAD_MAX_BYTES = 64 * KIB


class Malformed(Exception):
    """The worker's bytes are no answer, or more than one."""


class AnswerReader:
    """Reads one answer after another; `begin` stands between two."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.begin(b"")

    def begin(self, method: bytes) -> None:
        """The next bytes answer a request of `method`."""
        self.head: ResponseHead | None = None
        self.tail = b""
        self.complete = self.keep_alive = False
        self.pending = b""
        """Bytes of a head that is not whole yet."""
        self._bodiless = method == b"HEAD"
        self._overrun = False
        self._phrase = b""
        self._headers: list[Header] = []
        self._parts: list[bytes] = []

    @property
    def payload(self) -> bytes:
        """Body bytes of the last read, without chunk frames."""
        return b"".join(self._parts)

    def feed_head(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """None until the head is whole; then it, and the body bytes that came after it.

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
        if self._bodiless:
            self.complete, self.keep_alive = True, False
            return self.head, b""
        return self.head, data[end:]

    def feed_body(self, data: bytes) -> None:
        """Body bytes, to be passed on as they are when this returns. Raises Malformed."""
        self._parts.clear()
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Malformed(str(error)) from error
        if self._overrun:
            raise Malformed("a worker sent more than its answer")
        for part in self._parts:
            self.tail = (self.tail + part if len(part) < TAIL_BYTES else part)[-TAIL_BYTES:]

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self.complete:
            self._overrun = True

    def on_status(self, phrase: bytes) -> None:
        self._phrase = phrase

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep_alive = self._parser.should_keep_alive()  # the parser knows only now
