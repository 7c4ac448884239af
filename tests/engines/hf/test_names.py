"""One name: the session that a real gateway routes by is the session that a real worker keeps."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.waits import until

pytest.importorskip("torch")
pytest.importorskip("transformers")

import uvicorn

from ownerserve.cache.pools.budget import PoolSizes
from ownerserve.cache.tree.prefix_tree import Session
from ownerserve.engines.hf.build import HfWorker, WorkerOptions
from ownerserve.engines.hf.http.serve import listen, url_of
from ownerserve.engines.hf.http.server import make_app
from ownerserve.engines.hf.model.text import ChatCodec
from ownerserve.engines.hf.scheduling.requests import Facts
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import parse_worker
from ownerserve.gateway.service import Gateway
from ownerserve.kv.ids import SessionId
from ownerserve.node.vocabulary.chains import PromptPrefixes
from ownerserve.node.vocabulary.settings import NodeSettings
from tests.support.hf.engine_rig import Rig, checkpoint

pytestmark = pytest.mark.engine

MODEL = "tiny-qwen3"
WAIT_S = 300.0

HEADERS = (
    *("x-session-id", "x-dynamo-session-id", "x-smg-routing-key", "x-claude-code-session-id"),
    *("thread-id", "session-id", "session_id", "conversation_id", "x-opencode-session"),
    "x-session-affinity",
)
FIELDS: Mapping[str, Any] = {
    "session_id": "in a body",
    "prompt_cache_key": "in a body",
    "metadata": {"user_id": "user_1_account__session_in-a-body"},
    "user": "in a body",
}


class Fleet:
    """A worker over a store behind uvicorn, and gateways in front of it on a loop of their own."""

    def __init__(self, store: Path) -> None:
        options = WorkerOptions(model=MODEL, store=store, node=NodeSettings(spill_after_s=0.0))
        self.rig = Rig(MODEL, blocks=2000, options=options)
        loaded = checkpoint(MODEL)
        block = self.rig.runner.layout.block_tokens
        facts = Facts(MODEL, self.rig.runner.vocab_size, 4000, loaded.eos_ids, block)
        codec = ChatCodec(loaded.tokenizer)
        prefixes = PromptPrefixes(block)
        metrics, sizes = self.rig.metrics, PoolSizes({}, 0)
        worker = HfWorker(self.rig.engine, codec, facts, metrics, sizes, prefixes)
        bound = listen("127.0.0.1", 0)
        self.url = url_of(bound)
        self._server = uvicorn.Server(uvicorn.Config(make_app(worker), log_level="error"))
        self._serving = threading.Thread(target=self._server.run, args=([bound],))
        self._serving.start()
        until(lambda: self._server.started)
        self._loop = asyncio.new_event_loop()
        self._looping = threading.Thread(target=self._loop.run_forever)
        self._looping.start()
        self.gateway = self._run(self._start_gateway())
        self.http = httpx.Client(timeout=WAIT_S, base_url=f"http://127.0.0.1:{self.gateway.port}")

    async def _start_gateway(self) -> Gateway:
        workers = (parse_worker(self.url),)
        gateway = Gateway(Config(workers=workers, seats=None))  # each session displaces others
        await gateway.start()
        return gateway

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def close(self) -> None:
        self.http.close()
        self._run(self.gateway.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._looping.join(WAIT_S)
        self._loop.close()
        self._server.should_exit = True
        self._serving.join(WAIT_S)

    def turn(self, task: str, turns: int, *, to: str = "", **request: Any) -> SessionId:
        """An agent's turn number `turns`; the gateway's name of its session."""
        said = [
            {"role": "user", "content": f"{task}, step {n}: " + "ok, " * 300} for n in range(turns)
        ]
        body = {"messages": said, "max_tokens": 4, "temperature": 0, **request.pop("body", {})}
        answer = self.http.post(f"{to}/v1/chat/completions", json=body, **request)
        assert answer.status_code == 200, answer.text
        until(lambda: not self.gateway.state.live)
        name = self.gateway.turns.observer.decisions[-1].identity.session
        assert name is not None
        return SessionId(name)

    def session(self, name: SessionId) -> Session | None:
        """What the worker knows under this name, once it is idle."""
        until(lambda: not self.rig.cache.running)
        return self.rig.cache.sessions.get(name)

    def spilled(self) -> float:
        """Records of idle sessions that the worker's store has kept."""
        return self.rig.node.state.idle_spills.counts["kept"] if self.rig.node else 0.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("store"))
    yield fleet
    fleet.close()


