"""The worker's line on a vLLM server's answers and on /health: our middleware over an application
that answers as vLLM's does, an engine core's RPC handler behind it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ownerserve.engines.vllm.plugin import AnswerLines, CoreLine
from ownerserve.engines.vllm.scheduler_side.node_rpc import EngineLimits, NodeRpcHandler
from ownerserve.engines.vllm.scheduler_side.owning import PromptCame, SessionsHere
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address, open_access
from ownerserve.gateway.workers.health import HealthMonitor
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import ExecutionMode, RoutingUnit
from ownerserve.kv.wire.headers import (
    LenderAddress,
    TurnLine,
    encode_turn_line,
    read_brought,
)
from ownerserve.kv.wire.rpc import AskLine
from ownerserve.router.messages import Stamped, WorkerUp
from tests.support.net import free_port
from tests.support.waits import until

NAME = "5" * 32
UNIT = RoutingUnit(WorkerId("v0"), 1, Incarnation(1_700_000_000_000_000_007))
TIP = PrefixHash(bytes(range(32)))


def limits() -> EngineLimits:
    return EngineLimits(unit=UNIT, model="m", sequence_tokens=1000, max_waiting=2, token_bytes=10)


def request(session: str, request_id: str = "") -> Any:
    """vLLM's request, as far as it is read."""
    return SimpleNamespace(session_id=session, request_id=request_id)


class Core:
    """An engine core, as far as it speaks, with an application in front that plays vLLM's."""

    def __init__(self, store: Path) -> None:
        self.sessions = SessionsHere(None)
        self.met: list[AskLine | None] = []
        """What was known of each turn's lender as its engine heard of it."""
        holding: Any = None  # nothing is asked of the store
        self.handler = NodeRpcHandler(limits(), holding, self.sessions)
        self.handler.open(store)
        routes = [
            Route("/v1/completions", self.turn, methods=["POST"]),
            Route("/health", lambda _: Response()),
        ]
        self.asked = CoreLine(store)
        self.app = AnswerLines(Starlette(routes=routes), core=lambda _: self.asked)

    async def turn(self, http: Request) -> Response:
        """As vLLM's: the head of a stream goes before its engine has seen the prompt."""
        self.met.append(self.sessions.brought_from(request(NAME)))
        body = await http.json()
        if body.get("is_wrong"):
            return JSONResponse({}, 400)
        if not body.get("stream"):
            self.begin(http.headers["x-request-id"])
            return JSONResponse({"text": "so on"})
        return StreamingResponse(self.stream(http.headers["x-request-id"]))

    async def stream(self, request_id: str) -> AsyncIterator[str]:
        await asyncio.sleep(0.05)
        self.begin(request_id)
        yield "so "
        yield "on"

    def begin(self, request_id: str) -> None:
        """The first steps of an answer's choices, as the scheduler's thread tells them: the second
        meets what the first has computed."""
        cold = PromptCame(f"0_cmpl-{request_id}-0-ab", ExecutionMode.RESEED, 64, TIP, 96)
        met = PromptCame(f"1_cmpl-{request_id}-0-ab", ExecutionMode.DIRECT_APPEND, 0, TIP, 96)
        for came in (cold, met):
            self.sessions.begun(request(NAME), came)

    def line_of(self, request_id: str, **body: Any) -> dict[str, Any] | None:
        """The line on the answer to a turn that a gateway sends."""
        headers = {"x-ownerserve-session": json.dumps({"name": NAME}), "x-request-id": request_id}
        answer = asyncio.run(_post(self.app, headers, body))
        value = answer.headers.get("x-ownerserve-answer")
        return None if value is None else json.loads(value)


async def _post(app: Any, headers: dict[str, str], body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://vllm"
    ) as client:
        return await client.post("/v1/completions", headers=headers, json=body)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    one = Core(tmp_path)
    yield one
    one.asked.close()
    one.handler.close()


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_came_of_a_prompt_is_said_on_its_answer(core: Core, is_stream: bool) -> None:
    line = core.line_of("a1", stream=is_stream)
    assert line is not None
    said = {name: line[name] for name in ("mode", "lost_tokens", "tip", "tokens")}
    assert said == {"mode": "reseed", "lost_tokens": 64, "tip": TIP.hex(), "tokens": 96}


