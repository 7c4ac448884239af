"""Runs in vLLM's environment: its own loader, an application, the routes, a handler behind them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if os.environ.get("OWNERSERVE_CUT"):
    import tests.support.kills.cut_fields  # noqa: F401


class Nothing:
    """What a store without a session tells."""

    def page(self, after: int, unit: Any, *, wait_s: float) -> Any:
        from concurrent.futures import Future

        from ownerserve.kv.wire.inventory import Page
        from ownerserve.kv.wire.rpc import PageIs

        answer: Any = Future()
        answer.set_result(PageIs(Page(unit.incarnation, floor=round(1e3 * wait_s), last=after)))
        return answer


class Listening:
    """Who hears what is said of turns, and owns nothing."""

    owns = False

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []

    def heard(self, asked: Any) -> None:
        self.asked.append([asked.session_id, asked.parent, asked.group])

    def came_of(self, asked: Any) -> None:
        """Nothing is known of any prompt."""

    def release(self, asked: Any) -> Any:
        from ownerserve.kv.wire.rpc import Released

        return Released()


def make_handler(sessions: Listening) -> Any:
    from ownerserve.engines.vllm.scheduler_side.node_rpc import EngineLimits, NodeRpcHandler
    from ownerserve.kv.ids import Incarnation, WorkerId
    from ownerserve.kv.messages import RoutingUnit

    limits = EngineLimits(
        unit=RoutingUnit(WorkerId("w1"), 0, Incarnation(7)),
        model="m",
        sequence_tokens=1000,
        max_waiting=2,
        token_bytes=10,
        sequence_bytes=70,
        spec_digest="ab",
    )
    return NodeRpcHandler(limits, Nothing(), sessions)  # type: ignore[arg-type]


def measured() -> tuple[Any, list[Any]]:
    from ownerserve.kv.wire.status import SpeedStatement, TierStatement

    speed = SpeedStatement(
        prefill_pass_ms=1,
        prefill_token_ms=2,
        prefill_attention_ms=0,
        step_ms=3,
        step_ms_per_sequence=4,
    )
    return speed, [TierStatement(name="disk", latency_ms=1, bytes_per_ms=5)]


class Server:
    """vLLM's application with the plug-ins that it loads, and who asks it."""

    def __init__(self) -> None:
        from fastapi import FastAPI
        from fastapi.testclient import TestClient
        from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins

        self.app = FastAPI()
        # As vLLM's own routes, which are there before plug-ins are asked.
        self.app.add_api_route("/v1/completions", lambda: {"text": "so on"}, methods=["POST"])
        self.app.add_api_route("/health", lambda: {"is": "well"}, methods=["GET"])
        attach_endpoint_plugins(self.app, ("generate",))
        self._client = TestClient(self.app)
        self._client.__enter__()  # one event loop for all that is asked, as a server has

    def init(self, store: Path) -> None:
        """As vLLM does once its arguments are known."""
        from vllm.plugins.endpoint_plugins.interface import init_endpoint_plugins_state

        ours = {
            "kv_connector": "OwnerServeConnector",
            "kv_connector_extra_config": {"store": str(store)},
        }
        children = [{"kv_connector": "NixlConnector"}, ours]
        transfer = SimpleNamespace(
            kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children}
        )
        sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 4}
        args = Namespace(kv_transfer_config=transfer, **sizes)
        asyncio.run(init_endpoint_plugins_state(None, self.app.state, args))

    def ask(self, path: str, body: object = None) -> tuple[int, object]:
        client = self._client
        answer = client.get(path) if body is None else client.post(path, json=body)
        return answer.status_code, answer.json()

    def health(self) -> object:
        """The line on /health."""
        line = self._client.get("/health").headers.get("x-ownerserve-answer")
        return line and json.loads(line)

    def turn(self, told: str | None) -> list[Any]:
        """An answer's status, its line, and seconds."""
        headers = {} if told is None else {"x-ownerserve-session": told}
        began = time.monotonic()
        answer = self._client.post("/v1/completions", json={}, headers=headers)
        line = answer.headers.get("x-ownerserve-answer")
        return [answer.status_code, line and json.loads(line), time.monotonic() - began]


def main(folder: Path) -> None:
    server = Server()
    loaded = server.app.state.endpoint_plugins
    report: dict[str, object] = {"plugins": [plugin.name for plugin in loaded]}
    if loaded:
        play(server, folder / "store", report)
    print(json.dumps(report))


def play(server: Server, store: Path, report: dict[str, object]) -> None:
    """What is answered with no connector, no engine core, one, and one that is gone."""
    ask, turn = server.ask, server.turn
    session = json.dumps({"name": "5" * 32})
    report["turn without a core"] = turn(session)
    report["no connector"] = ask("/ownerserve/status")
    server.init(store)
    report["no engine"] = ask("/ownerserve/status")
    report["turn, silent core"] = turn(session)
    time.sleep(1.1)  # it is asked again after a pause
    sessions = Listening()
    handler = make_handler(sessions)
    handler.open(store)
    handler.arrived("one", 300)
    handler.arrived("two", 50)
    handler.stepped({"one": 200}, free_tokens=300, evictable_tokens=400, total_tokens=800)
    handler.measured(*measured())
    report["status"] = ask("/ownerserve/status")
    report["turn"] = turn(session)
    report["health"] = server.health()
    turn(json.dumps({"name": "5" * 32, "parent": "6" * 32, "group": "7" * 32}))
    report["heard"] = list(sessions.asked)
    report["nobody's turn"] = turn("{}")
    report["turn, bad line"] = turn("{")
    report["turn of no gateway"] = turn(None)
    report["inventory"] = ask("/ownerserve/inventory?after=7")
    report["news"] = ask("/ownerserve/inventory?after=9&wait_ms=30")
    report["no number"] = ask("/ownerserve/inventory?after=-1")
    report["admit"] = ask("/ownerserve/admit", {"tokens": 500})
    report["too long"] = ask("/ownerserve/admit", {"tokens": 1001})
    report["malformed"] = ask("/ownerserve/admit", {"tokenz": 1})
    report["absurd"] = [
        ask("/ownerserve/admit", {"tokens": tokens}) for tokens in (-1, 10**30, 1 << 54)
    ]
    handler.arrived("three", 1)
    handler.stepped({}, free_tokens=700, total_tokens=800)
    report["queue full"] = ask("/ownerserve/admit", {"tokens": 1})
    report["release"] = ask("/ownerserve/release", {"session_id": "s"})
    report["released"] = [handler.released(), handler.released()]
    for request in ("one", "two", "three"):
        handler.gone(request)
    handler.stepped({}, free_tokens=800, total_tokens=800)
    report["idle"] = ask("/ownerserve/status")
    handler.close()
    report["turn, core gone"] = turn(session)
    report["closed"] = ask("/ownerserve/status")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
