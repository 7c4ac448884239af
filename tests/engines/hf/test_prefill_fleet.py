"""A gateway has a prompt computed at one worker and answered at another, over real workers in their
roles: each is asked by the other alone, and whatever is lost costs time and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.gateway.service import Gateway  # noqa: E402
from ownerserve.kv.wire.headers import read_brought  # noqa: E402
from ownerserve.router.worker import WorkerRole  # noqa: E402
from tests.support.hf.engine_rig import text  # noqa: E402
from tests.support.hf.fleet_rig import WAIT_S  # noqa: E402
from tests.support.hf.split_fleet import came_of, gateway_over, legs, turn  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.waits import until_async  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

KEPT = ("--host-cache", "64MiB", "--kv-memory", "64MiB", "--dear")
ROLES = ("prefill", "decode")


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    started = [WorkerProcess(tmp_path, role, None, *KEPT, "--role", role) for role in ROLES]
    yield started
    for worker in started:
        worker.stop()


def computed_for_peers(worker: WorkerProcess) -> float:
    return worker.metric('ownerserve_prefills_for_peers_total{end="read"}')


def roles(gateway: Gateway) -> dict[str, WorkerRole]:
    return {worker.id: worker.profile.role for worker in gateway.state.fleet}


def test_a_prompt_is_computed_in_one_role_and_answered_in_the_other(
    workers: list[WorkerProcess],
) -> None:
    prefill, decode = workers

    async def play() -> None:
        async with gateway_over(workers, "static_pd") as (gateway, client):
            prompt = text(2000, seed=3)
            said, headers = await turn(client, prompt, "agent")
            assert headers["x-ownerserve-worker"] == decode.name
            assert came_of(headers) == ("remote_prefill", "remote_prefill"), headers
            assert read_brought(headers["x-ownerserve-brought-tokens"])["remote_prefill"] >= 1900
            assert await asyncio.to_thread(computed_for_peers, prefill) == 1
            prompt = [*prompt, *said, *text(1000, seed=9)]
            said, headers = await turn(client, prompt, "agent")
            assert came_of(headers) == ("remote_prefill", "remote_prefill"), headers
            assert legs(gateway) == {"done": 2}
            # Who computes prompts is lost: the other one computes them, and the books are right.
            await asyncio.to_thread(prefill.freeze)
            prompt = [*prompt, *said, *text(600, seed=10)]
            said, headers = await turn(client, prompt, "agent")
            assert headers["x-ownerserve-mode"] != "remote_prefill"
            await asyncio.to_thread(prefill.thaw)
            told = legs(gateway)
            assert told["done"] == 2
            assert sum(told.values()) <= 3, "it may have been taken out before the turn came"
            await until_async(lambda: gateway.state.live == 0, within_s=WAIT_S)
            assert not any(unit.requests for unit in gateway.state.fleet)
            gateway.state.check()

    asyncio.run(play())


def ends_of_prompts(worker: WorkerProcess) -> float:
    ends = ("read", "left", "called_off", "unasked")
    return sum(worker.metric(f'ownerserve_prefills_for_peers_total{{end="{end}"}}') for end in ends)


async def reader_of(workers: list[WorkerProcess]) -> WorkerProcess:
    """Who of them reads of a peer first."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for worker in workers:
                if await asyncio.to_thread(worker.metric, "ownerserve_peer_read_bytes_total"):
                    return worker


def lends_nothing(worker: WorkerProcess) -> bool:
    """Whether all that was computed for others is over, and its blocks can go."""
    levels = ("running_sequences", "waiting_sequences", "cache_held_blocks")
    accepted = worker.metric('ownerserve_prefills_for_peers_total{end="accepted"}')
    is_idle = not any(worker.metric(f"ownerserve_{level}") for level in levels)
    return is_idle and accepted == ends_of_prompts(worker)


