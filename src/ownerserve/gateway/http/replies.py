"""This module makes the answers that are the gateway's own, in the error form of OpenAI's API."""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

import msgspec

from ownerserve.router.messages import Failure, Refusal


class Rejected(Exception):
    """The request is refused before any decision; the exception carries the answer to the
    client."""

    def __init__(
        self, status: HTTPStatus, code: str, message: str, *, retry_after_s: int = 1
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Told with a status that says that it is worth it."""
        self.status = status
        self.code = code
        self.message = message


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


def error_reply(rejected: Rejected, *, request_id: bytes, connection: bytes) -> bytes:
    """Return a whole HTTP answer with the error; `connection` is "close" or "keep-alive"."""
    kind = "invalid_request_error" if rejected.status < 500 else "server_error"
    body = {
        "error": {
            "message": rejected.message,
            "type": kind,
            "code": rejected.code,
            "param": None,
        }
    }
    return reply(
        rejected.status,
        msgspec.json.encode(body),
        request_id=request_id,
        connection=connection,
        retry_after_s=rejected.retry_after_s,
    )


def reply(
    status: HTTPStatus, body: bytes, *, request_id: bytes, connection: bytes, retry_after_s: int = 1
) -> bytes:
    """Return a whole HTTP answer with a JSON body."""
    return b"HTTP/1.1 %d %b\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n" % (
        status,
        status.phrase.encode(),
        _line_of(status, retry_after_s),
        len(body),
    ) + b"x-request-id: %b\r\nconnection: %b\r\n\r\n%b" % (request_id, connection, body)


def _line_of(status: HTTPStatus, retry_after_s: int) -> bytes:
    """Return what an answer of this status says beside its body."""
    if status is HTTPStatus.UNAUTHORIZED:
        return b"www-authenticate: Bearer\r\n"
    return b"retry-after: %d\r\n" % retry_after_s if status in _TOLD_WHEN else b""
