"""A price that came out too high is found out: what it keeps from being done is tried."""

from __future__ import annotations

import pytest

from ownerserve.kv.messages import Tier
from ownerserve.node.restore.sources import is_loading
from ownerserve.node.restore.trials import TRIAL_SHARE, Trials
from ownerserve.node.runtime.node_runtime import UNMEASURED
from ownerserve.node.vocabulary.events import RestoreOutcome
from ownerserve.plan.cost.events import Loaded, Observation, Prefilled
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.inputs import FULL_ABILITIES, ModelState, Piece, Point, RangeSpan, RestoreQuery
from ownerserve.plan.outcome import Basis
from ownerserve.plan.restore import Planner
from tests.support.node.node_driver import B, NodeDriver

DENSE = ModelState(layers=8, block_tokens=32, range_bytes_per_token=32_768.0)
STORED = 64
QUERY = RestoreQuery(
    tokens=STORED + 1,
    spans=(RangeSpan(0, STORED, (Piece(Tier.DISK, 2 << 20),)),),
    points=(Point(STORED),),
    known_tokens=STORED,
)


class Worker:
    """It only resumes: evicted, it is asked for the same prompt again. `load_ms` and `tail_ms` are
    what loading and the short pass behind it take in truth, `full_ms` computing all."""

    def __init__(self, *, full_ms: float, load_ms: float, tail_ms: float) -> None:
        self.full_ms, self.load_ms, self.tail_ms = full_ms, load_ms, tail_ms
        self.planner, self.costs, self.trials = (
            Planner(DENSE, FULL_ABILITIES),
            CostModel(UNMEASURED),
            Trials(),
        )
        self.loaded: list[bool] = []
        self.tried = 0
        self.spent_ms = 0.0

    def learn(self, *seen: Observation) -> None:
        for one in seen:
            self.costs.observe(one)

    def resume(self) -> None:
        plan = self.trials.plan(self.planner, QUERY, self.costs.prices())
        self.loaded.append(is_loading(plan.chosen))
        self.tried += plan.basis is Basis.TRIAL
        if self.loaded[-1]:
            self.spent_ms += self.load_ms + self.tail_ms
            self.learn(Loaded(Tier.DISK, 2 << 20, self.load_ms))
            self.learn(Prefilled(1, STORED, self.tail_ms))
        else:
            self.spent_ms += self.full_ms
            self.learn(Prefilled(STORED + 1, 0, self.full_ms))


def test_a_worker_that_only_resumes_finds_out_that_loading_pays() -> None:
    """Its first pass was a warm-up that took as long as one over a whole prompt: by that price what
    is computed behind a load costs as much as it saves."""
    worker = Worker(full_ms=17.0, load_ms=2.0, tail_ms=5.0)
    worker.learn(Prefilled(17, 0, 60.0), Prefilled(STORED + 1, 0, 17.0))
    plan = worker.planner.plan(QUERY, worker.costs.prices())
    assert not is_loading(plan.chosen), "the circle that is to be broken"
    for _ in range(40):
        worker.resume()
    assert all(worker.loaded[-20:])
    assert worker.tried < 20, "and then it is no trial"


def test_a_load_that_was_slow_once_is_tried_again() -> None:
    worker = Worker(full_ms=17.0, load_ms=2.0, tail_ms=5.0)
    worker.learn(*(Prefilled(STORED + 1, 0, 17.0), Prefilled(1, STORED, 5.0)) * 4)
    worker.learn(*[Loaded(Tier.DISK, 2 << 20, 40.0)] * 20)
    for _ in range(400):
        worker.resume()
    assert not worker.loaded[0] and all(worker.loaded[-50:])


def test_trials_cost_no_more_than_their_share() -> None:
    worker = Worker(full_ms=17.0, load_ms=60.0, tail_ms=5.0)
    worker.learn(*(Prefilled(STORED + 1, 0, 17.0), Prefilled(1, STORED, 5.0)) * 8)
    worker.learn(*[Loaded(Tier.DISK, 2 << 20, 60.0)] * 20)
    turns = 1_000
    for _ in range(turns):
        worker.resume()
    assert worker.tried
    assert worker.spent_ms <= turns * worker.full_ms * (1.0 + 1.2 * TRIAL_SHARE)


def test_nothing_is_tried_where_nothing_is_stored() -> None:
    worker = Worker(full_ms=17.0, load_ms=2.0, tail_ms=5.0)
    nothing = RestoreQuery(tokens=STORED + 1, spans=(), points=(), known_tokens=0)
    plan = worker.planner.plan(nothing, worker.costs.prices())
    for _ in range(100):
        assert worker.trials.plan(worker.planner, nothing, worker.costs.prices()) == plan


@pytest.mark.parametrize(("turns", "outcome"), [(1, "not_worth_it"), (100, "loaded")])
def test_a_node_tries(turns: int, outcome: str) -> None:
    """Computing is said to be next to free: a restore is not worth it, until one is due."""
    driver = NodeDriver(ms_per_token=1.0)
    tokens = list(range(10 * B + 5))
    driver.turn(tokens)
    driver.idle()
    for _ in range(200):
        driver.state.costs.observe(Prefilled(10 * B, 0, 0.5))
        driver.state.costs.observe(Prefilled(2, 10 * B, 0.4))
    seen = []
    for _ in range(turns):
        driver.forget_device()
        turn = driver.arrive(tokens)
        driver.settle()
        report = driver.reports[turn]
        seen.append(report)
        driver.run(turn)
        driver.check()
    assert RestoreOutcome(outcome) in {report.outcome for report in seen}
    assert any(report.is_trial for report in seen) == (outcome == "loaded")