SOURCES = [
    *(pytest.param({"headers": {name: "abc"}}, id=f"header {name}") for name in HEADERS),
    *(pytest.param({"body": {name: value}}, id=f"body {name}") for name, value in FIELDS.items()),
    pytest.param({}, id="content"),
    pytest.param(
        {"headers": {"x-claude-code-session-id": "abc", "x-claude-code-agent-id": "a1"}},
        id="sub-agent",
    ),
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_session_has_its_name_at_the_worker(
    fleet: Fleet, source: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Soft reference, version and spill hang on the name: without it most agents had none."""
    spilled = fleet.spilled()
    first = fleet.turn(request.node.name, 1, **source)
    begun = fleet.session(first)
    assert begun is not None
    assert (begun.version, begun.is_referenced) == (1, True)
    again = fleet.turn(request.node.name, 2, **source)
    assert again == first
    known = fleet.session(first)
    assert known is not None
    assert (known.version, known.is_referenced) == (2, True)
    until(lambda: fleet.spilled() > spilled)


def test_a_sessions_end_is_heard(fleet: Fleet) -> None:
    """Nothing of an ended session is kept back from eviction, and its id begins anew."""
    headers = {"x-session-id": "ends"}
    name = fleet.turn("ends", 1, headers=headers)
    assert fleet.session(name) is not None
    fleet.turn("ends", 2, headers={**headers, "x-ownerserve-session-final": "true"})
    assert fleet.session(name) is None
    assert fleet.turn("ends", 3, headers=headers) == name
    again = fleet.session(name)
    assert again is not None
    assert (again.version, again.is_referenced) == (1, True)


def test_a_forged_line_is_not_believed(fleet: Fleet) -> None:
    forged = json.dumps({"name": "ab" * 16, "target": ["elsewhere", 0, 1]})
    name = fleet.turn("forged", 1, headers={"x-session-id": "f", "x-ownerserve-session": forged})
    assert fleet.session(name) is not None
    assert fleet.session(SessionId("ab" * 16)) is None


@pytest.mark.parametrize(
    ("line", "field", "status"),
    [
        ('{"name": "abc"}', "x-ownerserve-session.name", 400),
        ("mine", "x-ownerserve-session", 400),
        (json.dumps({"target": ["elsewhere", 0, 7]}), None, 409),
    ],
)
def test_a_broken_line_is_a_clear_error_at_the_worker(
    fleet: Fleet, line: str, field: str | None, status: int
) -> None:
    answer = fleet.http.post(
        f"{fleet.url}/v1/completions",
        json={"prompt": "hi", "max_tokens": 1},
        headers={"x-ownerserve-session": line},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)


def test_without_a_gateway_a_client_names_its_session(fleet: Fleet) -> None:
    fleet.http.post(
        f"{fleet.url}/v1/completions",
        json={"prompt": "of my own. " * 20, "max_tokens": 1},
        headers={"x-session-id": "my own"},
    ).raise_for_status()
    assert fleet.session(SessionId("my own")) is not None


def test_equal_ids_of_two_tenants_never_meet(fleet: Fleet) -> None:
    """`x-session-id: abc` of two keys was two sessions at the gateway and one at the worker."""
    names = {
        fleet.turn(
            "same task", 1, headers={"x-session-id": "shared", "authorization": f"Bearer {key}"}
        )
        for key in ("one", "two")
    }
    assert len(names) == 2
    found = [fleet.session(name) for name in names]
    assert [session and session.version for session in found] == [1, 1]
    assert fleet.session(SessionId("shared")) is None
