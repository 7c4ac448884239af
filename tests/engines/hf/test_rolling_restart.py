"""All workers are restarted, one after the other, while agents go on: no error, each answer is a
cold engine's, and no context is computed again that a peer or a store has.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.directory.embedded import EmbeddedDirectory  # noqa: E402
from ownerserve.directory.rpc.server import DirectoryServer  # noqa: E402
from ownerserve.directory.terms import TermFile  # noqa: E402
from ownerserve.gateway.service import Gateway  # noqa: E402
from tests.support.hf.agent import Agent, over_a_gateway  # noqa: E402
from tests.support.hf.owning_fleet import BootClock  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.net import free_port  # noqa: E402
from tests.support.waits import until_async  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

WAIT_S = 300.0
AGENTS = 4
TOOL_S = 1.0
"""Between two turns of an agent."""
BLOCK = 64
GIVEN = ("--kv-memory", "64MiB", "--dear", "--drain-timeout", str(WAIT_S))
BELOW = ("host", "store", "remote")
"""What is below the devices: each worker's memory, its own store, or one directory of all."""


class Place:
    """Where a worker is, and begins anew."""

    def __init__(self, folder: Path, name: str, directory: str, *below: str) -> None:
        self._folder, self._name, self._directory = folder, name, directory
        self._given = (*GIVEN, *below)
        self._port = str(free_port())
        self._lives = 0
        self.worker = self._begun()

    def _begun(self) -> WorkerProcess:
        self._lives += 1
        folder = self._folder / f"{self._name}.{self._lives}"
        folder.mkdir()
        return WorkerProcess(
            folder, self._name, self._directory, *self._given, "--port", self._port
        )

    def restart(self) -> int:
        """It leaves, ends, and begins anew at the same address; its exit code."""
        self.worker.process.send_signal(signal.SIGTERM)
        code = self.worker.process.wait(WAIT_S / 2)
        self.worker.stop()
        self.worker = self._begun()
        return code

    def close(self) -> None:
        self.worker.process.send_signal(signal.SIGINT)  # not to leave: to end
        self.worker.process.wait(WAIT_S)
        self.worker.stop()


@pytest.fixture
def directory() -> Iterator[str]:
    server = DirectoryServer(EmbeddedDirectory(BootClock(), TermFile(), opens_in_s=0.0))
    server.start()
    yield server.address
    server.stop()


@pytest.fixture(params=BELOW)
def places(request: pytest.FixtureRequest, tmp_path: Path, directory: str) -> Iterator[list[Place]]:
    with ExitStack() as stack:
        made = []
        for name in ("one", "two", "three"):
            below = {
                "host": ("--host-cache", "64MiB"),
                "store": ("--store", str(tmp_path / f"{name}.store")),
                "remote": ("--host-cache", "1MiB", "--remote", str(tmp_path / "remote")),
            }
            made.append(Place(tmp_path, name, directory, *below[request.param]))
            stack.callback(made[-1].close)
        yield made


def test_agents_go_on_with_their_state_as_all_workers_are_restarted(
    places: list[Place], directory: str
) -> None:
    async def play(gateway: Gateway, client: httpx.AsyncClient) -> None:
        agents = [Agent(client, number) for number in range(AGENTS)]
        for agent in agents:
            await agent.turn()
        assert len({agent.at for agent in agents}) > 1, "they stand at more than one worker"
        is_over = asyncio.Event()
        turns = [0] * AGENTS
        again: list[tuple[int, int, str]] = []

        async def goes_on(number: int) -> None:
            while not is_over.is_set():
                cached, known = await agents[number].turn()
                turns[number] += 1
                if cached < known // BLOCK * BLOCK - BLOCK:
                    again.append((cached, known, agents[number].at))
                await asyncio.sleep(TOOL_S)

        playing = [asyncio.ensure_future(goes_on(number)) for number in range(AGENTS)]
        for place in places:
            before = list(turns)
            assert await asyncio.to_thread(place.restart) == 0
            await until_async(partial(is_up, gateway, place.worker), within_s=WAIT_S)

            def have_gone_on(before: list[int] = before) -> bool:
                every = zip(turns, before, playing, strict=True)
                return all(now > then or one.done() for now, then, one in every)

            await until_async(have_gone_on, within_s=WAIT_S)
        is_over.set()
        await asyncio.gather(*playing)
        assert not again, f"computed again: (cached, known, where) {again}"
        gateway.state.check()

    over_a_gateway([place.worker for place in places], play, directory=directory)


def is_up(gateway: Gateway, worker: WorkerProcess) -> bool:
    """Whether the gateway has met this life of it."""
    (unit,) = [one for one in gateway.state.fleet if one.id == worker.name]
    return bool(unit.up and unit.incarnation == worker.unit.incarnation)
