"""What the gateway prices a turn at, against the figures and the steps of the workers themselves.

Two unlike models on real engines, one gateway. No wall clock decides: a turn's cost is what its
engine's own steps took, in the same run, and medians of several turns are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.engines.hf.build import WorkerOptions
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.kv.wire.status import ProfileStatement, read_status
from ownerserve.router.admission import SeatSettings
from ownerserve.router.messages import Dispatch
from ownerserve.router.worker import Worker
from tests.support.hf.fleet_rig import ServedGateway, ServedWorker
from tests.support.waits import until

pytestmark = pytest.mark.engine
MEASURES = True
"""Prices are what this machine measures."""

MODELS = ("tiny-qwen3", "tiny-v4")
NEW = 12
TURNS = 7


class Fleet:
    """A worker of each model, the second with a store, behind one gateway."""

    def __init__(self, store: Path) -> None:
        options = (
            WorkerOptions(model=MODELS[0], kv_bytes=64 << 20),
            WorkerOptions(
                model=MODELS[1], kv_bytes=64 << 20, store=store, host_cache_bytes=1 << 26
            ),
        )
        self.workers = [ServedWorker(one) for one in options]
        self.gateway = ServedGateway(
            *self.workers, health_interval_s=0.05, seats=SeatSettings(share=0.9)
        )

    def stated(self, at: int) -> ProfileStatement:
        read = read_status(self.workers[at].http.get("/ownerserve/status").content)
        assert read.status is not None
        return read.status.profile

    def known(self, at: int) -> Worker:
        """The worker as the gateway knows it once it has read what is stated now."""
        (worker,) = [
            one for one in self.gateway.gateway.state.fleet if one.id == self.workers[at].name
        ]
        speed = self.stated(at).speed
        assert speed is not None
        until(lambda: self.gateway.read(lambda: worker.speed.step_ms) == speed.step_ms)
        until(
            lambda: self.gateway.read(lambda: worker.speed.prefill.b_ms) == speed.prefill_token_ms
        )
        return worker

    def turn(self, at: int, prompt: list[int], session: str) -> tuple[Dispatch, float, list[int]]:
        """The decision, what the engine's steps took (ms), and the conversation after it."""
        worker = self.workers[at]
        before = worker.metric("ownerserve_step_seconds_sum")
        body = {
            "model": MODELS[at], "prompt": prompt, "max_tokens": NEW, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        answer = self.gateway.http.post(
            "/v1/completions", json=body, headers={"x-session-id": session}
        )
        assert answer.status_code == 200
        until(lambda: not self.gateway.read(lambda: self.gateway.gateway.state.live))
        took_ms = (worker.metric("ownerserve_step_seconds_sum") - before) * 1e3
        outcome = self.gateway.read(
            lambda: self.gateway.gateway.turns.observer.decisions[-1].outcome
        )
        assert isinstance(outcome, Dispatch)
        return outcome, took_ms, [*prompt, *answer.json()["choices"][0]["token_ids"]]

    def close(self) -> None:
        self.gateway.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("store"))
    yield fleet
    fleet.close()


@pytest.mark.parametrize("at", [0, 1], ids=MODELS)
def test_prices_are_the_workers_own_figures_and_near_what_turns_take(fleet: Fleet, at: int) -> None:
    """A 21-token turn on an idle tiny worker was priced 1,798 ms: all of it an H200's 256 steps."""
    talk, ratios = list(range(21)), list[float]()
    for number in range(TURNS + 2):
        worker = fleet.known(at)
        speed = fleet.stated(at).speed
        assert speed is not None
        decided, took_ms, talk = fleet.turn(at, talk, f"prices-{at}")
        talk += [number] * 9
        if number < 2:
            continue  # an answer's length, and what a byte is, are not known yet
        option = decided.decision.alternatives[0]
        cached, new = option.cached_tokens, decided.prompt_tokens - option.cached_tokens
        own_ms = speed.prefill_pass_ms + new * (
            speed.prefill_token_ms + speed.prefill_attention_ms * (cached + new / 2)
        )
        own_ms += NEW * (speed.step_ms + speed.step_ms_per_sequence)
        assert option.terms()["compute"] == pytest.approx(own_ms, rel=0.1)
        assert option.worker is worker
        ratios.append(option.total_ms / took_ms)
    assert 0.1 < median(ratios) < 10.0, ratios  # what was measured may lie a busy minute back


def test_each_workers_bytes_actions_and_tiers_are_known_as_they_are(fleet: Fleet) -> None:
    plain, stored = fleet.known(0), fleet.known(1)
    for at, worker in enumerate((plain, stored)):
        device = fleet.workers[at].http.get("/ownerserve/status").json()["device"]
        sizes = device["slot_bytes"]
        total = fleet.stated(at).kv_bytes_per_token * device["block_tokens"]
        assert worker.speed.kv_bytes_per_token * device["block_tokens"] == total
        assert total <= sum(sizes.values())
        assert worker.profile.model == MODELS[at]
        assert worker.profile.spec_digest == fleet.stated(at).spec_digest != ""
    assert plain.speed.kv_bytes_per_token == 1024
    assert plain.speed.kv_bytes_per_sequence == 0 < stored.speed.kv_bytes_per_sequence
    assert plain.profile.spec_digest != stored.profile.spec_digest
    on_the_spot = {PlacementAction.COLOCATED_PREFILL, PlacementAction.DECODE_CONTINUATION}
    assert plain.profile.actions == on_the_spot
    assert stored.profile.actions == on_the_spot | {PlacementAction.TAIL_RECOMPUTE}
    tiers = {tier.name: tier.bytes_total for tier in fleet.stated(1).tiers}
    assert tiers[Tier.HOST] == 1 << 26
    assert (tiers[Tier.DISK] or 0) > 1 << 30


def test_three_small_sessions_have_seats_on_a_small_worker(fleet: Fleet) -> None:
    for _ in range(2):
        for name in "abc":
            fleet.turn(0, [ord(name)] * 10, f"seat-{name}")
    admission = fleet.gateway.gateway.turns.admission.seats
    assert admission is not None and admission.impatient == 0
