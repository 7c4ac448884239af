"""This endpoint plug-in serves `/ownerserve/*` on vLLM's own API server, where it is allowed.

    VLLM_PLUGINS=ownerserve vllm serve ...

    GET  /ownerserve/status     who it is, its load, what it can do (kv.wire.status)
    GET  /ownerserve/inventory?after=N  what its store holds, said after word N (kv.wire.inventory)
    POST /ownerserve/admit      {"tokens": 1200, "session_id": "s"} -> admitted, and what is here of
                                the session; or 429 and why
    POST /ownerserve/release    {"session_id": "s"}: the session has gone elsewhere

    ?rank=1 asks the engine core of a data-parallel rank; the first one answers otherwise

A request asks the engine core's RPC handler (scheduler_side/node_rpc.py) over loopback, found by
the address that the connector leaves in its store: one connection for all of them (`CorePort`).
vLLM's allow-list is for all plug-ins: whoever sets it names every other plug-in in use too.

`AnswerLines` puts the worker's line on vLLM's answers, as ASGI middleware:

    a turn comes, of parent, group, epoch, version, bring_from ── AskLine ──> engine core
    its answer's head, held until its body begins ── AskLine(request) ──> engine core
    x-ownerserve-answer, -mode, .. <── LineIs: unit, load, owner, mode, tip, brought ──┘
    /health's head ── AskLine ──> engine core ── LineIs: unit, load ──> x-ownerserve-answer

vLLM's request has no place for the first. They are told when the turn comes, and not again with its
answer: the session may have ended by then. A turn whose state is to be brought from elsewhere waits
for the core to have heard where. vLLM writes the head of a streamed answer before its
engine has seen the prompt; by the first byte of the body it is known what came of it.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zmq
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ownerserve.engines.vllm.api_news import InventoryAnswers, SharedNews, leave_out_of_log
from ownerserve.engines.vllm.flags import extra_of
from ownerserve.engines.vllm.ranks import home_of
from ownerserve.engines.vllm.scheduler_side.node_rpc import ADDRESS_FILE
from ownerserve.kv.errors import UNREADABLE, InvalidInput
from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.framed import AsyncFramedClient
from ownerserve.kv.wire.headers import (
    ANSWER_HEADER,
    BROUGHT_HEADER,
    LOST_TOKENS_HEADER,
    MODE_HEADER,
    NO_TURN_LINE,
    TURN_HEADER,
    TurnLine,
    decode_turn_line,
    encode_answer_line,
)
from ownerserve.kv.wire.rpc import (
    NEWS_WAIT_MS,
    AskLine,
    LineIs,
    ListHeld,
    PageIs,
    Probe,
    Reject,
    ReleaseSession,
    RpcRequest,
    Said,
    Seed,
    Status,
    StatusIs,
    decode_answer,
    encode,
)
from ownerserve.kv.wire.status import (
    COUNT_MAX,
    ProfileStatement,
    WorkerLoad,
    WorkerStatus,
    load_statement,
    unit_statement,
)
from ownerserve.node.rpc.server import READ_BYTES_MAX, RpcClient

NO_CONNECTOR = "this vLLM runs without OwnerServe's connector: set --kv-transfer-config"
NO_ANSWER = "the engine core does not answer: it is starting or gone"


ASK_S = 0.25
PAUSE_S = 1.0
"""How long a silent engine core is not asked again."""

SILENT_S = 4.0
"""Longer than the core holds a question for news."""

HEALTH = "/health"
_TURN, _ANSWER = TURN_HEADER.encode(), ANSWER_HEADER.encode()
_REQUEST = b"x-request-id"
"""A gateway's id of a request, by which vLLM names it too."""
_RANK = b"x-data-parallel-rank"
"""vLLM's header by which a request goes to an engine core."""

Send = Callable[[Any], Awaitable[None]]


