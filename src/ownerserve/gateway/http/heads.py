"""This module says which header lines cross the gateway, in both directions, and what is put in
their place.

Owns the lists. Pure functions over (name, value) pairs as the parser gave them; a value is passed
on byte for byte. Never passes a hop-by-hop header (RFC 9110 §7.6.1), nor one that only the gateway
may set.
"""

from __future__ import annotations

import re
from collections.abc import Set
from functools import lru_cache
from http import HTTPStatus

import msgspec

from ownerserve.gateway.http.callers import Anybody, Caller, Callers
from ownerserve.gateway.http.replies import Rejected
from ownerserve.gateway.http.routes import check_route
from ownerserve.gateway.http.trace_context import TRACE_HEADERS, joined
from ownerserve.kv.wire.headers import (
    ACTION_HEADER,
    ANSWER_HEADER,
    CLASS_HEADER,
    DEADLINE_HEADER,
    ENGINE_SESSION_HEADER,
    EXPECTED_CACHED_HEADER,
    GROUP_HEADER,
    PLAN_HEADER,
    PREFIX,
    PRICED_HEADER,
    REASON_HEADER,
    RESERVATION_HEADER,
    TURN_CLASS_HEADER,
    TURN_HEADER,
    WAIT_HEADER,
    WORKER_HEADER,
)
from ownerserve.router.requests.identity import IDENTITY_HEADERS, SessionIdentity

_PREFIX = PREFIX.encode()
Header = tuple[bytes, bytes]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_OURS = frozenset(
    name.encode()
    for name in {
        ACTION_HEADER,
        CLASS_HEADER,
        DEADLINE_HEADER,
        EXPECTED_CACHED_HEADER,
        GROUP_HEADER,
        PRICED_HEADER,
        REASON_HEADER,
        RESERVATION_HEADER,
        TURN_HEADER,
        TURN_CLASS_HEADER,
        WAIT_HEADER,
        WORKER_HEADER,
        "x-request-id",
    }
)
"""Headers that only a gateway sets: a client's own goes no further."""
_REQUEST_SPECIAL = (
    HOP_BY_HOP
    | _OURS
    | IDENTITY_HEADERS
    | {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"x-api-key",
    }
    | TRACE_HEADERS
)
_DROPPED = HOP_BY_HOP | _OURS | {b"content-length", b"expect"}
_DROPPED_OF_CLIENTS = _DROPPED | TRACE_HEADERS | {ENGINE_SESSION_HEADER.encode()}
"""A client's word for its session names it at the gateway, and its trace goes on by the gateway's
span: the worker gets the gateway's words."""
_KEPT_BACK = frozenset({ANSWER_HEADER.encode(), PLAN_HEADER.encode()})
"""Lines of workers that name units, epochs and prices: a gateway says what of them goes on."""
_EVENTS = b"text/event-stream"
_REQUEST_ID = re.compile(rb"[0-9A-Za-z][-0-9A-Za-z._:/+=@~]{0,127}")
HEALTH = b"/health"
"""What load balancers ask, without a key."""
ANYBODY = Anybody()


class RequestHead(msgspec.Struct, frozen=True):
    """A request head is a client's, sorted: `lines` go to the worker as they stand, `special` are
    those that the gateway looks at."""

    method: bytes
    target: bytes
    version: bytes
    lines: bytes
    special: dict[bytes, bytes]
    caller: Caller
    named: dict[str, SessionIdentity] = msgspec.field(default_factory=dict)
    """The session that the headers alone name, by the model, as far as it was asked for."""

    @property
    def bytes_held(self) -> int:
        """`bytes_held` counts what the head takes in memory."""
        return len(self.target) + len(self.lines)

    @property
    def request_id(self) -> bytes | None:
        """The client's own request id, when it is fit to be logged and passed on; else None."""
        given = self.special.get(b"x-request-id")
        return None if given is None else fit_request_id(given)

    def to_worker(self, request_id: bytes, body_bytes: int, *, orders: bytes = b"") -> bytes:
        """Return the head of the request as the worker gets it; `orders` are whole header lines."""
        length = b""
        if body_bytes or self.method not in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
            length = b"content-length: %d\r\n" % body_bytes
        return b"%b %b HTTP/1.1\r\n%b%b%bx-request-id: %b\r\n\r\n" % (
            self.method,
            self.target,
            self.lines,
            length,
            orders,
            request_id,
        )


def fit_request_id(given: bytes) -> bytes | None:
    """Return a client's request id where it is fit to be logged and passed on: 128 letters, digits
    and -._:/+=@~ at most. Else None."""
    return given if _REQUEST_ID.fullmatch(given) else None


