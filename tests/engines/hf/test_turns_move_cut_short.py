"""A turn that moves amid its answer, over processes of their own: two workers, a gateway. A worker
that is told to end is left by the turn that it runs; one whose word is refused, or not heard, goes
on. Whoever is killed as a message passes: tests/kills/test_turns_killed.py."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from ownerserve.kv.wire.refusals import WorkerRefusal  # noqa: E402
from ownerserve.kv.wire.rpc import Reject, Said, StopTurn  # noqa: E402
from ownerserve.node.rpc.server import RpcClient  # noqa: E402
from tests.support.gateway.process import GatewayProcess, gateway_process  # noqa: E402
from tests.support.hf.fleet_rig import WAIT_S  # noqa: E402
from tests.support.hf.moving_turns import TOKENS, Read, chat  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.metric_lines import summed  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

KEPT = ("--slow-steps", "--dear", "--host-cache", "64MiB", "--kv-memory", "64MiB")
LEAVES = ("--drain-timeout", str(WAIT_S))


class World:
    """Two workers and a gateway. `here` runs the turn, `there` is the other one."""

    def __init__(self, workers: list[WorkerProcess], gateway: GatewayProcess) -> None:
        self.workers, self.gateway = workers, gateway
        self.http = httpx.Client(base_url=gateway.data_url, timeout=WAIT_S)
        self.here = self.there = workers[0]

    def found(self, name: str) -> None:
        (self.here,) = [one for one in self.workers if one.name == name]
        (self.there,) = [one for one in self.workers if one is not self.here]

    def metric(self, start: str) -> float:
        text = httpx.get(f"{self.gateway.admin_url}/metrics", timeout=WAIT_S).text
        return summed(text, start)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    workers = [WorkerProcess(tmp_path, f"w{n}", None, *KEPT, *LEAVES) for n in range(2)]
    try:
        ports = [int(one.url.rpartition(":")[2]) for one in workers]
        with gateway_process(tmp_path, ports, "--receipts", "open") as gateway:
            made = World(workers, gateway)
            yield made
            made.http.close()
    finally:
        for one in workers:
            one.http.close()
            one.process.kill()
            one.process.wait()


def moves(worker: WorkerProcess, way: str, end: str) -> float:
    return worker.metric(f'ownerserve_turn_moves_total{{end="{end}",way="{way}"}}')


def is_at_rest(worker: WorkerProcess) -> bool:
    load = worker.http.get("/ownerserve/status").json()["load"]
    held = worker.metric("ownerserve_cache_held_blocks")
    return not (load["running_sequences"] or load["waiting_sequences"] or held)


def test_a_worker_that_is_told_to_end_is_left_by_the_turn_that_runs_there(world: World) -> None:
    def end(name: str) -> None:
        world.found(name)
        world.here.process.send_signal(signal.SIGTERM)

    read = Read(world.http, chat(), end)
    assert not read.errors, read.errors
    assert moves(world.there, "came", "went_on") == 1
    alone = Read(world.there.http, chat())
    assert (read.tokens, read.said, read.finish) == (alone.tokens, alone.said, alone.finish)
    assert world.here.process.wait(WAIT_S) == 0, "it is empty, long before its timeout"
    assert world.metric('ownerserve_gateway_legs_total{leg="move",outcome="joined"}') == 1
    until(lambda: is_at_rest(world.there), what="nothing to be left at who went on")


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where somebody listens, and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "said", [WorkerRefusal.NO_ANSWER, WorkerRefusal.UNKNOWN_TURN], ids=["is silent", "did not ask"]
)
def test_a_turn_that_its_target_does_not_have_goes_on_where_it_was(
    said: WorkerRefusal, world: World, nobody: str
) -> None:
    """After a pause, in which nobody wrote on: without a gap, and without anything twice."""
    answers: list[Said] = []

    def stop() -> None:
        is_silent = said is WorkerRefusal.NO_ANSWER
        address = LenderAddress(world.there.unit, nobody if is_silent else world.there.rpc)
        client = RpcClient(world.here.rpc, timeout_s=WAIT_S)
        answers.append(client.ask(StopTurn("asked-by-hand", address)))
        client.close()

    stopping = threading.Thread(target=stop)

    def begin(name: str) -> None:
        world.found(name)
        stopping.start()

    world.http.headers["x-request-id"] = "asked-by-hand"
    read = Read(world.http, chat(), begin)
    stopping.join(WAIT_S)
    assert answers == [Reject(said)]
    assert moves(world.here, "went", said.value) == 1
    assert read.is_whole and len(read.tokens) == TOKENS and not read.errors
    alone = Read(world.there.http, chat())
    assert (read.tokens, read.said, read.finish) == (alone.tokens, alone.said, alone.finish)
    assert not any(line.startswith(":") and "moved" in line for line in read.lines)
    for worker in world.workers:
        until(lambda worker=worker: is_at_rest(worker), what="nothing to be left")