class CoreLine:
    """A `CoreLine` asks the engine core whose store this is, on a thread, over the one connection
    owned here.

    A core that is silent costs the line and ASK_S of one answer a second, never an answer.
    """

    def __init__(self, store: Path) -> None:
        self._address = store / ADDRESS_FILE
        self._thread = ThreadPoolExecutor(1, "ownerserve-line")
        self._client: RpcClient | None = None
        self._again_s = 0.0

    async def ask(self, question: AskLine) -> Said | None:
        """Return the core's answer; None: it is silent."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, question)

    def tell(self, question: AskLine) -> None:
        """Tell the core what the question says; nobody waits for the answer."""
        self._thread.submit(self._ask, question)

    def close(self) -> None:
        """End the connection and the thread: nobody is asked any more."""
        self._thread.submit(self._hang_up)
        self._thread.shutdown()

    def _ask(self, question: AskLine) -> Said | None:
        if time.monotonic() < self._again_s:
            return None
        try:
            if self._client is None:
                self._client = RpcClient(self._address.read_text().strip(), timeout_s=ASK_S)
            return self._client.ask(question)
        except (OSError, zmq.ZMQError, InvalidInput):  # silent, gone: the address is read anew
            self._hang_up()
            self._again_s = time.monotonic() + PAUSE_S
            return None

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None


class CorePort:
    """A `CorePort` asks the engine core whose store this is whatever is asked on our routes, many
    questions at once, over the one connection owned here: a held one keeps no thread. Used on one
    event loop."""

    def __init__(self, store: Path) -> None:
        self._address = store / ADDRESS_FILE
        self._client: AsyncFramedClient | None = None
        self._news = SharedNews(self._ask)

    async def ask(self, question: RpcRequest) -> Said:
        """Return the core's answer. Raises OSError when there is none to ask, TimeoutError when it
        is silent."""
        if isinstance(question, ListHeld):
            return await self._news.answer(question)
        return await self._ask(question)

    async def _ask(self, question: RpcRequest) -> Said:
        client = self._client
        if client is None:
            address = self._address.read_text().strip()
            client = self._client = AsyncFramedClient(
                address, key=None, read_bytes_max=READ_BYTES_MAX, unclaimed=_too_late
            )
        data = await client.ask(encode(question), within_s=SILENT_S, repeat_s=SILENT_S)
        if data is None:  # gone: the address is read anew
            if self._client is client:
                self.close()
            raise TimeoutError(NO_ANSWER)
        return decode_answer(data)

    def close(self) -> None:
        """End the connection; who waits for an answer gets none."""
        if self._client is not None:
            self._client.close()
        self._client = None


def _too_late(data: bytes) -> None:
    """Nobody waits for this answer any more, and it promises nothing."""


class AnswerLines:
    """`AnswerLines` is ASGI middleware that puts the line on answers to turns that gateways sent
    and on /health, on no others.

    `core` says whom to ask of a request; None: nobody yet, or ever, or it can't be told.
    """

    def __init__(self, app: Any, *, core: Callable[[Any], CoreLine | None]) -> None:
        self._app = app
        self._core = core

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        line = _asks_for(scope)
        core = self._core(scope) if line is not None else None
        if core is None or line is None:
            await self._app(scope, receive, send)
            return
        owning = line.parent or line.epoch or line.group or line.version
        if line.name is not None and (owning or line.bring_from):
            group, version = line.group or "", line.version or 0
            coming = AskLine(line.name, line.parent, group, line.epoch, version)
            if line.bring_from is None:
                core.tell(coming)
            else:  # as the engine hears of the turn it looks there, or nowhere
                await core.ask(replace(coming, bring_from=line.bring_from))
        answer = AskLine(line.name, request_id=(_header(scope, _REQUEST) or b"").decode("latin-1"))
        head: Any = None

        async def sent(message: Any) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message
                return
            if head is not None:
                is_served = head["status"] < HTTPStatus.BAD_REQUEST
                said = await core.ask(answer if is_served else AskLine(line.name))
                if isinstance(said, LineIs):
                    told = [(_ANSWER, encode_answer_line(said.line)), *_for_people(said)]
                    head = {**head, "headers": [*head.get("headers", ()), *told]}
                await send(head)
                head = None
            await send(message)

        await self._app(scope, receive, sent)


def _for_people(said: LineIs) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers that say to people what came of the prompt, as an hf worker's do."""
    line = said.line
    if line.mode is not None:
        yield MODE_HEADER.encode(), line.mode.value.encode()
    if line.lost_tokens:
        yield LOST_TOKENS_HEADER.encode(), str(line.lost_tokens).encode()
    if said.brought:
        yield BROUGHT_HEADER.encode(), said.brought.encode()