def read_request_head(
    method: bytes,
    target: bytes,
    version: bytes,
    *,
    headers: list[Header],
    replaced: Set[bytes] = frozenset(),
    callers: Callers = ANYBODY,
) -> RequestHead:
    """Sort a client's headers; the `replaced` ones are looked at and go no further. Raises Rejected
    for who is no caller, and for a head that two readers could read differently.

    The parser has already refused Transfer-Encoding beside Content-Length, doubled lengths,
    folded lines and bare line feeds.
    """
    if target == HEALTH:
        callers = ANYBODY
    if version not in (b"1.1", b"1.0"):
        raise Rejected(
            HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "version", "version: speak HTTP/1.1 or 1.0"
        )
    lines, special = _sorted(headers, replaced)
    caller = callers.of(special)
    check_route(method, target)
    if special.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        raise Rejected(
            HTTPStatus.NOT_IMPLEMENTED,
            "transfer_encoding",
            "transfer-encoding: only chunked is understood; send the body plain or chunked",
        )
    if b"upgrade" in special:  # what follows such a head may be no HTTP
        raise Rejected(HTTPStatus.BAD_REQUEST, "upgrade", "upgrade: is not served; leave it out")
    if b"host" not in special:
        if version != b"1.0":
            raise Rejected(HTTPStatus.BAD_REQUEST, "no_host", "host: is missing; send it")
        lines.append(b"host: ownerserve\r\n")
    nominated = special.get(b"connection")
    if nominated is not None and nominated.lower() not in (b"keep-alive", b"close"):
        lines = _without(lines, nominated)
    return RequestHead(
        method=method,
        target=target,
        version=version,
        lines=b"".join(lines),
        special=special,
        caller=caller,
    )


def _sorted(headers: list[Header], replaced: Set[bytes]) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Return the lines that go on, in four pieces each, and the headers that are looked at."""
    lines: list[bytes] = []
    special: dict[bytes, bytes] = {}
    for name, value in headers:
        key = name.lower()
        if key in _REQUEST_SPECIAL:
            if key in special:
                if key in TRACE_HEADERS:  # never a reason to refuse
                    special[key] = joined(key, special[key], value)
                    continue
                raise Rejected(
                    HTTPStatus.BAD_REQUEST,
                    "duplicate_header",
                    f"{key.decode()}: is given twice; send it once",
                )
            special[key] = value
            if key in _DROPPED_OF_CLIENTS or key in replaced:
                continue
        if key.startswith(_PREFIX):
            continue  # whatever it says: between gateways and workers alone
        lines += (name, b": ", value, b"\r\n")
    return lines, special


def _without(lines: list[bytes], nominated: bytes) -> list[bytes]:
    """Return `lines` less the headers that a Connection header names (RFC 9110 §7.6.1)."""
    names = {token.strip().lower() for token in nominated.split(b",")}
    kept: list[bytes] = []
    for at in range(0, len(lines) - len(lines) % 4, 4):
        if lines[at].lower() not in names or lines[at].lower() == b"host":
            kept += lines[at : at + 4]
    return kept + lines[len(lines) - len(lines) % 4 :]


class ResponseHead(msgspec.Struct, frozen=True):
    """A response head is a worker's, sorted: `chunked` and `length` say how its body ends (neither:
    by close).

    `stamp`: its x-ownerserve-* headers, by the rest of their names.
    """

    status: int
    phrase: bytes
    lines: bytes
    chunked: bool
    length: bytes | None
    stamp: dict[bytes, bytes] = {}
    has_events: bool = False
    """Whether its body is a stream of server-sent events that can be read here."""

    @property
    def ends_by_close(self) -> bool:
        """`ends_by_close` tells whether only the connection's end ends the body."""
        return not self.chunked and self.length is None and self.status not in (204, 304)

    def to_client(self, stamp: bytes) -> bytes:
        """Return the head of the answer as the client gets it; `stamp` is whole header lines."""
        length = b"" if self.length is None else b"content-length: %b\r\n" % self.length
        return b"HTTP/1.1 %d %b\r\n%b%b%b%b\r\n" % (
            self.status,
            self.phrase,
            self.lines,
            length,
            b"transfer-encoding: chunked\r\n" if self.chunked else b"",
            stamp,
        )

    def unchunked(self) -> ResponseHead:
        """Return this head for a client too old for chunks: the body ends by close."""
        return msgspec.structs.replace(self, chunked=False)


_NOT_ON = _DROPPED | _KEPT_BACK


@lru_cache(512)
def _special_of(name: bytes) -> bytes | None:
    """Return a worker's header in lower case, if it is looked at; None when it goes on as it
    came."""
    key = name.lower()
    is_looked_at = key in _NOT_ON or key in (b"content-type", b"content-encoding")
    return key if is_looked_at or key.startswith(_PREFIX) else None


def read_response_head(status: int, phrase: bytes, headers: list[Header]) -> ResponseHead:
    """Sort a worker's headers into those that go on, those of our own, and those that say how the
    body ends."""
    lines: list[bytes] = []
    stamp: dict[bytes, bytes] = {}
    chunked, length = False, None
    has_events, is_encoded = False, False
    for name, value in headers:
        key = _special_of(name)
        if key is not None:
            if key == b"content-length":
                length = value
            elif key == b"transfer-encoding":
                chunked = True
            elif key == b"content-type":
                has_events = value.startswith(_EVENTS)
            elif key == b"content-encoding":
                is_encoded = True
            elif key.startswith(_PREFIX):
                stamp[key[len(_PREFIX) :]] = value
            if key in _NOT_ON:
                continue
        lines += (name, b": ", value, b"\r\n")
    has_events = has_events and not is_encoded and length is None and status == HTTPStatus.OK
    return ResponseHead(status, phrase, b"".join(lines), chunked, length, stamp, has_events)
