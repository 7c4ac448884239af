"""A worker that hangs is in the log as slow before it is taken out; one that is busy stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.service import Gateway
from ownerserve.gateway.workers.pace import (
    QUICK_IN_A_ROW,
    Pace,
    ProbeWatch,
    WorkerQuick,
    WorkerSlow,
)
from ownerserve.kv.ids import WorkerId
from tests.support.gateway.process import WorkerProcess, worker_process
from tests.support.gateway.world import World
from tests.support.waits import until_async

W = WorkerId("w")
SLOW_S = 0.05


def test_with_the_defaults_it_is_told_within_two_seconds() -> None:
    config = Config(workers=(Address("127.0.0.1", 1),))
    assert config.health_interval_s + config.health_slow_s < 2.0
    assert config.health_slow_s < config.health_timeout_s


@pytest.mark.slow
def test_a_stopped_process_is_told_of_as_slow_and_is_not_taken_out(
    entries: list[dict[str, Any]],
) -> None:
    """SIGSTOP, then SIGCONT before a probe is given up: two entries, and it serves on."""

    async def main(worker: WorkerProcess) -> None:
        address = Address("127.0.0.1", worker.port)
        config = Config(
            workers=(address,), health_interval_s=0.02, health_timeout_s=60.0, health_slow_s=SLOW_S
        )
        world = World([], Gateway(config))
        try:
            await world.gateway.start()

            def told() -> list[str]:
                return [one["event"] for one in entries if one.get("worker") == address.worker]

            worker.stop()
            await until_async(lambda: "worker_slow" in told())
            (slow,) = [one for one in entries if one["event"] == "worker_slow"]
            assert slow["level"] == "warning" and slow["cause"].startswith("no answer to the probe")
            assert world.gateway.state.fleet.up, "slow is not down"
            assert world.gateway.monitors[address.worker].is_slow
            worker.go_on()
            await until_async(lambda: "worker_answers" in told())
            assert (await (await world.client()).post("/v1/completions")).status == 200
            assert told() == ["worker_up", "worker_slow", "worker_answers"]
        finally:
            await world.close()

    with worker_process() as worker:
        asyncio.run(main(worker))


def test_a_worker_that_is_taken_out_was_told_of_as_slow_before(
    play: Callable[..., None], entries: list[dict[str, Any]]
) -> None:
    async def scenario(world: World) -> None:
        world.engines[0].is_hung = True
        await until_async(lambda: not world.gateway.state.fleet.up)
        told = [one["event"] for one in entries if one["event"].startswith("worker_")]
        assert told == ["worker_up", "worker_slow", "worker_down"]

    play(scenario, engines=1, health_interval_s=0.02, health_timeout_s=1.0, health_slow_s=SLOW_S)


def watched(scenario: Callable[[ProbeWatch, list[Pace]], Any]) -> list[Pace]:
    told: list[Pace] = []

    async def main() -> None:
        await scenario(ProbeWatch(W, SLOW_S, told.append), told)

    asyncio.run(main())
    return told


def test_at_the_edge_it_is_told_once_and_quick_takes_several_answers() -> None:
    async def scenario(watch: ProbeWatch, told: list[Pace]) -> None:
        for _ in range(3):
            watch.asked()
            count = len(told)
            await until_async(lambda: watch.is_slow)
            if count:  # it was slow: this one is answered late too
                await asyncio.sleep(SLOW_S * 2)
            watch.answered()
            watch.asked()
            watch.answered()
        assert told == [WorkerSlow(W, SLOW_S)]
        for _ in range(QUICK_IN_A_ROW):
            watch.asked()
            watch.answered()
        assert not watch.is_slow

    told = watched(scenario)
    assert told == [WorkerSlow(W, SLOW_S), WorkerQuick(W)]


def test_a_gateway_that_was_held_up_itself_tells_nothing_of_a_worker() -> None:
    async def scenario(watch: ProbeWatch, told: list[Pace]) -> None:
        watch.asked()
        time.sleep(SLOW_S * 3)
        for _ in range(2):  # the timer's turn comes
            await asyncio.sleep(0)
        assert not told
        watch.answered()

    assert watched(scenario) == []
