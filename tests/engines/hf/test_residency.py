"""Sessions find their state again: real workers with stores, a real gateway, restarts in any order.

A worker says what it holds below and on its device (`/ownerserve/inventory`); the gateway reads it
and sends a session where its state lies, whatever was restarted, in whatever order.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.waits import until_async

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import uvicorn  # noqa: E402

from ownerserve.engines.hf.build import HfWorker, WorkerOptions, build_worker  # noqa: E402
from ownerserve.engines.hf.http.serve import listen, url_of  # noqa: E402
from ownerserve.engines.hf.http.server import make_app  # noqa: E402
from ownerserve.gateway.config import Config  # noqa: E402
from ownerserve.gateway.http.access import parse_worker  # noqa: E402
from ownerserve.gateway.receipts import ReceiptForm  # noqa: E402
from ownerserve.gateway.service import Gateway  # noqa: E402
from ownerserve.kv.messages import Tier  # noqa: E402
from ownerserve.kv.wire.headers import read_brought  # noqa: E402
from ownerserve.node.storage.limits import StoreLimits  # noqa: E402
from ownerserve.node.vocabulary.settings import NodeSettings  # noqa: E402
from ownerserve.router.settings import DEFAULTS  # noqa: E402
from ownerserve.store.disk.snapshot import StoreSnapshot  # noqa: E402
from ownerserve.store.format.segment import segment_path  # noqa: E402
from tests.support.hf.engine_rig import text  # noqa: E402

pytestmark = pytest.mark.engine

MODEL = "tiny-qwen3"
PROMPT_TOKENS, NEW_TOKENS = 900, 40
WAIT_S = 300.0
SPILL_S = 0.05
SHORT_ANSWERS = msgspec.structs.replace(DEFAULTS, output_tokens=4)
"""As they are here: else a gateway that begins anew prices answers of several hundred tokens, and
what two busy cores measured of a decode step decides alone."""


class Life:
    """One life of a worker over its store, on the port that it keeps."""

    def __init__(self, store: Path | None, port: int = 0, *, kv_bytes: int = 16 << 20) -> None:
        torch.set_num_threads(1)
        options = WorkerOptions(
            model=MODEL,
            kv_bytes=kv_bytes,
            max_running=4,
            store=store,
            store_limits=StoreLimits(upkeep_s=0.0),
            node=NodeSettings(spill_after_s=SPILL_S),
        )
        self.worker: HfWorker = build_worker(options)
        bound: socket.socket = listen("127.0.0.1", port)
        self.url = url_of(bound)
        self.port: int = bound.getsockname()[1]
        config = uvicorn.Config(
            make_app(self.worker), log_level="error", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([bound],))
        self._thread.start()
        until = time.monotonic() + WAIT_S
        while not self._server.started:
            assert time.monotonic() < until
            time.sleep(0.01)

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def incarnation(self) -> int:
        return self.worker.engine.latest.unit.incarnation

    def inventory(self, after: int = 0) -> dict[str, Any]:
        answer = httpx.get(
            f"{self.url}/ownerserve/inventory", params={"after": after}, timeout=WAIT_S
        )
        page: dict[str, Any] = answer.raise_for_status().json()
        return page

    def held(self, tier: str) -> dict[str, int]:
        """Tokens of each session in `tier`, as the worker says."""
        words = self.inventory()["words"]
        return {w["session"]: w["tokens"] for w in words if w["tier"] == tier and w["is"] == "has"}

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)


class Fleet:
    """Workers by number; each over a store of its own."""

    def __init__(self, directory: Path, count: int) -> None:
        self._directory = directory
        self.lives = [Life(directory / f"store-{n}") for n in range(count)]

    def restart(self, number: int, meanwhile: Callable[[Path], None] | None = None) -> None:
        """A worker's next life; something happens to its store in between."""
        port, store = self.lives[number].port, self._directory / f"store-{number}"
        self.lives[number].end()
        if meanwhile is not None:
            meanwhile(store)
        self.lives[number] = Life(store, port)

    def config(self, **fields: Any) -> Config:
        workers = tuple(parse_worker(life.url) for life in self.lives)
        return Config(
            workers=workers,
            health_interval_s=0.1,
            settings=SHORT_ANSWERS,
            receipts=ReceiptForm.OPEN,
            **fields,
        )

    def close(self) -> None:
        for life in self.lives:
            life.end()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, 3)
    yield fleet
    fleet.close()