def _asks_for(scope: Any) -> TurnLine | None:
    """Return what a gateway says of the turn, on whose answer the line goes; of /health, nothing.
    None: it goes on no answer to this, which no gateway sent, or not in a form that is read."""
    if scope["type"] != "http":
        return None
    if scope["path"].removeprefix(scope.get("root_path", "")) == HEALTH:
        return NO_TURN_LINE
    value = _header(scope, _TURN)
    try:
        return None if value is None else decode_turn_line(value.decode("latin-1"))
    except InvalidInput:
        return None


def _header(scope: Any, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


class AdmitBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An `AdmitBody` is the body of POST /ownerserve/admit."""

    tokens: Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
    session_id: SessionId | None = None


class ReleaseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `ReleaseBody` is the body of POST /ownerserve/release."""

    session_id: SessionId


class RanksStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A ranks' statement tells how many ranks of each kind share the work of this server."""

    data_parallel: int
    pipeline: int
    tensor: int

    @classmethod
    def of(cls, args: Namespace) -> RanksStatement:
        """Read the server's arguments."""

        def sized(field: str) -> int:
            return int(getattr(args, field, None) or 1)

        return cls(
            data_parallel=sized("data_parallel_size"),
            pipeline=sized("pipeline_parallel_size"),
            tensor=sized("tensor_parallel_size"),
        )


class VllmStatus(WorkerStatus, frozen=True, kw_only=True):
    """A `VllmStatus` is the record of kv.wire.status with what only vLLM's workers add."""

    ranks: RanksStatement


class OwnerServeEndpoints:
    """`OwnerServeEndpoints` is the endpoint plug-in; vLLM makes one for each API server process."""

    name = "ownerserve"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._cores: dict[int, CoreLine] = {}
        self._ports: dict[int, CorePort] = {}
        self._state: Any = None
        self._ranks = RanksStatement(data_parallel=1, pipeline=1, tensor=1)

    def attach_router(self, app: Any) -> None:
        """Add the routes to vLLM's FastAPI application."""
        app.add_api_route("/ownerserve/status", self.status, methods=["GET"])
        app.add_api_route("/ownerserve/admit", self.admit, methods=["POST"])
        app.add_api_route("/ownerserve/release", self.release, methods=["POST"])
        app.add_middleware(AnswerLines, core=self._core_of)
        app.add_middleware(InventoryAnswers, news=self.inventory)
        leave_out_of_log()

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Remember where this engine's store is, and who knows which models it serves."""
        self._state, self._ranks = state, RanksStatement.of(args)
        for line in self._cores.values():
            line.close()
        for port in self._ports.values():
            port.close()
        transfer = getattr(args, "kv_transfer_config", None)
        extra = extra_of(
            getattr(transfer, "kv_connector", None),
            getattr(transfer, "kv_connector_extra_config", None),
        )
        if extra is not None and "store" in extra:
            store = Path(extra["store"])
            homes = {rank: home_of(store, rank) for rank in ranks_behind(args)}
            self._cores = {rank: CoreLine(home) for rank, home in homes.items()}
            self._ports = {rank: CorePort(home) for rank, home in homes.items()}

    def _core_of(self, scope: Any) -> CoreLine | None:
        """Return the engine core that serves a turn: the only one, or that of the rank that the
        request names. Where vLLM chooses among several nobody hears which."""
        if len(self._cores) == 1:
            return next(iter(self._cores.values()))
        named = (_header(scope, _RANK) or b"").decode("latin-1")
        return self._cores.get(int(named)) if _is_number(named) else None

    async def status(self, request: Request) -> Response:
        """Answer with the record of kv.wire.status."""
        return await self._asked(Status(), request.query_params)

    async def inventory(self, query: Mapping[str, str]) -> Response:
        """Answer with a page of kv.wire.inventory."""
        after = query.get("after", "0")
        if not _is_number(after):
            return _json(400, {"error": f"after: {after!r} is no number; send a page's last, or 0"})
        wait_ms = query.get("wait_ms", "0")
        if not _is_number(wait_ms):
            return _json(400, {"error": f"wait_ms: {wait_ms!r} is no number; send milliseconds"})
        asked = ListHeld(int(after), min(int(wait_ms), NEWS_WAIT_MS))
        return await self._asked(asked, query)

    def _served(self) -> tuple[str, ...]:
        """Return all names that this server answers to, adapters among them."""
        models = getattr(self._state, "openai_serving_models", None)
        names = [path.name for path in getattr(models, "base_model_paths", ())]
        return (*names, *getattr(models, "lora_requests", ()))

    async def admit(self, request: Request) -> Response:
        """Answer whether a prompt of so many tokens would be let in now, and what is here of its
        session."""
        try:
            body = msgspec.json.decode(await request.body(), type=AdmitBody)
        except UNREADABLE as error:
            return _json(400, {"error": f'{error}; send {{"tokens": 1200}}'})
        return await self._asked(Probe(Seed(body.tokens), body.session_id), request.query_params)

    async def release(self, request: Request) -> Response:
        """Let a session go that has moved elsewhere."""
        try:
            body = msgspec.json.decode(await request.body(), type=ReleaseBody)
        except UNREADABLE as error:
            return _json(400, {"error": f'{error}; send {{"session_id": "s"}}'})
        return await self._asked(ReleaseSession(body.session_id), request.query_params)

    async def _asked(self, question: RpcRequest, query: Mapping[str, str]) -> Response:
        """Ask the engine core of the data-parallel rank in the query, by default the first."""
        if not self._ports:
            return _json(503, {"error": NO_CONNECTOR})
        named = query.get("rank", str(min(self._ports)))
        port = self._ports.get(int(named)) if _is_number(named) else None
        if port is None:
            known = ", ".join(map(str, self._ports))
            return _json(400, {"error": f"rank: {named!r} is not served here; use one of {known}"})
        try:
            answer = await port.ask(question)
        except (TimeoutError, OSError):
            return _json(503, {"error": NO_ANSWER})
        if isinstance(answer, Reject):
            return _json(429, answer)
        if isinstance(answer, StatusIs) and answer.profile is not None:
            record = _status(answer.status, answer.profile, self._served(), ranks=self._ranks)
            return _json(200, record)
        if isinstance(answer, PageIs):
            return _json(200, answer.page)
        return _json(200, answer)


def ranks_behind(args: Namespace) -> range:
    """Return the data-parallel ranks whose engine cores an API server with these arguments serves:
    all, or the one that it was started for."""
    own = getattr(args, "data_parallel_rank", None)
    if own is not None:
        return range(int(own), int(own) + 1)
    return range(int(getattr(args, "data_parallel_size", None) or 1))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _status(
    load: WorkerLoad,
    profile: ProfileStatement,
    served: tuple[str, ...],
    *,
    ranks: RanksStatement,
) -> VllmStatus:
    """Return the record, with the names by which the API server knows its models."""
    if served:
        profile = msgspec.structs.replace(profile, models=served)
    return VllmStatus(
        unit=unit_statement(load.unit),
        load=load_statement(load),
        profile=profile,
        ranks=ranks,
    )


def _json(status: int, body: Any) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
