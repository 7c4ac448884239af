"""This module makes the answers that are the gateway's own. Errors have the form of the API that
was asked: OpenAI's, and Anthropic's for its messages."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from ownerserve.router.messages import Failure, Refusal


class Rejected(Exception):
    """The request is refused before any decision; the exception carries the answer to the
    client."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        message: str,
        *,
        retry_after_s: int = 1,
        limit: str | None = None,
        lines: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Told with a status that says that it is worth it."""
        self.limit = limit
        """Which of its tenant's limits the request is over; None: the fleet is full, or another
        reason."""
        self.lines = lines
        """Further header lines of the answer."""
        self.status = status
        self.code = code
        self.message = message


class RefusedRequest(msgspec.Struct, frozen=True):
    """A refused request is one of which nothing was decided: what was read of it, and empty or None
    what was not. `client`: the address that it came from; None at a Unix socket. `special`: its
    headers that the gateway looks at."""

    request_id: bytes
    method: bytes
    target: bytes
    special: Mapping[bytes, bytes]
    client: str | None
    tenant: str | None = None


_REFUSALS = {
    Refusal.NO_WORKER: (HTTPStatus.SERVICE_UNAVAILABLE, "no worker is up; retry soon"),
    Refusal.NO_SUCH_MODEL: (HTTPStatus.NOT_FOUND, "model: no worker serves it; see /v1/models"),
    Refusal.DRAINING: (HTTPStatus.SERVICE_UNAVAILABLE, "this gateway is shutting down; retry"),
    Refusal.ALL_TRIED: (HTTPStatus.BAD_GATEWAY, "no worker that is up could answer"),
    Refusal.EXHAUSTED: (
        HTTPStatus.SERVICE_UNAVAILABLE,
        "this gateway has no descriptor or memory left for it; retry soon",
    ),
    Refusal.RETRY_BUDGET: (HTTPStatus.BAD_GATEWAY, "the worker failed, and retries are used up"),
}
_TOLD_WHEN = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)


def refused(refusal: Refusal) -> Rejected:
    """Return the state's refusal as the client is told it."""
    status, message = _REFUSALS[refusal]
    return Rejected(status, refusal.value, message)


def pressed(reason: str, status: int, retry_after_s: int) -> Rejected:
    """Return the rejection for a turn to which every worker that was asked said no, the last one
    for `reason` and with `status` (0: it was not asked over HTTP); the longest that one of them
    wants us to wait is `retry_after_s` (0: not said)."""
    message = f"every worker that was asked refused ({reason}); retry soon"
    is_down = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    told = HTTPStatus.SERVICE_UNAVAILABLE if is_down else HTTPStatus.TOO_MANY_REQUESTS
    return Rejected(told, reason, message, retry_after_s=max(retry_after_s, 1))


def fault() -> Rejected:
    """Return the rejection for a request that a fault of the gateway's own ended; its log tells
    which."""
    message = "a fault in the gateway ended this request; its log has the same x-request-id; retry"
    return Rejected(HTTPStatus.INTERNAL_SERVER_ERROR, "gateway_fault", message)


def too_late() -> Rejected:
    """Return the rejection for a turn of which nothing came in time at any worker that was
    asked."""
    message = "a worker that is up sent nothing of the answer in time; see first_byte_timeout"
    return Rejected(HTTPStatus.GATEWAY_TIMEOUT, "first_byte_timeout", message)


class CutShort(NamedTuple):
    """This says why an answer stops in its middle, to programs and to people."""

    code: str
    message: str


_CUT_SHORT = {
    Failure.SILENT: CutShort("worker_silent", "the worker hangs and was taken out; retry"),
    Failure.LATE: CutShort("worker_silent", "the worker sent nothing more for too long; retry"),
    Failure.MALFORMED: CutShort("worker_malformed", "what the worker sent is no HTTP; retry"),
}
_WORKER_LOST = CutShort("worker_lost", "the connection to the worker was lost; retry")
STOPPED = CutShort("gateway_stopped", "this gateway was shut down; retry")


def cut_short(failure: Failure) -> CutShort:
    """Return what a client hears whose answer stops in its middle by the worker's failure."""
    return _CUT_SHORT.get(failure, _WORKER_LOST)


_MESSAGES = b"/v1/messages"
_ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "overloaded_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


_OVERLOADED = 529
"""Anthropic's status where another API has 429 for a fleet that is full."""


def _is_messages(target: bytes) -> bool:
    return target.startswith(_MESSAGES)


def error_body(rejected: Rejected, target: bytes) -> bytes:
    """Return the error as JSON, as the clients of the API at `target` read it."""
    status, is_ours = rejected.status, rejected.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    if _is_messages(target):
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if is_ours else "invalid_request_error")
        kind = "rate_limit_error" if rejected.limit else kind
        said = {"type": kind, "message": rejected.message, "code": rejected.code}
        error = {**said, "details": {"error_code": rejected.code}}
        return msgspec.json.encode({"type": "error", "error": error})
    kind = "server_error" if is_ours else "invalid_request_error"
    if status is HTTPStatus.TOO_MANY_REQUESTS:
        kind = rejected.limit or "rate_limit_error"
    told = {"message": rejected.message, "type": kind, "code": rejected.code, "param": None}
    return msgspec.json.encode({"error": told})


def error_reply(
    rejected: Rejected, target: bytes, *, request_id: bytes, connection: bytes
) -> bytes:
    """Return a whole HTTP answer with the error to a request for `target`; `connection` is "close"
    or "keep-alive"."""
    status, phrase = rejected.status.value, rejected.status.phrase
    if status == HTTPStatus.TOO_MANY_REQUESTS and not rejected.limit and _is_messages(target):
        status, phrase = _OVERLOADED, "Overloaded"
    return _reply(
        b"%d %b" % (status, phrase.encode()),
        error_body(rejected, target),
        rejected.lines + _line_of(rejected.status, rejected.retry_after_s),
        request_id=request_id,
        connection=connection,
    )


def reply(status: HTTPStatus, body: bytes, *, request_id: bytes, connection: bytes) -> bytes:
    """Return a whole HTTP answer with a JSON body."""
    said = b"%d %b" % (status, status.phrase.encode())
    lines = _line_of(status, 1)
    return _reply(said, body, lines, request_id=request_id, connection=connection)


def _reply(
    status: bytes, body: bytes, lines: bytes, *, request_id: bytes, connection: bytes
) -> bytes:
    return b"HTTP/1.1 %b\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n" % (
        status,
        lines,
        len(body),
    ) + b"x-request-id: %b\r\nconnection: %b\r\n\r\n%b" % (request_id, connection, body)


def _line_of(status: HTTPStatus, retry_after_s: int) -> bytes:
    """Return what an answer of this status says beside its body."""
    if status is HTTPStatus.UNAUTHORIZED:
        return b"www-authenticate: Bearer\r\n"
    return b"retry-after: %d\r\n" % retry_after_s if status in _TOLD_WHEN else b""
