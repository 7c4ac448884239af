"""The worker routes of the admin port let an operator see and change which workers a gateway has.

    GET    /workers                 all, with their state
    POST   /workers                 {"url": "http://host:port", "models": [...]}: join
    DELETE /workers/ID              leave: no new turn; gone when nothing runs there
    POST   /workers/ID/drain        no new turn until undrain
    POST   /workers/ID/undrain

Every error is JSON: {"error": {"code", "field", "message", "mend"}}. A request with an `Origin` is
refused, whatever it asks to change: a page that an operator has open can reach their loopback too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ownerserve.gateway.http.access import Address, parse_worker
from ownerserve.gateway.roster import RosterProblem, RosterRefused
from ownerserve.kv.errors import UNREADABLE, InvalidInput
from ownerserve.kv.ids import WorkerId

if TYPE_CHECKING:
    from ownerserve.gateway.service import Gateway

BODY_BYTES_MAX = 1 << 16
_SEE = "GET /workers lists all"
_STATUS = {
    RosterProblem.UNKNOWN_WORKER: (HTTPStatus.NOT_FOUND, _SEE),
    RosterProblem.KNOWN_WORKER: (HTTPStatus.CONFLICT, f"{_SEE}; DELETE it first"),
    RosterProblem.LEAVING_WORKER: (HTTPStatus.CONFLICT, "wait until its turns end, then POST it"),
}


class _Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    models: list[str] = []


def worker_row(gateway: Gateway, worker: WorkerId) -> dict[str, Any]:
    """Return what a worker is to this gateway, as JSON values."""
    monitor = gateway.monitors[worker]
    units = [unit for unit in gateway.state.fleet if unit.id == worker]
    return {
        "worker": worker,
        "url": _url(monitor.address),
        "assigned": monitor.address.models,
        "models": sorted(monitor.models),
        "stay": gateway.roster.stay(worker),
        "up": any(unit.up for unit in units),
        "requests": sum(unit.requests for unit in units),
        "cause": monitor.cause or None,
    }


def _url(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{address.scheme}://{host}:{address.port}"


def worker_routes(gateway: Gateway) -> list[Route]:
    """Return the routes; who may ask is the admin port's to say."""
    roster = gateway.roster

    async def get_all(request: Request) -> Response:
        return _json({"workers": [worker_row(gateway, worker) for worker in gateway.monitors]})

    async def join(request: Request) -> Response:
        address = _address(await _body(request))
        await roster.join(address)
        if address.worker not in gateway.monitors:  # it was told to leave meanwhile
            raise RosterRefused(RosterProblem.UNKNOWN_WORKER, f"{address.worker} has left again")
        return _json(worker_row(gateway, address.worker), HTTPStatus.CREATED)

    async def leave(request: Request) -> Response:
        worker = _named(request)
        roster.leave(worker)
        return _json(worker_row(gateway, worker), HTTPStatus.ACCEPTED)

    async def drain(request: Request) -> Response:
        worker = _named(request)
        roster.drain(worker)
        return _json(worker_row(gateway, worker))

    async def undrain(request: Request) -> Response:
        worker = _named(request)
        await roster.undrain(worker)
        return _json(worker_row(gateway, worker))

    return [
        Route("/workers", get_all, methods=["GET"]),
        Route("/workers", _told(join), methods=["POST"]),
        Route("/workers/{worker}", _told(leave), methods=["DELETE"]),
        Route("/workers/{worker}/drain", _told(drain), methods=["POST"]),
        Route("/workers/{worker}/undrain", _told(undrain), methods=["POST"]),
    ]


Answer = Callable[[Request], Awaitable[Response]]


def _told(answer: Answer) -> Answer:
    """Make an endpoint that answers errors as JSON, and no page."""

    async def endpoint(request: Request) -> Response:
        if "origin" in request.headers:
            mend = "ask from a command line; a page may not change a fleet"
            return _error(HTTPStatus.FORBIDDEN, "from_a_page", "origin: is sent", mend=mend)
        try:
            return await answer(request)
        except RosterRefused as error:
            status, mend = _STATUS[error.problem]
            return _error(status, error.problem, str(error), field="worker", mend=mend)
        except InvalidInput as error:
            status = HTTPStatus.BAD_REQUEST
            field, mend = error.field, error.mend
            return _error(status, "invalid", f"{field}: {error.problem}", field=field, mend=mend)

    return endpoint


def _named(request: Request) -> WorkerId:
    return WorkerId(request.path_params["worker"])


async def _body(request: Request) -> _Join:
    mend = 'send {"url": "http://127.0.0.1:8001", "models": []}'
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > BODY_BYTES_MAX:
            raise InvalidInput("body", f"is over {BODY_BYTES_MAX} bytes", mend)
    try:
        return msgspec.json.decode(data, type=_Join)
    except UNREADABLE as error:
        raise InvalidInput("body", str(error)[:200], mend) from error


def _address(told: _Join) -> Address:
    """Return the address that a body names. Raises InvalidInput."""
    if "=" in told.url:
        raise InvalidInput("url", "has models in it", 'say them in "models"')
    if not all(name.strip() for name in told.models):
        raise InvalidInput("models", "has an empty name", "leave models out for what it lists")
    try:
        address = parse_worker(told.url)
    except InvalidInput as error:
        raise InvalidInput("url", error.problem, error.mend) from error
    return replace(address, models=tuple(told.models))


def _error(
    status: HTTPStatus, code: str, message: str, *, mend: str, field: str | None = None
) -> Response:
    error = {"code": code, "field": field, "message": message, "mend": mend}
    return _json({"error": error}, status)


def _json(body: Any, status_code: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(body), status_code, media_type="application/json")