@asynccontextmanager
async def gateway_over(config: Config) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    gateway = Gateway(config)
    await gateway.start()
    url = f"http://127.0.0.1:{gateway.port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            yield gateway, client
    finally:
        await gateway.stop()


class Agent:
    """A session that goes on from its own answers."""

    def __init__(self, client: httpx.AsyncClient, name: str, seed: int) -> None:
        self.client = client
        self.name = name
        self.tokens = text(PROMPT_TOKENS, seed=seed)

    async def turn(self, new: int = NEW_TOKENS, **more: str) -> httpx.Headers:
        body = {
            "model": MODEL, "prompt": self.tokens, "max_tokens": 4, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        headers = {"x-session-id": self.name, **more}
        answer = await self.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        self.tokens += answer.json()["choices"][0]["token_ids"]
        self.tokens += text(new, seed=len(self.tokens))
        return answer.headers


def on_disk(gateway: Gateway) -> dict[str, set[str]]:
    """For each session that the gateway knows: the workers whose disk it believes to hold it."""
    return {
        name: {
            copy.worker.id for copy in session.copies() if copy.worker and copy.tier is Tier.DISK
        }
        for name, session in gateway.state.sessions.items()
    }


async def told_of_disk(life: Life, gateway: Gateway, *, sessions: int, tokens: int) -> None:
    """Wait until so many sessions of nearly so many tokens are on the worker's disk, and the
    gateway knows what is there."""

    def is_told() -> bool:
        held = life.held("disk")
        known = {
            name: copy.tokens
            for name, session in gateway.state.sessions.items()
            for copy in session.copies()
            if copy.tier is Tier.DISK
        }
        return known == held and sum(tokens - 32 <= n for n in held.values()) >= sessions

    await until_async(is_told)


async def all_on_disk(gateway: Gateway, sessions: int) -> None:
    await until_async(
        lambda: sum(bool(workers) for workers in on_disk(gateway).values()) == sessions
    )


def came_back(headers: httpx.Headers, home: str) -> None:
    assert headers["x-ownerserve-worker"] == home, headers["x-ownerserve-priced"]
    assert headers["x-ownerserve-reason"] == "recovered"
    assert headers["x-ownerserve-action"] == "tail_recompute"
    assert headers["x-ownerserve-mode"] == "fetch"
    assert "load_global" in headers["x-ownerserve-restore"]
    assert set(read_brought(headers["x-ownerserve-brought-tokens"])) == {"disk"}
    expected = int(headers["x-ownerserve-expected-cached-tokens"])
    cached = int(headers["x-ownerserve-cached-tokens"])
    assert cached and abs(expected - cached) <= 32, (expected, cached)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_sessions_return_to_the_worker_whose_disk_holds_them(
    fleet: Fleet, order: tuple[int, ...]
) -> None:
    """Before: 2 of 3 left it after a restart (W7, point 2)."""

    async def scenario() -> None:
        async with gateway_over(fleet.config()) as (gateway, client):
            agents = [Agent(client, f"s{n}", n) for n in range(3)]
            homes = [(await agent.turn())["x-ownerserve-worker"] for agent in agents]
            await all_on_disk(gateway, 3)
            for number in order:
                await asyncio.to_thread(fleet.restart, number)
            lives = {life.incarnation for life in fleet.lives}
            await until_async(lambda: {w.incarnation for w in gateway.state.fleet if w.up} == lives)
            for number in reversed(order):
                came_back(await agents[number].turn(), homes[number])
            await all_on_disk(gateway, 3)

    asyncio.run(scenario())


def test_a_gateway_that_begins_anew_finds_sessions_by_their_workers_word(fleet: Fleet) -> None:
    async def scenario() -> None:
        async with gateway_over(fleet.config()) as (gateway, client):
            agents = [Agent(client, f"s{n}", n) for n in range(3)]
            homes = [(await agent.turn())["x-ownerserve-worker"] for agent in agents]
            await all_on_disk(gateway, 3)
        fleet.restart(1)
        async with gateway_over(fleet.config()) as (gateway, client):
            assert len(on_disk(gateway)) == 3, "read before the port was opened"
            for agent, home in zip(agents, homes, strict=True):
                agent.client = client
                headers = await agent.turn()
                assert headers["x-ownerserve-worker"] == home, headers
                assert headers["x-ownerserve-reason"] == "recovered"
                assert int(headers["x-ownerserve-cached-tokens"]) >= PROMPT_TOKENS // 16 * 16

    asyncio.run(scenario())


@pytest.mark.parametrize("harm", ["wiped", "damaged"])
def test_what_goes_from_a_disk_is_withdrawn(fleet: Fleet, harm: str) -> None:
    """Records that went while their worker was away, and records that fail their digest."""

    async def scenario() -> None:
        async with gateway_over(fleet.config()) as (gateway, client):
            agents = [Agent(client, f"s{n}", n) for n in range(3)]
            homes = [(await agent.turn())["x-ownerserve-worker"] for agent in agents]
            await all_on_disk(gateway, 3)
            number = [life.name for life in fleet.lives].index(homes[0])
            await asyncio.to_thread(fleet.restart, number, HARMS[harm])
            life = fleet.lives[number]
            await until_async(
                lambda: life.incarnation in {w.incarnation for w in gateway.state.fleet}
            )
            if harm == "damaged":
                await until_async(lambda: len(life.held("disk")) == 1)
                turn = await agents[0].turn()
                assert turn["x-ownerserve-action"] == "tail_recompute"
                assert int(turn["x-ownerserve-cached-tokens"]) == 0
            await until_async(lambda: sum(map(bool, on_disk(gateway).values())) == 2)
            turn = await agents[0].turn()
            assert turn["x-ownerserve-action"] != "tail_recompute"

    asyncio.run(scenario())


def wipe(store: Path) -> None:
    """All that the store wrote goes; what the node wrote beside it stays."""
    for path in store.iterdir():
        if path.name.startswith("sessions-"):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def damage(store: Path) -> None:
    """A bit of each record's payload flips."""
    snapshot = StoreSnapshot(store)
    places = [(e.segment, e.offset + e.header_bytes + 7) for e in snapshot.entries()]
    snapshot.close()
    for number, at in places:
        with segment_path(store, number).open("r+b") as segment:
            segment.seek(at)
            [byte] = segment.read(1)
            segment.seek(at)
            segment.write(bytes([byte ^ 1]))


HARMS = {"wiped": wipe, "damaged": damage}


def test_a_session_that_lost_its_place_on_the_device_is_expected_from_disk(tmp_path: Path) -> None:
    """Three sessions, room for two: the router knows what is cached, to a block, and says why."""

    async def scenario() -> None:
        life = Life(tmp_path / "store", kv_bytes=2 << 20)
        try:
            workers = (parse_worker(life.url),)  # and all three are let in at once
            config = Config(workers=workers, health_interval_s=0.1, seats=None)
            async with gateway_over(config) as (gateway, client):
                agents = [Agent(client, f"s{n}", n) for n in range(3)]
                errors: list[int] = []
                actions: set[str] = set()
                for round_ in range(4):
                    for done, agent in enumerate(agents, 1):
                        headers = await agent.turn(NEW_TOKENS)
                        if round_:
                            expected = int(headers["x-ownerserve-expected-cached-tokens"])
                            cached = int(headers["x-ownerserve-cached-tokens"])
                            errors.append(abs(expected - cached))
                            actions.add(headers["x-ownerserve-action"])
                        ended = len(agent.tokens) - NEW_TOKENS
                        await told_of_disk(life, gateway, sessions=done, tokens=ended)
                assert "tail_recompute" in actions
                assert sorted(errors)[len(errors) // 2] <= 16, errors
        finally:
            life.end()

    asyncio.run(scenario())


def test_a_session_that_ends_is_told_no_more(fleet: Fleet) -> None:
    async def scenario() -> None:
        async with gateway_over(fleet.config()) as (gateway, client):
            agent = Agent(client, "s", 1)
            await agent.turn()
            await all_on_disk(gateway, 1)
            assert len(gateway.state.sessions) == 1
            await agent.turn(**{"x-ownerserve-session-final": "true"})
            await until_async(lambda: not any(life.held("disk") for life in fleet.lives))
            await asyncio.sleep(0.3)  # and what is read later brings it back no more
            assert len(gateway.state.sessions) == 0
            assert not any(life.held("device") for life in fleet.lives)

    asyncio.run(scenario())