def test_people_read_what_came_of_it_on_lines_of_their_own(core: Core) -> None:
    brought = {"peer": 64, "disk": 32}
    came = PromptCame("cmpl-a1-0-ab", ExecutionMode.FETCH, 7, TIP, 96, brought)
    core.sessions.begun(request(NAME), came)
    headers = {"x-ownerserve-session": json.dumps({"name": NAME}), "x-request-id": "a1"}
    told = asyncio.run(_post(core.app, headers, {})).headers
    assert told["x-ownerserve-mode"] == "fetch"
    assert told["x-ownerserve-lost-tokens"] == "7"
    assert read_brought(told["x-ownerserve-brought-tokens"]) == brought
    told = asyncio.run(_post(core.app, headers, {"is_wrong": True})).headers
    assert not {"x-ownerserve-mode", "x-ownerserve-brought-tokens"} & told.keys()


def test_an_error_says_nothing_of_an_earlier_prompt(core: Core) -> None:
    core.begin("a1")
    line = core.line_of("a1", is_wrong=True)
    assert line is not None and line["unit"] == ["v0", 1, UNIT.incarnation]
    assert not {"mode", "tip"} & line.keys()
    assert core.line_of("a1", stream=False)["mode"] == "reseed"  # type: ignore[index]


def test_two_turns_of_a_session_at_once_are_told_apart(core: Core) -> None:
    cold = PromptCame("cmpl-first-0-ab", ExecutionMode.COLD_PREFILL)
    core.sessions.begun(request(NAME), cold)
    assert core.line_of("second")["mode"] == "reseed"  # type: ignore[index]
    asked = [_asked("second"), _asked("first"), _asked("first")]
    assert [core.sessions.came_of(one) for one in asked] == [None, cold, None], "each once"


def test_who_holds_more_of_a_coming_prompt_is_told_before_its_turn(core: Core) -> None:
    holder = LenderAddress(RoutingUnit(WorkerId("v1"), 0, Incarnation(3)), "tcp://127.0.0.1:5")
    line = TurnLine(name=SessionId(NAME), bring_from=holder, parent=SessionId("6" * 32))
    headers = {"x-ownerserve-session": encode_turn_line(line).decode(), "x-request-id": "a1"}
    asyncio.run(_post(core.app, headers, {}))
    (told,) = core.met
    assert told is not None and (told.bring_from, told.parent) == (holder, line.parent)
    assert core.sessions.brought_from(request(NAME)) is None, "the next turn is another's matter"


def test_what_nobody_asks_about_is_forgotten(core: Core) -> None:
    for number in range(20):
        core.begin(f"n{number}")
    core.sessions.begun(request("a client's own"), PromptCame("x", ExecutionMode.SEED))
    assert core.sessions.came_of(_asked("n2-")) is None
    assert core.sessions.came_of(_asked("n19-")) is not None


def test_a_gateways_probe_reads_unit_and_load_on_health(core: Core) -> None:
    """Where `/ownerserve/` is not let through to the worker, and `/health` is."""
    core.handler.arrived("one", 300)
    core.handler.stepped({"one": 200}, free_tokens=300, total_tokens=800)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(core.app, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    address = Address("127.0.0.1", port, models=("m",))
    config = Config(workers=(address,))
    monitor = HealthMonitor(address, config, access=open_access(None, None), tell=lambda news: None)
    try:
        up, stamped = asyncio.run(monitor.probe())
    finally:
        server.should_exit = True
        thread.join(10)
    assert isinstance(up, WorkerUp) and isinstance(stamped, Stamped)
    assert (up.dp_rank, up.incarnation) == (UNIT.dp_rank, UNIT.incarnation)
    load = stamped.status
    assert (load.pending_prefill_tokens, load.running_sequences) == (200, 1)
    assert load.kv_bytes_total == 8000


def _asked(request_id: str) -> AskLine:
    return AskLine(SessionId(NAME), request_id=request_id)
