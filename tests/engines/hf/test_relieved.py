"""A busy worker is relieved in the gap: a session whose turn stayed there, because bringing its
state would have taken the turn longer, is somewhere else before its next one comes; and who joins a
busy fleet is given idle sessions. Real workers, a gateway and a directory's service, in threads of
one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.engines.hf.build import WorkerOptions  # noqa: E402
from ownerserve.gateway.http.access import parse_worker  # noqa: E402
from ownerserve.node.runtime.node_runtime import Calibration  # noqa: E402
from ownerserve.node.transfers.opening import TransferPlace  # noqa: E402
from ownerserve.router.gap_moves import GapMoves  # noqa: E402
from ownerserve.router.settings import DEFAULTS, by_hand  # noqa: E402
from tests.support.hf.assumed import pass_over  # noqa: E402
from tests.support.hf.busy_worker import FAR, NEAR, Busy, queue_ms  # noqa: E402
from tests.support.hf.engine_rig import assert_cold, text  # noqa: E402
from tests.support.hf.fleet_rig import ServedGateway, ServedWorker  # noqa: E402
from tests.support.hf.owning_fleet import Fleet, name_of  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = pytest.mark.engine

MODEL = "tiny-qwen3"
SEALED = 288
"""The whole blocks of a first turn's prompt and answer."""


OPTIONS: dict[str, Any] = {
    "host_cache_bytes": 64 << 20,
    "transfer": TransferPlace(),
    "chunk_tokens": 16,
}


@pytest.fixture(params=[(2, FAR)])
def fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """So many workers that own and lend, and computing takes long by their prices, and one gateway
    by whose policy a session moves soon."""
    workers, prices = request.param
    monkeypatch.setattr(Calibration, "observe", pass_over)
    monkeypatch.setattr(Calibration.__init__, "__defaults__", (prices,))
    one = Fleet(workers, gateways=0, **OPTIONS)
    leased = 'ownerserve_directory_answers_total{answer="leased"}'
    until(lambda: all(worker.metric(leased) for worker in one.workers))
    settings = by_hand(DEFAULTS, hot_ms=100.0, cool_s=0.0)
    gateway = ServedGateway(
        *one.workers, directory=one.server.address, policy="ownerserve", settings=settings
    )
    one.gateways.append(gateway)
    yield one
    one.close()


def turn(gateway: ServedGateway, session: str, prompt: list[int]) -> tuple[dict[str, Any], str]:
    """A turn of the session; what came, and from where."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1}
    body |= {"return_token_ids": True}
    answer = gateway.http.post("/v1/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    said = {
        "tokens": choice["token_ids"],
        "logprobs": choice["logprobs"]["token_logprobs"],
        "cached": int(answer.headers["x-ownerserve-cached-tokens"]),
        "mode": answer.headers["x-ownerserve-mode"],
    }
    return said, answer.headers["x-ownerserve-worker"]


def steps(gateway: ServedGateway, step: str) -> float:
    return gateway.metric("ownerserve_gateway_wanted_moves_total", step=step)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_a_session_leaves_a_busy_worker_between_two_turns(
    fleet: Fleet, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gateway,) = fleet.gateways
    sends = []
    if is_cut:
        monkeypatch.setattr(GapMoves, "sent", lambda self, sent, now: sends.append(sent))
    prompt = text(300, seed=3)
    first, home = turn(gateway, "agent", prompt)
    here = next(worker for worker in fleet.workers if worker.name == home)
    (there,) = [worker for worker in fleet.workers if worker is not here]
    until(lambda: here.metric("ownerserve_sessions_owned") == 1)
    session = name_of(gateway)
    busy = Busy(here)
    try:
        prompt = [*prompt, *first["tokens"], 7]
        until(lambda: queue_ms(gateway, here) > 1000.0)
        second, at = turn(gateway, "agent", prompt)
        assert (at, second["cached"]) == (here.name, SEALED), "it stays, since its state is far"
        assert_cold(MODEL, prompt, second)
        prompt = [*prompt, *second["tokens"], 8]
        if is_cut:
            looks = gateway.read(lambda: gateway.gateway.turns.now()) + 10.0
            until(lambda: gateway.read(lambda: gateway.gateway.turns.now()) > looks)
            assert [one.decision.wanted for one in sends if one.decision.wanted]
        else:
            until(lambda: fleet.owner(session) == there.unit)
            until(lambda: steps(gateway, "taken") == 1)
    finally:
        busy.end()
    assert fleet.owner(session) == (here.unit if is_cut else there.unit)
    until(lambda: queue_ms(gateway, here) == 0.0)
    third, at = turn(gateway, "agent", prompt)
    assert_cold(MODEL, prompt, third)
    assert (at, third["mode"]) == ((here if is_cut else there).name, "direct_append")
    assert third["cached"] >= SEALED
    assert (steps(gateway, "wanted"), steps(gateway, "granted")) == ((0, 0) if is_cut else (1, 1))


@pytest.mark.parametrize("fleet", [(1, NEAR)], indirect=True)
def test_who_joins_a_busy_fleet_is_given_idle_sessions(fleet: Fleet) -> None:
    (gateway,), (here,) = fleet.gateways, fleet.workers
    contexts: dict[str, list[int]] = {}
    for number in range(2):
        prompt = text(300, seed=number)
        said, _ = turn(gateway, f"agent{number}", prompt)
        contexts[f"agent{number}"] = [*prompt, *said["tokens"], 7]
    until(lambda: here.metric("ownerserve_sessions_owned") == 2)
    busy = Busy(here)
    try:
        until(lambda: queue_ms(gateway, here) > 1000.0)
        options = {"model": MODEL, "kv_bytes": 8 << 20, "directory": fleet.server.address}
        fleet.workers.append(ServedWorker(WorkerOptions(worker_id="w1", **options, **OPTIONS)))
        there = fleet.workers[-1]
        gateway.run(gateway.gateway.roster.join(parse_worker(there.url)))
        until(lambda: there.metric("ownerserve_sessions_owned") == 2)
        until(lambda: steps(gateway, "taken") == 2)
    finally:
        busy.end()
    for name, prompt in contexts.items():
        said, at = turn(gateway, name, prompt)
        assert (at, said["cached"], said["mode"]) == (there.name, SEALED, "direct_append")
        assert_cold(MODEL, prompt, said)
