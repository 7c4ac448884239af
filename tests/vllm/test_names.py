"""One name: what the gateway calls a session, vLLM's scheduler and our connector do too."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from ownerserve.kv.ids import SessionId
from ownerserve.kv.wire.headers import TurnLine, session_id_of
from ownerserve.kv.wire.rpc import Status, StatusIs
from tests.support.vllm import connectors, tiny
from tests.support.vllm.asking import ask
from tests.support.vllm.rig import Rig, next_turn, settle
from tests.support.vllm.serving import WarmServers, gateway

pytestmark = pytest.mark.vllm

NAME = TurnLine(name=SessionId("ab" * 16))
LAST = TurnLine(name=NAME.name, final=True)
AGENTS: dict[str, dict[str, Any]] = {
    "header": {"headers": {"x-claude-code-session-id": "abc"}},
    "vLLM's header": {"headers": {"x-session-id": "abc"}},
    "another tenant": {"headers": {"x-session-id": "abc", "authorization": "Bearer other"}},
    "body": {"body": {"session_id": "abc"}},
    "both": {"headers": {"thread-id": "abc"}, "body": {"session_id": "abc"}},
    "vLLM's arguments": {"body": {"vllm_xargs": {"session_id": "abc"}, "user": "abc"}},
    "content": {},
}


def test_the_gateways_name_reaches_the_connector(
    rig: Rig, warm: WarmServers, store: Path, tmp_path: Path
) -> None:
    """Through the whole server, as our own events of what is stored tell it."""
    endpoint = f"ipc://{tempfile.mkdtemp(prefix='kv-')}/e"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    flags = ("--kv-events-config", json.dumps(events))
    model = rig.checkpoint("qwen3")
    with (
        warm.serve(model, connectors.ours(store), tmp_path / "vllm.log", *flags) as worker,
        gateway([worker.url], tmp_path / "gateway") as (url, admin),
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
        httpx.Client(timeout=120) as http,
    ):
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        names = {}
        for agent, said in AGENTS.items():
            for turns in (1, 2):
                talk = [
                    f"{agent}, step {n}: " + "so on, " * (160 // (9 * n + 1)) for n in range(turns)
                ]
                body = {"messages": [{"role": "user", "content": text} for text in talk]}
                body |= {"model": "tiny", "max_tokens": 4, **said.get("body", {})}
                headers = said.get("headers", {})
                answer = http.post(f"{url}/v1/chat/completions", json=body, headers=headers)
                answer.raise_for_status()
                decided = http.get(f"{admin}/decisions?last=1").json()["decisions"][0]
                assert names.setdefault(agent, decided["session"]) == decided["session"]
        told = set(sessions(subscriber))
    assert len(set(names.values())) == len(AGENTS)
    assert told == set(names.values())


def sessions(subscriber: Any) -> Iterator[str]:
    """Of all events of blocks, vLLM's own and ours."""
    while subscriber.poll(10_000):
        _, _, payload = subscriber.recv_multipart()
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                yield event["session_id"]


def test_a_sessions_end_gives_up_its_blocks(rig: Rig, store: Path) -> None:
    worker = rig.worker("qwen3", connectors.ours(store))
    prompt = tiny.prompt(300, seed=71)
    first = worker.generate(prompt, session=session_id_of(NAME))
    settle(worker)
    assert worker.hook("connector_status")["wished_blocks"] >= 300 // 32
    worker.generate(next_turn(prompt, first, seed=71), session=session_id_of(LAST))
    settle(worker)
    assert worker.hook("connector_status")["wished_blocks"] == 0


def test_two_workers_of_one_model_say_who_they_are(rig: Rig, tmp_path: Path) -> None:
    """Both were called by their model."""
    found = []
    for number, more in enumerate(({}, {}, {"worker_id": "gpu-0"})):
        store = tmp_path / str(number)
        rig.worker("qwen3", connectors.ours(store, **more)).generate(tiny.prompt(40, seed=72))
        answer = ask(store, Status())
        assert isinstance(answer, StatusIs)
        found.append(answer.status.unit.worker)
    assert len(set(found)) == 3
    assert found[2] == "gpu-0"