def test_a_turn_whose_worker_is_killed_while_it_reads_is_answered_by_another(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    prefill, decode = workers
    other = WorkerProcess(tmp_path, "decode2", None, *KEPT, "--role", "decode")

    async def play() -> None:
        async with gateway_over([*workers, other], "static_pd") as (gateway, client):
            answered = asyncio.create_task(turn(client, text(6000, seed=3), "agent"))
            reader = await reader_of([decode, other])
            assert not answered.done()
            reader.process.kill()
            _, headers = await answered
            lives = {decode.name, other.name} - {reader.name}
            assert headers["x-ownerserve-worker"] in lives
            await until_async(lambda: gateway.state.live == 0, within_s=WAIT_S)
            gateway.state.check()
            async with asyncio.timeout(WAIT_S):
                while not await asyncio.to_thread(lends_nothing, prefill):
                    await asyncio.sleep(0.1)
            ended = 'ownerserve_lends_total{end="expired"}'
            assert await asyncio.to_thread(prefill.metric, ended) == 1

    try:
        asyncio.run(play())
    finally:
        other.stop()


def test_by_price_long_prompts_are_computed_apart_and_short_ones_where_their_state_is(
    workers: list[WorkerProcess],
) -> None:
    _, decode = workers

    async def play() -> None:
        async with gateway_over(workers, "ownerserve") as (gateway, client):
            (at,) = [unit for unit in gateway.state.fleet if unit.id == decode.name]
            busy = asyncio.create_task(turn(client, text(400, seed=1), "hog", tokens=600))
            await until_async(lambda: at.requests == 1 or busy.done(), within_s=WAIT_S)
            prompt = text(2000, seed=3)
            said, headers = await turn(client, prompt, "agent")
            assert came_of(headers) == ("remote_prefill", "remote_prefill"), headers
            prompt = [*prompt, *said, *text(40, seed=9)]
            _, headers = await turn(client, prompt, "agent")
            assert came_of(headers) == ("colocated_prefill", "direct_append"), headers
            assert headers["x-ownerserve-worker"] == decode.name
            await busy
            assert legs(gateway) == {"done": 1}

    asyncio.run(play())


def test_a_worker_takes_another_role_on_while_it_is_idle_and_gateways_follow(
    workers: list[WorkerProcess],
) -> None:
    prefill, decode = workers

    async def play() -> None:
        async with gateway_over(workers, "ownerserve") as (gateway, client):
            expected = {prefill.name: WorkerRole.PREFILL, decode.name: WorkerRole.DECODE}
            assert roles(gateway) == expected
            busy = asyncio.create_task(turn(client, text(200, seed=1), "hog", tokens=900))
            async with httpx.AsyncClient(timeout=WAIT_S) as operator:

                async def becomes(worker: WorkerProcess, role: str) -> httpx.Response:
                    url = f"{worker.url}/ownerserve/role"
                    return await operator.post(url, json={"role": role})

                async with asyncio.timeout(WAIT_S):
                    load = {"running_sequences": 0}
                    while not load["running_sequences"] and not busy.done():
                        status = await operator.get(f"{decode.url}/ownerserve/status")
                        load = status.json()["load"]
                no = await becomes(decode, "hybrid")
                assert busy.done() or no.status_code == 409, no.text
                assert no.status_code == 200 or no.json()["error"]["code"] == "not_idle"
                await busy
                yes = await becomes(decode, "prefill")
                assert (yes.status_code, yes.json()["role"]) == (200, "prefill")
                yes = await becomes(prefill, "decode")
                assert yes.json() == {"role": "decode", "was": "prefill"}
                expected = {prefill.name: WorkerRole.DECODE, decode.name: WorkerRole.PREFILL}
                await until_async(lambda: roles(gateway) == expected, within_s=WAIT_S)
                wrong = await becomes(prefill, "both")
                assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "role")
            _, headers = await turn(client, text(100, seed=5), "other")
            assert headers["x-ownerserve-worker"] == prefill.name, "who decodes now"

    asyncio.run(play())
