"""Workers leave one after the other under a gateway, and their sessions go on with their state."""

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
from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from ownerserve.kv.wire.rpc import (  # noqa: E402
    AskSession,
    Released,
    ReleaseSession,
    SessionStands,
    SessionTaken,
    Take,
)
from tests.support.hf.agent import Agent, over_a_gateway  # noqa: E402
from tests.support.hf.engine_rig import text  # noqa: E402
from tests.support.hf.owning_fleet import NAME, PROMPT, BootClock  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.waits import until, until_async  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

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


@pytest.fixture
def owning(tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    """Two that own, and no gateway: nobody orders a session away."""
    server = DirectoryServer(EmbeddedDirectory(BootClock(), TermFile(), opens_in_s=0.0))
    server.start()
    kept = ("--host-cache", "64MiB", "--drain-timeout", str(WAIT_S))
    started = [WorkerProcess(tmp_path, name, server.address, *kept) for name in ("one", "two")]
    yield started
    for worker in started:
        worker.process.send_signal(signal.SIGINT)
        worker.process.wait(WAIT_S)
        worker.stop()
    server.stop()


def test_a_worker_leaves_that_has_served_anothers_session(owning: list[WorkerProcess]) -> None:
    owner, guest = owning
    owner.serve(PROMPT, NAME)
    until(lambda: owner.metric("ownerserve_sessions_owned") == 1)
    guest.serve(PROMPT, NAME)
    until(lambda: guest.metric('ownerserve_directory_answers_total{answer="heldby"}'))
    assert guest.http.get("/ownerserve/cache").json()["sessions"] == 1
    for worker in owning:
        worker.process.send_signal(signal.SIGTERM)
    assert guest.process.wait(WAIT_S / 2) == 0, "it does not wait for its timeout"
    assert owner.process.poll() is None, "it would lose a session that is its own"


def test_a_worker_stays_for_a_session_that_was_handed_over_to_it_and_nobody_told_it(
    owning: list[WorkerProcess],
) -> None:
    owner, guest = owning
    owner.serve(PROMPT, NAME)
    until(lambda: owner.metric("ownerserve_sessions_owned") == 1)
    stands = owner.asked(AskSession(NAME))
    assert isinstance(stands, SessionStands) and stands.epoch is not None
    guest.serve(PROMPT, NAME)
    until(lambda: guest.metric('ownerserve_directory_answers_total{answer="heldby"}'))
    assert owner.asked(ReleaseSession(NAME, stands.epoch, guest.unit)) == Released()
    until(lambda: owner.metric('ownerserve_directory_answers_total{answer="bound"}') == 2)
    guest.process.send_signal(signal.SIGTERM)
    until(lambda: guest.metric("ownerserve_sessions_owned") == 1)
    take = Take(NAME, LenderAddress(guest.unit, guest.rpc))
    until(lambda: isinstance(owner.asked(take), SessionTaken))
    assert guest.process.wait(WAIT_S / 2) == 0


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


def test_a_second_signal_ends_it_at_once(workers: list[WorkerProcess]) -> None:
    one = workers[0]
    one.serve(text(200, seed=1), None)
    one.process.send_signal(signal.SIGTERM)
    status = one.http.get("/ownerserve/status").json()
    assert status["profile"]["leaving"] is True
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(WAIT_S / 2) == 0
