"""`/ownerserve/*` on vLLM's own API server: an endpoint plug-in, loaded where it is allowed.

    VLLM_PLUGINS=ownerserve vllm serve ...

    GET  /ownerserve/status     who it is, its load, what it can do (kv.wire.status)
    GET  /ownerserve/inventory?after=N  what its store holds, said after word N (kv.wire.inventory)
    POST /ownerserve/admit      {"tokens": 1200} -> admitted, or 429 and why
    POST /ownerserve/release    {"session_id": "s"}: the session has gone elsewhere

Owns no state: each request asks the engine core's desk over loopback (desk.py), found by the
address that the connector leaves in its store. vLLM's allow-list is for all plug-ins: whoever sets
it names every other plug-in in use too.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from ownerserve.engines.vllm.lines import AnswerLines, CoreLine
from ownerserve.engines.vllm.scheduler_side.node_rpc import ADDRESS_FILE
from ownerserve.kv.errors import UNREADABLE
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.rpc import (
    ListHeld,
    PageIs,
    Probe,
    Reject,
    ReleaseSession,
    Said,
    Seed,
    Status,
    StatusIs,
)
from ownerserve.kv.wire.rpc import Request as RpcRequest
from ownerserve.kv.wire.status import (
    COUNT_MAX,
    ProfileStatement,
    WorkerLoad,
    WorkerStatus,
    load_statement,
    unit_statement,
)
from ownerserve.node.rpc.server import RpcClient

NO_CONNECTOR = "this vLLM runs without OwnerServe's connector: set --kv-transfer-config"
NO_ANSWER = "the engine core does not answer: it is starting or gone"


class AdmitBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]


class ReleaseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session_id: SessionId


class OwnerServeEndpoints:
    """vLLM makes one for each API server process."""

    name = "ownerserve"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._store: Path | None = None
        self._core: CoreLine | None = None
        self._state: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the routes to vLLM's FastAPI application."""
        app.add_api_route("/ownerserve/status", self.status, methods=["GET"])
        app.add_api_route("/ownerserve/inventory", self.inventory, methods=["GET"])
        app.add_api_route("/ownerserve/admit", self.admit, methods=["POST"])
        app.add_api_route("/ownerserve/release", self.release, methods=["POST"])
        app.add_middleware(AnswerLines, core=lambda: self._core)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Where this engine's store is, and who knows which models it serves."""
        self._state = state
        transfer = getattr(args, "kv_transfer_config", None)
        extra = getattr(transfer, "kv_connector_extra_config", None) or {}
        if getattr(transfer, "kv_connector", None) == "OwnerServeConnector" and "store" in extra:
            self._store = Path(extra["store"])
            self._core = CoreLine(self._store)

    async def status(self) -> Response:
        """The record of kv.wire.status."""
        return await self._asked(Status())

    async def inventory(self, request: Request) -> Response:
        """A page of kv.wire.inventory."""
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) < 19):
            return _json(400, {"error": f"after: {after!r} is no number; send a page's last, or 0"})
        return await self._asked(ListHeld(int(after)))

    def _served(self) -> tuple[str, ...]:
        """All names that this server answers to, adapters among them."""
        models = getattr(self._state, "openai_serving_models", None)
        names = [path.name for path in getattr(models, "base_model_paths", ())]
        return (*names, *getattr(models, "lora_requests", ()))

    async def admit(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=AdmitBody)
        except UNREADABLE as error:
            return _json(400, {"error": f'{error}; send {{"tokens": 1200}}'})
        return await self._asked(Probe(Seed(body.tokens)))

    async def release(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=ReleaseBody)
        except UNREADABLE as error:
            return _json(400, {"error": f'{error}; send {{"session_id": "s"}}'})
        return await self._asked(ReleaseSession(body.session_id))

    async def _asked(self, request: RpcRequest) -> Response:
        if self._store is None:
            return _json(503, {"error": NO_CONNECTOR})
        try:
            answer = await run_in_threadpool(ask, self._store, request)
        except (TimeoutError, OSError):
            return _json(503, {"error": NO_ANSWER})
        if isinstance(answer, Reject):
            return _json(429, answer)
        if isinstance(answer, StatusIs) and answer.profile is not None:
            return _json(200, _status(answer.status, answer.profile, self._served()))
        if isinstance(answer, PageIs):
            return _json(200, answer.page)
        return _json(200, answer)


def ask(store: Path, request: RpcRequest) -> Said:
    """Ask the engine core whose store this is. OSError: it has no desk; TimeoutError: silence."""
    client = RpcClient((store / ADDRESS_FILE).read_text().strip())
    try:
        return client.ask(request)
    finally:
        client.close()


def _status(load: WorkerLoad, profile: ProfileStatement, served: tuple[str, ...]) -> WorkerStatus:
    """The record, with the names by which the API server knows its models."""
    if served:
        profile = msgspec.structs.replace(profile, models=served)
    return WorkerStatus(unit=unit_statement(load.unit), load=load_statement(load), profile=profile)


def _json(status: int, body: Any) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
