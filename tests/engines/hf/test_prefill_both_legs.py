"""A gateway asks who computes a prompt and who answers its turn at once, over real workers: one
prompt, read as it is computed, under a number that both were told. Whatever becomes of the leg that
computes, the turn has a cold engine's answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.gateway.config import PrefillLegs  # noqa: E402
from ownerserve.gateway.service import Gateway  # noqa: E402
from tests.support.hf.engine_rig import text  # noqa: E402
from tests.support.hf.fleet_rig import WAIT_S  # noqa: E402
from tests.support.hf.split_fleet import came_of, gateway_over, legs, turn  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.waits import until_async  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

KEPT = ("--host-cache", "64MiB", "--kv-memory", "64MiB", "--dear")
ENDS = ("read", "left", "called_off", "unasked")
PATIENT_S = 120.0
"""A worker that stands still is not taken out: what the turn does of it is what is looked at."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[WorkerProcess]]]:
    started: list[WorkerProcess] = []

    def begin(*flags: str) -> list[WorkerProcess]:
        started.extend(
            WorkerProcess(tmp_path, role, None, *KEPT, "--role", role, *flags)
            for role in ("prefill", "decode")
        )
        return started

    yield begin
    for worker in started:
        worker.stop()


@asynccontextmanager
async def fleet(
    workers: list[WorkerProcess], legs: PrefillLegs = PrefillLegs.BOTH
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    settings = {"prefill_legs": legs, "health_timeout_s": PATIENT_S}
    async with gateway_over(workers, "static_pd", **settings) as made:
        yield made


async def told(worker: WorkerProcess, name: str) -> float:
    return await asyncio.to_thread(worker.metric, name)


async def prefills(worker: WorkerProcess, end: str) -> float:
    return await told(worker, f'ownerserve_prefills_for_peers_total{{end="{end}"}}')


async def comes_to(what: Callable[[], Any], wanted: float) -> None:
    """Until what a worker says of itself is so."""
    async with asyncio.timeout(WAIT_S):
        while await what() != wanted:
            await asyncio.sleep(0.05)


async def rests(worker: WorkerProcess) -> None:
    """Nothing of a turn is left at a worker, but cached state."""
    for gauge in ("running_sequences", "waiting_sequences", "cache_held_blocks"):
        await comes_to(lambda gauge=gauge: told(worker, f"ownerserve_{gauge}"), 0)


async def over(worker: WorkerProcess) -> float:
    return sum([await prefills(worker, end) for end in ENDS])


def holders(gateway: Gateway) -> set[str]:
    """Who is known to the gateway to hold something of its one session."""
    ((_, session),) = gateway.state.sessions.items()
    return {copy.worker.id for copy in session.copies() if copy.worker is not None}


async def books_are_right(gateway: Gateway) -> None:
    await until_async(lambda: gateway.state.live == 0, within_s=WAIT_S)
    assert not any(unit.requests for unit in gateway.state.fleet)
    gateway.state.check()


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen3next"])
def test_both_are_asked_at_once_and_it_is_one_prompt(start: Any, model: str) -> None:
    p, d = start("--model", model)

    async def play() -> None:
        async with fleet([p, d]) as (gateway, client):
            prompt = text(1500, seed=3)
            said, headers = await turn(client, prompt, "agent", model=model)
            assert headers["x-ownerserve-worker"] == d.name
            assert came_of(headers) == ("remote_prefill", "remote_prefill"), headers
            prompt = [*prompt, *said, *text(700, seed=9)]
            said, headers = await turn(client, prompt, "agent", model=model)
            assert came_of(headers) == ("remote_prefill", "remote_prefill"), headers
            assert legs(gateway) == {"done": 2}
            assert sum(legs(gateway, "ahead").values()) == 2
            assert await prefills(p, "accepted") == await prefills(p, "joined") == 2
            await rests(p)
            await books_are_right(gateway)

    asyncio.run(play())


def test_the_prompt_is_computed_while_who_answers_has_not_asked_for_it(start: Any) -> None:
    """With one leg nobody would have asked who computes: D stands still."""
    p, d = start()

    async def play() -> None:
        async with fleet([p, d]) as (gateway, client):
            d.freeze()
            answered = asyncio.create_task(turn(client, text(1500, seed=4), "agent"))
            await until_async(lambda: legs(gateway, "ahead"), within_s=WAIT_S)
            assert legs(gateway, "ahead") == {"computed": 1}
            assert (await prefills(p, "accepted"), await prefills(p, "joined")) == (1, 0)
            d.thaw()
            _, headers = await answered
            assert came_of(headers) == ("remote_prefill", "remote_prefill"), headers
            assert await prefills(p, "joined") == 1
            assert await told(d, 'ownerserve_ordered_bytes_total{when="behind"}') > 0
            await books_are_right(gateway)

    asyncio.run(play())


@pytest.mark.parametrize("after_read", ["keep", "free"])
def test_what_was_computed_is_the_next_prompt_s_or_is_free_at_once(
    start: Any, after_read: str
) -> None:
    p, d = start("--prefilled", after_read)

    async def play() -> None:
        async with fleet([p, d]) as (gateway, client):
            prompt = text(1500, seed=5)
            _, headers = await turn(client, prompt, "agent")
            assert came_of(headers) == ("remote_prefill", "remote_prefill"), headers
            await comes_to(lambda: over(p), 1)
            await rests(p)
            used = await told(p, "ownerserve_pool_slots_used")
            assert (used == 0) == (after_read == "free")
            assert holders(gateway) == {d.name} | ({p.name} if used else set())

    asyncio.run(play())


def test_a_leg_that_computes_nothing_fails_no_turn(start: Any) -> None:
    p, d = start()

    async def play() -> None:
        async with fleet([p, d]) as (gateway, client):
            p.freeze()
            _, headers = await turn(client, text(900, seed=6), "still")
            assert headers["x-ownerserve-mode"] == "cold_prefill"
            assert legs(gateway, "ahead") == {"unwanted": 1}
            p.thaw()
            await rests(p)
            assert await over(p) == await prefills(p, "accepted")

            before = await told(d, "ownerserve_peer_read_bytes_total")
            answered = asyncio.create_task(turn(client, text(6000, seed=7), "dies"))
            async with asyncio.timeout(WAIT_S):
                while await told(d, "ownerserve_peer_read_bytes_total") == before:
                    assert not answered.done()
            p.process.kill()
            _, headers = await answered
            assert headers["x-ownerserve-worker"] == d.name
            await rests(d)
            await books_are_right(gateway)
            _, headers = await turn(client, text(900, seed=8), "gone")
            assert headers["x-ownerserve-mode"] == "cold_prefill"
            await books_are_right(gateway)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("asked", "stands"),
    [(PrefillLegs.ONE, "nobody"), (PrefillLegs.BOTH, "nobody"), (PrefillLegs.BOTH, "D")],
)
def test_a_client_that_hangs_up_ends_what_both_do(
    start: Any, asked: PrefillLegs, stands: str
) -> None:
    p, d = start()

    async def play() -> None:
        async with fleet([p, d], asked) as (gateway, client):
            if stands == "D":
                d.freeze()
            body = {"prompt": text(8000, seed=9), "max_tokens": 4}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            async with asyncio.timeout(WAIT_S):
                while not await prefills(p, "accepted"):
                    assert not asking.done()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await books_are_right(gateway)
            await rests(p)
            if stands == "D":
                assert await prefills(p, "called_off") == 1, "nobody else has asked it"
                d.thaw()
            await rests(d)
            await comes_to(lambda: over(p), await prefills(p, "accepted"))
            assert set(legs(gateway, "ahead")) <= {"unwanted", "computed"}

    asyncio.run(play())
