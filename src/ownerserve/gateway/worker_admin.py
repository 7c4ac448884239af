"""The worker endpoints of the admin port let an operator see and change which workers a gateway
has.

    GET    /workers                 all, with their state
    POST   /workers                 {"url": "http://host:port", "models": [], "arm": "main"}: join
    DELETE /workers/ID              leave: no new turn; gone when nothing runs there
    POST   /workers/ID/drain        no new turn until undrain
    POST   /workers/ID/undrain
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from ownerserve.gateway.admin_api.answers import AdminAnswer, WorkerRow, Workers
from ownerserve.gateway.admin_api.endpoints import AdminProblem, Asked, Endpoint, Run
from ownerserve.gateway.http.access import Address, parse_worker
from ownerserve.gateway.roster import RosterProblem, RosterRefused
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import WorkerId
from ownerserve.router.messages import Arm

if TYPE_CHECKING:
    from ownerserve.gateway.service import Gateway

_SEE = "GET /workers lists all"
_STATUS = {
    RosterProblem.UNKNOWN_WORKER: (HTTPStatus.NOT_FOUND, _SEE),
    RosterProblem.KNOWN_WORKER: (HTTPStatus.CONFLICT, f"{_SEE}; DELETE it first"),
    RosterProblem.LEAVING_WORKER: (HTTPStatus.CONFLICT, "wait until its turns end, then POST it"),
}
OF_A_WORKER = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
"""The statuses of what may be wrong with a worker that is named."""


class JoiningWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that joins: where it listens, the models that it is assigned (none: those it says)
    and whose sessions run there."""

    url: str
    models: list[str] = []
    arm: Arm = Arm.MAIN


def worker_row(gateway: Gateway, worker: WorkerId) -> WorkerRow:
    """Return what a worker is to this gateway."""
    monitor = gateway.monitors[worker]
    units = [unit for unit in gateway.state.fleet if unit.id == worker]
    return WorkerRow(
        worker=worker,
        url=monitor.address.url,
        assigned=monitor.address.models,
        arm=monitor.address.arm,
        models=sorted(monitor.models),
        stay=gateway.roster.stay(worker),
        up=any(unit.up for unit in units),
        requests=sum(unit.requests for unit in units),
        cause=monitor.cause or None,
    )


def worker_endpoints(gateway: Gateway) -> list[Endpoint]:
    """Return the endpoints; who may ask is the admin port's to say."""
    roster = gateway.roster

    async def get_all(asked: Asked) -> AdminAnswer:
        return Workers(workers=[worker_row(gateway, worker) for worker in gateway.monitors])

    async def join(asked: Asked) -> AdminAnswer:
        address = _address(asked.body)
        await roster.join(address)
        if address.worker not in gateway.monitors:  # it was told to leave meanwhile
            raise RosterRefused(RosterProblem.UNKNOWN_WORKER, f"{address.worker} has left again")
        return worker_row(gateway, address.worker)

    async def leave(asked: Asked) -> AdminAnswer:
        roster.leave(WorkerId(asked.worker))
        return worker_row(gateway, WorkerId(asked.worker))

    async def drain(asked: Asked) -> AdminAnswer:
        roster.drain(WorkerId(asked.worker))
        return worker_row(gateway, WorkerId(asked.worker))

    async def undrain(asked: Asked) -> AdminAnswer:
        await roster.undrain(WorkerId(asked.worker))
        return worker_row(gateway, WorkerId(asked.worker))

    def post(path: str, summary: str, run: Run) -> Endpoint:
        return Endpoint(
            method="POST",
            path=path,
            summary=summary,
            answer=WorkerRow,
            problems=OF_A_WORKER,
            run=roster_problems(run),
        )

    joining = post("/workers", "Join: asked at once, turns from its first good answer on", join)
    leaving = post("/workers/{worker:path}", "Leave: no new turn; gone when it is idle", leave)
    return [
        Endpoint(method="GET", path="/workers", summary="All workers", answer=Workers, run=get_all),
        replace(
            joining,
            status=HTTPStatus.CREATED,
            takes=JoiningWorker,
            example='{"url": "http://127.0.0.1:8001", "models": []}',
        ),
        post("/workers/{worker:path}/drain", "No new turn until undrain", drain),
        post("/workers/{worker:path}/undrain", "Turns from its next good answer on", undrain),
        replace(leaving, method="DELETE", status=HTTPStatus.ACCEPTED),
    ]


def roster_problems(run: Run) -> Run:
    """Make an endpoint's `run` that tells what the roster refuses as a problem."""

    async def told(asked: Asked) -> AdminAnswer:
        try:
            answer = await run(asked)
        except RosterRefused as error:
            status, mend = _STATUS[error.problem]
            raise AdminProblem(
                status, error.problem.value, str(error), mend=mend, field="worker"
            ) from error
        assert isinstance(answer, AdminAnswer)
        return answer

    return told


def _address(told: JoiningWorker) -> Address:
    """Return the address that a body names. Raises InvalidInput."""
    if "=" in told.url or "#" in told.url:
        raise InvalidInput("url", "has models or an arm in it", 'say them in "models" and "arm"')
    if not all(name.strip() for name in told.models):
        raise InvalidInput("models", "has an empty name", "leave models out for what it lists")
    try:
        address = parse_worker(told.url)
    except InvalidInput as error:
        raise InvalidInput("url", error.problem, error.mend) from error
    return replace(address, models=tuple(told.models), arm=told.arm)
