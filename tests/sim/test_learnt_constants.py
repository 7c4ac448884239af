"""What a run decides by is learnt in it: what was taken to be so before it does not matter."""

from __future__ import annotations

import pytest

from ownerserve.router.learning import LEARNT_FROM
from ownerserve.router.settings import DERIVED, Settings, WorkloadFacts
from ownerserve.sim.build import BaselineParts, build
from ownerserve.sim.workload import WorkloadDriver
from tests.support.sim.fleet_driver import agents, run, setup

TRACE = agents(sessions=24, turns=16)
PRIORS = (
    WorkloadFacts(
        context_tokens_p50=100, context_tokens_p90=200, addition_tokens_p50=9, reuse_share=0.01
    ),
    WorkloadFacts(
        context_tokens_p50=500_000,
        context_tokens_p90=900_000,
        addition_tokens_p50=90_000,
        reuse_share=0.999,
    ),
)


def settings_of_a_run(prior: WorkloadFacts) -> tuple[Settings, Settings]:
    """What a run began with and what it ended with."""
    wanted = setup(kv_bytes=1 << 33)
    built = build(WorkloadDriver.of(TRACE, wanted.shape), wanted, BaselineParts(prior=prior))
    first = built.fleet.gateways[0].router.settings
    return first, run(built).gateways[0].router.settings


def test_runs_that_begin_with_other_facts_come_to_decide_by_the_same() -> None:
    assert TRACE.request_count > 2 * LEARNT_FROM
    (first, ended), (other, too) = map(settings_of_a_run, PRIORS)
    for name in DERIVED:
        assert getattr(first, name) < 0.7 * getattr(other, name)
        assert getattr(ended, name) == pytest.approx(getattr(too, name), rel=0.1)


def test_what_is_given_by_hand_is_not_learnt() -> None:
    wanted = setup(hot_ms=7.0, cool_s=3.0)
    settings = (
        run(build(WorkloadDriver.of(TRACE, wanted.shape), wanted)).gateways[0].router.settings
    )
    assert (settings.hot_ms, settings.cool_s) == (7.0, 3.0)


def test_what_a_turn_adds_is_what_its_session_did_not_have_before_it_came() -> None:
    """News of what a turn leaves may be heard before its end."""
    built = build(WorkloadDriver.of(TRACE, setup().shape), setup(news_ms=0.0))
    learning = run(built).gateways[0].router.learning
    assert learning is not None and learning.facts is not None
    assert 600 <= learning.facts.addition_tokens_p50 <= 1400
    assert 0.5 <= learning.facts.reuse_share <= 0.95
