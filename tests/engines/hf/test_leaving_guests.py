"""A worker leaves that served the last turn of another's session: its owner has what that turn
added before it is gone. Real workers and a directory; a played fleet: gateway/test_rests.py.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.directory.embedded import EmbeddedDirectory  # noqa: E402
from ownerserve.directory.rpc.server import DirectoryServer  # noqa: E402
from ownerserve.directory.terms import TermFile  # noqa: E402
from ownerserve.gateway.service import Gateway  # noqa: E402
from ownerserve.kv.ids import WorkerId  # noqa: E402
from ownerserve.router.messages import (  # noqa: E402
    AskRelease,
    Down,
    ReleaseEnd,
    ReleaseEnded,
    WorkerDown,
)
from tests.support.hf.agent import Agent, over_a_gateway  # noqa: E402
from tests.support.hf.engine_rig import text  # noqa: E402
from tests.support.hf.owning_fleet import BootClock  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.waits import until_async  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

WAIT_S = 300.0
ADDED = 200
KEPT = ("--host-cache", "64MiB", "--kv-memory", "64MiB", "--dear")
LEAVES = ("--drain-timeout", str(WAIT_S))


@pytest.fixture
def directory() -> Iterator[str]:
    server = DirectoryServer(EmbeddedDirectory(BootClock(), TermFile(), opens_in_s=0.0))
    server.start()
    yield server.address
    server.stop()


@pytest.fixture
def workers(tmp_path: Path, directory: str) -> Iterator[list[WorkerProcess]]:
    started = [WorkerProcess(tmp_path, name, directory, *KEPT, *LEAVES) for name in ("one", "two")]
    yield started
    for worker in started:
        worker.process.send_signal(signal.SIGINT)  # not to leave: to end
        worker.process.wait(WAIT_S)
        worker.stop()


def test_the_owner_has_what_a_guest_added_when_that_one_has_left(
    workers: list[WorkerProcess], directory: str
) -> None:
    """Nobody is asked to hand the session over, as where its owner is silent for two seconds."""

    async def play(gateway: Gateway, client: httpx.AsyncClient) -> None:
        def kept(wanted: AskRelease) -> None:
            gateway.turns.told(ReleaseEnded(wanted.session, wanted.epoch, ReleaseEnd.KEPT))

        gateway.turns.releasing.ask = kept  # type: ignore[method-assign]
        agent = Agent(client, 1)
        await agent.turn()
        owner, guest = workers
        if agent.at != owner.name:
            owner, guest = guest, owner
        await until_async(lambda: owner.metric("ownerserve_sessions_owned") == 1)
        while agent.at != guest.name:  # the next probe brings the owner back
            agent.context += text(ADDED, seed=len(agent.context))
            gateway.state.handle(WorkerDown(WorkerId(owner.name), Down.UNHEALTHY), gateway.now())
            await agent.turn()
        (unit,) = [one for one in gateway.state.fleet if one.id == owner.name]
        await until_async(lambda: unit.up, within_s=WAIT_S)
        assert owner.metric("ownerserve_sessions_owned") == 1, "it was a guest's"
        guest.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(guest.process.wait, WAIT_S / 2)
        assert code == 0, "it does not wait for its timeout"
        assert gateway.moves.rests.counts == {"brought": 1}
        cached, known = await agent.turn()
        assert known > 700 + ADDED
        assert agent.at == owner.name
        assert cached >= known // 64 * 64 - 64, (cached, known)
        gateway.state.check()

    over_a_gateway(workers, play, directory=directory)
