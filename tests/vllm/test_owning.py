"""vLLM workers that own sessions: real engines, `ownerserve directory serve` of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ownerserve.directory.rules import TierCode
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from ownerserve.kv.wire.curve import read_fleet_key, write_fleet_key
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import Reject, Released, ReleaseSession, Status, StatusIs
from ownerserve.node.rpc.server import RpcClient
from tests.support.vllm import connectors, tiny
from tests.support.vllm.asking import ask as ask_worker
from tests.support.vllm.fleet import VllmWorker
from tests.support.vllm.ownerships import Directory, directory_process
from tests.support.vllm.rig import Rig, next_turn
from tests.support.vllm.wire import Answer
from tests.support.waits import until

pytestmark = pytest.mark.vllm

B = 32
NAME = SessionId("5" * 32)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with directory_process(tmp_path) as one:
        yield one


def owning(rig: Rig, store: Path, directory: Directory, worker_id: str, **more: str) -> VllmWorker:
    extra = {"directory": directory.address, "worker_id": worker_id, **more}
    return rig.worker("qwen3", connectors.ours(store, **extra))


def turn(worker: VllmWorker, prompt: list[int], session: str = NAME) -> tuple[Answer, list[int]]:
    """An answer, and the next turn's prompt."""
    answer = worker.generate(prompt, session=session)
    return answer, next_turn(prompt, answer, seed=len(prompt))


def unit_of(store: Path) -> RoutingUnit:
    answer = ask_worker(store, Status())
    assert isinstance(answer, StatusIs) and answer.profile is not None
    assert answer.profile.owns_sessions
    return answer.status.unit


def test_a_worker_owns_what_it_serves_and_so_does_its_next_life(
    rig: Rig, store: Path, directory: Directory
) -> None:
    worker, prompt = owning(rig, store, directory, "v0"), tiny.prompt(300, seed=81)
    for version in range(1, 4):
        before = prompt
        answer, prompt = turn(worker, prompt)
        until(lambda version=version: directory.version(NAME) == version)
    record = directory.known(NAME)
    assert record.owner == unit_of(store) and record.owner_live
    until(lambda: directory.tiers(record.prefix_hash) == {TierCode.DEVICE, TierCode.DISK})
    assert record.tokens == (len(before) + len(answer.tokens) - 1) // B * B
    worker.kill()
    worker = owning(rig, store, directory, "v0")
    assert turn(worker, prompt)[0].cached >= record.tokens - B
    until(lambda: directory.version(NAME) == 4)
    after = directory.known(NAME)
    assert after.owner == unit_of(store)
    assert after.owner.incarnation > record.owner.incarnation and after.epoch > record.epoch


def test_a_session_is_handed_over_where_a_turn_of_it_was_done(
    rig: Rig, tmp_path: Path, directory: Directory
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    first, second = owning(rig, source, directory, "v0"), owning(rig, target, directory, "v1")
    _, prompt = turn(first, tiny.prompt(300, seed=82))
    until(lambda: directory.version(NAME) == 1)
    record, heir = directory.known(NAME), unit_of(target)
    _, prompt = turn(second, prompt)
    assert directory.known(NAME) == record, "served as a guest"

    late = Epoch(Term(0, 0), 0)
    stale = ask_worker(source, ReleaseSession(NAME, late, heir))
    assert stale == Reject(WorkerRefusal.STALE_EPOCH)
    running = first.submit(prompt, session=NAME, max_tokens=400)
    until(lambda: _running(source))
    answer = ask_worker(source, ReleaseSession(NAME, record.epoch, heir))
    assert answer == Reject(WorkerRefusal.SESSION_IS_RUNNING)
    [done] = first.wait([running])
    until(lambda: directory.version(NAME) == 2)

    assert ask_worker(source, ReleaseSession(NAME, record.epoch, heir)) == Released()
    until(lambda: directory.known(NAME).owner == heir)
    assert directory.version(NAME) == 2, "a change of owner finishes no turn"
    # If it ends before it is known to be an owner's, it counts as it goes on from there.
    turn(second, next_turn(prompt, done, seed=5))
    until(lambda: directory.version(NAME) == 3)
    assert directory.known(NAME).owner == heir


def test_a_session_that_ends_is_forgotten_and_one_that_stops_is_given_back(
    rig: Rig, store: Path, directory: Directory
) -> None:
    worker = owning(rig, store, directory, "v0")
    _, prompt = turn(worker, tiny.prompt(300, seed=83))
    turn(worker, tiny.prompt(300, seed=84), "6" * 32)
    until(lambda: directory.version(NAME) == 1)
    turn(worker, prompt, f"{NAME};final")
    until(lambda: directory.record(NAME) is None)
    counts: dict[str, Any] = worker.hook("connector_status")
    assert counts["owner_bound"] == 2 and counts["owner_frames"] >= 3
    worker.shutdown()
    assert not directory.known(SessionId("6" * 32)).owner_live


def test_a_gateway_elsewhere_asks_an_engine_core_with_the_fleets_keys(
    rig: Rig, store: Path, directory: Directory, tmp_path: Path
) -> None:
    file = tmp_path / "fleet.key"
    write_fleet_key(file, field="--out")
    keys = {"rpc_host": "0.0.0.0", "curve_key_file": str(file)}
    worker = owning(rig, store, directory, "v0", **keys)
    turn(worker, tiny.prompt(300, seed=86))
    until(lambda: directory.version(NAME) == 1)
    told = ask_worker(store, Status())
    assert isinstance(told, StatusIs) and told.profile is not None and told.profile.rpc is not None
    everywhere = "curve://0.0.0.0:"
    assert told.profile.rpc.startswith(everywhere)
    address = "curve://127.0.0.1:" + told.profile.rpc.removeprefix(everywhere)
    client = RpcClient(address, key=read_fleet_key(file))
    late = ReleaseSession(NAME, Epoch(Term(0, 0), 0), told.status.unit)
    assert client.ask(late) == Reject(WorkerRefusal.STALE_EPOCH)
    client.close()


def test_a_directory_that_is_not_there_holds_up_no_turn(rig: Rig, store: Path) -> None:
    away = Directory("tcp://127.0.0.1:9")
    worker = owning(rig, store, away, "v0")
    _, prompt = turn(worker, tiny.prompt(300, seed=85))
    assert turn(worker, prompt)[0].cached > 0


def _running(store: Path) -> bool:
    answer = ask_worker(store, Status())
    assert isinstance(answer, StatusIs)
    return answer.status.running_sequences > 0
