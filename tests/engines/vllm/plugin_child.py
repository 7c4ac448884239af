"""Runs in vLLM's environment: its own loader, an application, the routes, a desk behind them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def install(folder: Path) -> None:
    """A distribution, as far as entry points go."""
    info = folder / "ownerserve-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: ownerserve\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(os.environ["ENTRY_POINTS"])
    sys.path.insert(0, str(folder))


class Nothing:
    """What a store without a session tells."""

    def page(self, after: int, unit: Any) -> Any:
        from concurrent.futures import Future

        from ownerserve.kv.wire.inventory import Page
        from ownerserve.kv.wire.rpc import PageIs

        answer: Any = Future()
        answer.set_result(PageIs(Page(unit.incarnation, last=after)))
        return answer


def make_desk() -> Any:
    from ownerserve.engines.vllm.desk import Desk, Limits
    from ownerserve.engines.vllm.owning import SessionsHere
    from ownerserve.kv.ids import Incarnation, WorkerId
    from ownerserve.kv.messages import RoutingUnit

    limits = Limits(
        unit=RoutingUnit(WorkerId("w1"), 0, Incarnation(7)),
        model="m",
        sequence_tokens=1000,
        max_waiting=2,
        token_bytes=10,
        sequence_bytes=70,
        spec_digest="ab",
    )
    return Desk(limits, Nothing(), SessionsHere(None))


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


def main(folder: Path) -> None:
    install(folder)
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.plugins.endpoint_plugins.interface import (
        attach_endpoint_plugins,
        init_endpoint_plugins_state,
    )

    app = FastAPI()
    attach_endpoint_plugins(app, ("generate",))
    client = TestClient(app)
    report: dict[str, object] = {"plugins": [p.name for p in app.state.endpoint_plugins]}
    if not app.state.endpoint_plugins:
        print(json.dumps(report))
        return

    def ask(path: str, body: object = None) -> tuple[int, object]:
        answer = client.get(path) if body is None else client.post(path, json=body)
        return answer.status_code, answer.json()

    report["no connector"] = ask("/ownerserve/status")
    store = folder / "store"
    transfer = SimpleNamespace(
        kv_connector="OwnerServeConnector", kv_connector_extra_config={"store": str(store)}
    )
    args = Namespace(kv_transfer_config=transfer)
    asyncio.run(init_endpoint_plugins_state(None, app.state, args))
    report["no engine"] = ask("/ownerserve/status")

    desk = make_desk()
    desk.open(store)
    desk.arrived("one", 300)
    desk.arrived("two", 50)
    desk.stepped({"one": 200}, free_tokens=300, evictable_tokens=400, total_tokens=800)
    desk.measured(*measured())
    report["status"] = ask("/ownerserve/status")
    report["inventory"] = ask("/ownerserve/inventory?after=7")
    report["no number"] = ask("/ownerserve/inventory?after=-1")
    report["admit"] = ask("/ownerserve/admit", {"tokens": 500})
    report["too long"] = ask("/ownerserve/admit", {"tokens": 1001})
    report["no room"] = ask("/ownerserve/admit", {"tokens": 900})
    report["malformed"] = ask("/ownerserve/admit", {"tokenz": 1})
    report["absurd"] = [
        ask("/ownerserve/admit", {"tokens": tokens}) for tokens in (-1, 10**30, 1 << 54)
    ]
    desk.arrived("three", 1)
    desk.stepped({}, free_tokens=700, total_tokens=800)
    report["queue full"] = ask("/ownerserve/admit", {"tokens": 1})
    report["release"] = ask("/ownerserve/release", {"session_id": "s"})
    report["released"] = [desk.released(), desk.released()]
    for request in ("one", "two", "three"):
        desk.gone(request)
    desk.stepped({}, free_tokens=800, total_tokens=800)
    report["idle"] = ask("/ownerserve/status")
    desk.close()
    report["closed"] = ask("/ownerserve/status")
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
