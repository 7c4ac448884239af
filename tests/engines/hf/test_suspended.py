"""A session is put away into the store that workers share, and is nobody's until its next turn,
which any of them serves from there. Real workers, a gateway and a directory's service, in threads
of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.directory import messages as ask  # noqa: E402
from ownerserve.engines.hf.build import WorkerOptions  # noqa: E402
from ownerserve.gateway.http.access import parse_worker  # noqa: E402
from ownerserve.kv.ids import SessionId, WorkerId  # noqa: E402
from ownerserve.kv.messages import NO_UNIT  # noqa: E402
from ownerserve.kv.wire.refusals import WorkerRefusal  # noqa: E402
from ownerserve.kv.wire.rpc import Reject, Suspend, Suspended  # noqa: E402
from ownerserve.node.retention.spills import IdleSpills  # noqa: E402
from ownerserve.node.runtime.node_runtime import Calibration  # noqa: E402
from ownerserve.node.transfers.opening import TransferPlace  # noqa: E402
from ownerserve.node.vocabulary.settings import NodeSettings  # noqa: E402
from tests.support.hf.assumed import DEAR, pass_over  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.fleet_rig import WAIT_S, ServedWorker  # noqa: E402
from tests.support.hf.owning_fleet import NAME, Fleet, asked, name_of, serve_at  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = pytest.mark.engine

MODEL = "tiny-qwen3"
PROMPT = text(300, seed=3)
SEALED = 288
"""The whole blocks of a first turn's prompt and answer."""


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Workers that share a medium, and would copy nothing of an idle session by themselves for an
    hour."""
    shared = tmp_path / "shared"
    shared.mkdir()
    node = msgspec.structs.replace(NodeSettings(), spill_after_s=3600.0)
    return {"remote": str(shared), "node": node, "transfer": TransferPlace()}


@pytest.fixture
def fleet(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(Calibration, "observe", pass_over)
    monkeypatch.setattr(Calibration.__init__, "__defaults__", (DEAR,))
    one = Fleet(1, gateways=1, **options)
    until(lambda: one.workers[0].metric("ownerserve_directory_answers_total"))
    yield one
    one.close()


def joined(fleet: Fleet, options: dict[str, Any]) -> ServedWorker:
    """One more worker, which the gateway knows."""
    more = WorkerOptions(
        model=MODEL, kv_bytes=8 << 20, directory=fleet.server.address, worker_id="w1", **options
    )
    fleet.workers.append(ServedWorker(more))
    (gateway,) = fleet.gateways
    gateway.run(gateway.gateway.roster.join(parse_worker(fleet.workers[-1].url)))
    return fleet.workers[-1]


def test_a_drained_worker_that_nobody_relieves_puts_its_sessions_away(
    fleet: Fleet, options: dict[str, Any]
) -> None:
    (gateway,), (here,) = fleet.gateways, fleet.workers
    said = gateway.complete(PROMPT, "agent").json()["choices"][0]
    prompt = [*PROMPT, *said["token_ids"], *text(20, seed=9)]
    session = name_of(gateway)
    until(lambda: fleet.version(session) == 1)
    gateway.read(lambda: gateway.gateway.roster.drain(WorkerId(here.name)))
    until(lambda: gateway.metric("ownerserve_gateway_moves_total", end="suspended") == 1)
    until(lambda: fleet.owner(session) == NO_UNIT)
    assert here.metric("ownerserve_sessions_owned") == 0
    until(lambda: here.http.get("/ownerserve/cache").json()["sessions"] == 0)

    there = joined(fleet, options)
    answer = gateway.complete(prompt, "agent")
    assert answer.headers["x-ownerserve-worker"] == there.name
    brought = answer.headers["x-ownerserve-brought-tokens"]
    assert f"remote={SEALED}" in brought, "of the medium, not of the drained worker"
    until(lambda: fleet.version(session) == 2)
    assert fleet.owner(session) == there.unit


def test_its_answers_are_those_of_a_cold_worker(fleet: Fleet, options: dict[str, Any]) -> None:
    (here,) = fleet.workers
    said = serve_at(here, PROMPT)
    prompt = [*PROMPT, *said["tokens"], *text(20, seed=9)]
    until(lambda: fleet.version(NAME) == 1)
    assert asked(here, Suspend(NAME)) == Suspended()
    assert fleet.owner(NAME) == NO_UNIT
    assert asked(here, Suspend(NAME)) == Reject(WorkerRefusal.UNKNOWN_SESSION)
    there = joined(fleet, options)
    answer = serve_at(there, prompt)
    assert answer["cached"] == SEALED
    assert_cold(MODEL, prompt, answer)
    until(lambda: fleet.owner(NAME) == there.unit)
    found = fleet.record(NAME)
    assert isinstance(found, ask.SessionIs) and found.version == 2


def test_a_turn_that_comes_as_it_is_put_away_keeps_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here,) = fleet.workers
    said = serve_at(here, PROMPT)
    prompt = [*PROMPT, *said["tokens"], *text(20, seed=9)]
    until(lambda: fleet.version(NAME) == 1)
    transfers, engine = here.worker.transfers, here.worker.engine
    assert transfers is not None
    with monkeypatch.context() as slow:
        slow.setattr(IdleSpills, "is_pending", lambda self, sessions: True)  # a store that is slow
        answer = transfers.answering(engine.call)(Suspend(NAME))
        engine.between_steps(lambda: None).result(WAIT_S)
        assert_cold(MODEL, prompt, serve_at(here, prompt))
        until(lambda: fleet.version(NAME) == 2)
        assert not answer.done()
    assert answer.result(WAIT_S) == Reject(WorkerRefusal.STALE_VERSION)
    assert fleet.owner(NAME) == here.unit


def test_who_has_no_such_session_says_so(fleet: Fleet) -> None:
    (here,) = fleet.workers
    stranger = Suspend(SessionId("e" * 32))
    assert asked(here, stranger) == Reject(WorkerRefusal.UNKNOWN_SESSION)
