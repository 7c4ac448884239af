"""A worker that has not measured itself yet is priced as its like that have."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.plan.cost.prices import Coefficients
from ownerserve.router.fleet import Fleet
from ownerserve.router.messages import WorkerUp
from ownerserve.router.worker import DEFAULT_SPEED, Profile, Speed

SLOW = replace(DEFAULT_SPEED, prefill=Coefficients(400.0, 8.0, 0.0), step_ms=200.0)
ASSUMED = replace(DEFAULT_SPEED, kv_bytes_per_token=7.0, replay_tokens=3)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def says(fleet: Fleet, name: str, speed: Speed, *, measured: bool, digest: str = "spec") -> None:
    profile = Profile(
        spec_digest=digest, speed=speed, is_prefill_measured=measured, are_steps_measured=measured
    )
    fleet.raise_up(WorkerUp(WorkerId(name), 0, Incarnation(1), profile))
    fleet.check()


def step_ms(fleet: Fleet, name: str) -> float:
    return fleet[WorkerId(name)].speed.step_ms


def test_one_that_measured_itself_slow_is_no_worse_than_one_that_has_not(fleet: Fleet) -> None:
    says(fleet, "one", DEFAULT_SPEED, measured=False)
    says(fleet, "two", ASSUMED, measured=False)
    assert step_ms(fleet, "one") == step_ms(fleet, "two") == DEFAULT_SPEED.step_ms
    says(fleet, "one", SLOW, measured=True)
    two = fleet[WorkerId("two")].speed
    assert (two.prefill, two.step_ms) == (SLOW.prefill, SLOW.step_ms)
    assert (two.kv_bytes_per_token, two.replay_tokens) == (7.0, 3), "those are facts of its own"
    says(fleet, "late", ASSUMED, measured=False)
    assert step_ms(fleet, "late") == SLOW.step_ms


def test_one_that_measures_itself_is_believed_and_others_follow_one_only(fleet: Fleet) -> None:
    says(fleet, "one", SLOW, measured=True)
    says(fleet, "two", ASSUMED, measured=False)
    says(fleet, "three", ASSUMED, measured=False)
    says(fleet, "two", replace(SLOW, step_ms=50.0), measured=True)
    assert step_ms(fleet, "two") == 50.0
    assert step_ms(fleet, "three") == SLOW.step_ms
    says(fleet, "one", replace(SLOW, step_ms=70.0), measured=True)
    assert step_ms(fleet, "three") == 70.0
    fleet.take_down(WorkerId("one"))
    says(fleet, "two", replace(SLOW, step_ms=40.0), measured=True)
    assert step_ms(fleet, "three") == 40.0, "the other stands in for one that is down"


def test_what_a_worker_has_measured_is_its_own_and_only_the_rest_is_presumed(fleet: Fleet) -> None:
    """A busy worker measures its steps long before a prefill that runs alone."""
    own = replace(ASSUMED, step_ms=3.0)
    profile = Profile(spec_digest="spec", speed=own, is_prefill_measured=False)
    fleet.raise_up(WorkerUp(WorkerId("two"), 0, Incarnation(1), profile))
    says(fleet, "one", SLOW, measured=True)
    two = fleet[WorkerId("two")]
    assert not two.profile.is_measured
    assert (two.speed.prefill, two.speed.step_ms) == (SLOW.prefill, 3.0)


def test_who_goes_or_becomes_another_model_gives_the_measure_no_more(fleet: Fleet) -> None:
    """Nobody says anything new: what another of the same kind has measured counts at once."""
    says(fleet, "one", SLOW, measured=True)
    says(fleet, "two", replace(SLOW, step_ms=50.0), measured=True)
    says(fleet, "three", ASSUMED, measured=False)
    fleet.take_down(WorkerId("one"))
    assert step_ms(fleet, "three") == 50.0
    says(fleet, "one", replace(SLOW, step_ms=1.0), measured=True, digest="other")
    assert step_ms(fleet, "three") == 50.0
    says(fleet, "one", replace(SLOW, step_ms=70.0), measured=True)
    fleet.take_down(WorkerId("two"))
    assert step_ms(fleet, "three") == 70.0
    says(fleet, "one", SLOW, measured=True, digest="other")
    says(fleet, "two", replace(SLOW, step_ms=60.0), measured=True)
    assert step_ms(fleet, "three") == 60.0, "one lives under another digest"
    fleet.take_down(WorkerId("two"))
    says(fleet, "late", ASSUMED, measured=False)
    assert step_ms(fleet, "late") == 60.0, "nobody has measured it since"


@pytest.mark.parametrize("digest", ["", "other"])
def test_another_model_or_an_engine_that_states_none_lends_nothing(
    fleet: Fleet, digest: str
) -> None:
    says(fleet, "one", SLOW, measured=True, digest=digest)
    says(fleet, "two", ASSUMED, measured=False, digest="" if digest == "" else "spec")
    assert step_ms(fleet, "two") == ASSUMED.step_ms
