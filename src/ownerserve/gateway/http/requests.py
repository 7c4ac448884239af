"""Bytes to requests: one client's input, message by message.

Owns the parser and the message that is being read. Does no I/O and answers nobody: it gives whole
requests and, at most once and last, a refusal, past which nothing of the input can be believed.
"""

from __future__ import annotations

from http import HTTPStatus

import httptools
import msgspec

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import CREDENTIALS, NOTHING
from ownerserve.gateway.http.heads import Header, RequestHead, read_request_head
from ownerserve.gateway.http.replies import Rejected


class Request(msgspec.Struct, frozen=True):
    """A whole request as the client sent it. `keep_alive`: another may follow."""

    head: RequestHead
    body: bytes
    keep_alive: bool


class RequestReader:
    """Feeds the parser; collects what becomes whole."""

    def __init__(self, config: Config) -> None:
        self.in_message = False
        self.over = False
        """A request was refused: nothing more is read."""
        self._head_max_bytes = config.head_max_bytes
        self._body_max_bytes = config.body_max_bytes
        self._replaced = CREDENTIALS if config.worker_key is not None else NOTHING
        self._parser = httptools.HttpRequestParser(self)
        self._items: list[Request | Rejected] = []
        self._url = b""
        self._headers: list[Header] = []
        self._head: RequestHead | None = None
        self._read_bytes: int | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0

    @property
    def in_head(self) -> bool:
        return self.in_message and self._head is None

    @property
    def awaits_continue(self) -> bool:
        """The client has sent a head, and wants to hear that its body is welcome."""
        if not self.in_message or self._head is None or self._body:
            return False
        return self._head.special.get(b"expect", b"").lower() == b"100-continue"

    def feed(self, data: bytes) -> list[Request | Rejected]:
        """Requests that are whole with `data`; a refusal comes last."""
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
        self.over = True
        self._items.append(rejected)

    def rest(self) -> list[Request | Rejected]:
        """What is whole and was not given out yet."""
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
        )
        if head.bytes_held > self._head_max_bytes:
            raise self._head_too_large()
        length = head.special.get(b"content-length")
        if length is not None and int(length) > self._body_max_bytes:
            raise self._body_too_large()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > self._body_max_bytes:
            raise self._body_too_large()

    def on_message_complete(self) -> None:
        assert self._head is not None
        self.in_message = False
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._items.append(Request(self._head, body, self._parser.should_keep_alive()))
