"""Workers leave one after the other under a gateway, and their sessions go on with their state."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.gateway.config import Config  # noqa: E402
from ownerserve.gateway.http.access import parse_worker  # noqa: E402
from ownerserve.gateway.receipts import ReceiptForm  # noqa: E402
from ownerserve.gateway.service import Gateway  # noqa: E402
from ownerserve.router.settings import DEFAULTS  # noqa: E402
from tests.support.hf.engine_rig import TOLERANCE, reference, text  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.waits import until_async  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

MODEL = "tiny-qwen3"
WAIT_S = 300.0
KEPT = ("--host-cache", "64MiB", "--kv-memory", "64MiB", "--dear")
SESSIONS = 4


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    leaves = ("--drain-timeout", str(WAIT_S))
    started = [WorkerProcess(tmp_path, name, None, *KEPT, *leaves) for name in ("one", "two")]
    started.append(WorkerProcess(tmp_path, "three", None, *KEPT))
    yield started
    for worker in started:
        worker.process.send_signal(signal.SIGINT)  # not to leave: to end
        worker.process.wait(WAIT_S)
        worker.stop()


class Agent:
    """A session, its context, and where its last turn ran."""

    def __init__(self, client: httpx.AsyncClient, number: int) -> None:
        self._client = client
        self._name = f"agent{number}"
        self.context = text(700, seed=number)
        self.at = ""

    async def turn(self) -> tuple[int, int]:
        """Run a turn whose answer is a cold engine's; return what was cached, and what of the
        context was there before."""
        known = len(self.context) - 40 if self.at else 0
        body = {
            "model": MODEL, "prompt": self.context, "max_tokens": 8, "temperature": 0,
            "logprobs": 1, "return_token_ids": True,
        }  # fmt: skip
        head = {"x-session-id": self._name}
        answer = await self._client.post("/v1/completions", json=body, headers=head)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        said, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        for row, token, logprob in zip(
            reference(MODEL, self.context, said), said, logprobs, strict=True
        ):
            assert abs(float(row[token]) - logprob) <= TOLERANCE
        self.context += [*said, *text(40, seed=len(self.context))]
        self.at = answer.headers["x-ownerserve-worker"]
        return int(answer.headers["x-ownerserve-cached-tokens"]), known


def test_each_session_goes_on_with_its_state_as_one_worker_after_the_other_leaves(
    workers: list[WorkerProcess],
) -> None:
    async def play(gateway: Gateway, client: httpx.AsyncClient) -> None:
        agents = [Agent(client, number) for number in range(SESSIONS)]
        for agent in agents:
            await agent.turn()
        assert len({agent.at for agent in agents}) > 1, "they stand at more than one worker"
        for leaving in workers[:2]:
            leaving.process.send_signal(signal.SIGTERM)
            (unit,) = [unit for unit in gateway.state.fleet if unit.id == leaving.name]
            await until_async(lambda unit=unit: not unit.up, within_s=WAIT_S)
            for agent in agents:
                moves = agent.at == leaving.name
                cached, known = await agent.turn()
                assert agent.at != leaving.name
                assert cached >= known // 64 * 64 - 64, (moves, agent.at, cached, known)
            # Nothing stands there any more: it does not wait for its timeout.
            code = await asyncio.to_thread(leaving.process.wait, WAIT_S / 2)
            assert code == 0
        gateway.state.check()

    over_a_gateway(workers, play)


def test_a_worker_is_left_by_sessions_of_which_no_turn_comes(workers: list[WorkerProcess]) -> None:
    """Without a directory: the gateway's own table, and their owner's word."""

    async def play(gateway: Gateway, client: httpx.AsyncClient) -> None:
        agents = [Agent(client, number) for number in range(SESSIONS)]
        for agent in agents:
            await agent.turn()
        leaving = next(worker for worker in workers[:2] if worker.name in {a.at for a in agents})
        stood_there = [agent for agent in agents if agent.at == leaving.name]
        leaving.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(leaving.process.wait, WAIT_S / 2)
        assert code == 0, "it is empty long before its timeout"
        assert gateway.moves.counts["taken"] == len(stood_there), gateway.moves.counts
        for agent in stood_there:
            cached, known = await agent.turn()
            assert agent.at != leaving.name
            assert cached >= known // 64 * 64 - 64
        gateway.state.check()

    over_a_gateway(workers, play)


def over_a_gateway(
    workers: list[WorkerProcess],
    play: Callable[[Gateway, httpx.AsyncClient], Coroutine[None, None, None]],
) -> None:
    async def over() -> None:
        config = Config(
            workers=tuple(parse_worker(worker.url) for worker in workers),
            policy="ownerserve",
            health_interval_s=0.1,
            settings=msgspec.structs.replace(DEFAULTS, output_tokens=8),
            receipts=ReceiptForm.OPEN,
            seats=None,
        )
        gateway = Gateway(config)
        await gateway.start()
        try:
            url = f"http://127.0.0.1:{gateway.port}"
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
                await play(gateway, client)
        finally:
            await gateway.stop()

    asyncio.run(over())


def test_a_second_signal_ends_it_at_once(workers: list[WorkerProcess]) -> None:
    one = workers[0]
    one.serve(text(200, seed=1), None)
    one.process.send_signal(signal.SIGTERM)
    status = one.http.get("/ownerserve/status").json()
    assert status["profile"]["leaving"] is True
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(WAIT_S / 2) == 0
