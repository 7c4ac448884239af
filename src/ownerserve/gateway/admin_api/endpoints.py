"""The endpoints of the admin port are a table: each row says what is asked, what is answered, and
which problems it may have. Routes are made of it here, the API's description in openapi.py.

Every error, also of a path or a method that is not here, is one ErrorAnswer. Whatever changes
something refuses a request with an `Origin`: a page that an operator has open can reach their
loopback too.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ownerserve.gateway.admin_api.answers import AdminAnswer, ErrorAnswer, ErrorRow
from ownerserve.kv.errors import UNREADABLE, InvalidInput

log = logging.getLogger("ownerserve.gateway")
T = TypeVar("T")

BODY_BYTES_MAX = 1 << 16
LAST_MAX = 999_999_999
LAST_DEFAULT = 100
SAFE = ("GET", "HEAD")
_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)


class AdminProblem(Exception):
    """A request of the admin port is refused, with `status` and what is said of it."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        message: str,
        *,
        mend: str,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.problem = ErrorRow(code=code, field=field, message=message, mend=mend)


class Asked(msgspec.Struct, frozen=True):
    """An asked endpoint has the request, and its body in the type that the endpoint takes."""

    request: Request
    body: Any = None

    @property
    def last(self) -> int:
        """How many rows are asked for. Raises InvalidInput."""
        told = self.request.query_params.get("last", str(LAST_DEFAULT))
        if not _COUNT.fullmatch(told):
            raise InvalidInput("last", f"{told[:64]!r} is no count", "write ?last=100")
        return int(told)

    @property
    def worker(self) -> str:
        """The worker that the path names."""
        named: str = self.request.path_params["worker"]
        return named


Run = Callable[[Asked], Awaitable[AdminAnswer | Response]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint answers one method of one path. `answer` is the type of its answer, or the media
    type of one that is no JSON; `takes` the type of its body. `problems`: the statuses that it may
    answer beside those of all."""

    method: str
    path: str
    summary: str
    run: Run
    answer: type[AdminAnswer] | str
    status: HTTPStatus = HTTPStatus.OK
    takes: type[msgspec.Struct] | None = None
    example: str = ""
    """A body that is well-formed."""
    counts: tuple[str, ...] = ()
    """Names of query parameters that are counts."""
    problems: tuple[HTTPStatus, ...] = ()
    is_public: bool = False
    """Whether it is served without the admin key: there are no data in it."""

    @property
    def is_change(self) -> bool:
        """Whether it changes something."""
        return self.method not in SAFE


def app_of(endpoints: Sequence[Endpoint]) -> Starlette:
    """Make the app of a table of endpoints."""
    by_path: dict[str, list[Endpoint]] = defaultdict(list)
    for one in endpoints:
        by_path[one.path].append(one)
    app = Starlette(
        routes=[_route(path, rows) for path, rows in by_path.items()],
        exception_handlers={HTTPException: _no_endpoint, Exception: fault_response},
    )
    app.router.redirect_slashes = False
    return app


def _route(path: str, rows: Sequence[Endpoint]) -> Route:
    by_method = {row.method: row for row in rows}
    if "GET" in by_method:
        by_method["HEAD"] = by_method["GET"]

    async def endpoint(request: Request) -> Response:
        try:
            return await _answer(by_method[request.method], request)
        except AdminProblem as error:
            return problem_response(error.status, error.problem)
        except InvalidInput as error:
            problem = ErrorRow(
                code="invalid",
                field=error.field,
                message=f"{error.field}: {error.problem}",
                mend=error.mend,
            )
            return problem_response(HTTPStatus.BAD_REQUEST, problem)

    return Route(path, endpoint, methods=list(by_method))


async def _answer(row: Endpoint, request: Request) -> Response:
    if row.is_change and "origin" in request.headers:
        mend = "ask from a command line; a page may not change a fleet"
        raise AdminProblem(HTTPStatus.FORBIDDEN, "from_a_page", "origin: is sent", mend=mend)
    body = None if row.takes is None else await _body(row, row.takes, request)
    answer = await row.run(Asked(request, body))
    return answer if isinstance(answer, Response) else json_response(answer, row.status)


async def _body(row: Endpoint, wanted: type[T], request: Request) -> T:
    mend = f"send {row.example}"
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > BODY_BYTES_MAX:
            raise InvalidInput("body", f"is over {BODY_BYTES_MAX} bytes", mend)
    try:
        return msgspec.json.decode(data, type=wanted)
    except UNREADABLE as error:
        raise InvalidInput("body", str(error)[:200], mend) from error


def json_response(
    body: AdminAnswer, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer as JSON."""
    data = msgspec.json.encode(body)
    return Response(data, status, headers=headers, media_type="application/json")


def problem_response(
    status: int, problem: ErrorRow, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error as every one looks."""
    return json_response(ErrorAnswer(error=problem), status, headers)


async def _no_endpoint(request: Request, error: Exception) -> Response:
    """Answer for a path or a method that is not in the table."""
    assert isinstance(error, HTTPException)
    mend = "GET /openapi.json lists all"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"method: this path takes {(error.headers or {}).get('Allow')}"
        problem = ErrorRow(code="method", field="method", message=message, mend=mend)
    else:
        message = "path: is none of the admin port's"
        problem = ErrorRow(code="unknown_path", field="path", message=message, mend=mend)
    return problem_response(error.status_code, problem, error.headers)


async def fault_response(request: Request, error: Exception) -> Response:
    """Answer for a fault of the gateway's own, which its server logs."""
    message = "a fault in the gateway; its log has it"
    problem = ErrorRow(code="gateway_fault", field=None, message=message, mend="report it")
    return problem_response(HTTPStatus.INTERNAL_SERVER_ERROR, problem)
