"""A session moves only to a worker that says it can take it without bringing back soon what that
displaces."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.kv.wire.status import RefillShare
from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, TurnClass
from ownerserve.router.fleet import Fleet
from ownerserve.router.policies import make_policy
from ownerserve.router.settings import Settings
from ownerserve.router.worker import Worker
from tests.support.router.fleets import ABLE, fleet_of, load, on, owned, request, status

SETTINGS = Settings(hot_ms=100.0, hot_ratio=2.0, cool_s=30.0)
HOT = 20_000
CALM = (RefillShare(0, 0.0), RefillShare(100_000, 0.25))
FULL = (RefillShare(0, 2.0), RefillShare(100_000, 8.0))
FULL_AT_20K = (RefillShare(0, 0.0), RefillShare(20_000, 1.0))


def states(
    fleet: Fleet, worker: Worker, shares: tuple[RefillShare, ...], *, pending: int = 0
) -> None:
    said = replace(status(worker.id, 1.0, pending=pending), refill_shares=shares)
    fleet.heard(said, 1.0)


def decide(asked: RoutingRequest, fleet: Fleet, name: str = "ownerserve") -> Decision:
    return make_policy(name, SETTINGS).decide(asked, fleet.candidates(None))


def hot_fleet(*others: tuple[RefillShare, ...], pending: int = HOT) -> tuple[Fleet, list[Worker]]:
    fleet = fleet_of(*[ABLE] * (1 + len(others)))
    workers = list(fleet)
    for at, (worker, shares) in enumerate(zip(workers[1:], others, strict=True)):
        states(fleet, worker, shares, pending=at * 10)
    load(workers[0], pending=HOT)
    return fleet, workers


@pytest.mark.parametrize(
    ("shares", "moves"),
    [((), True), (CALM, True), (FULL, False), (FULL_AT_20K, False)],
    ids=["says nothing", "calm", "full", "full for its size"],
)
def test_a_hot_session_leaves_only_for_who_can_take_it(
    shares: tuple[RefillShare, ...], moves: bool
) -> None:
    fleet, (home, other) = hot_fleet(shares)
    decision = decide(owned(home), fleet)
    assert (decision.worker is other) is moves
    assert decision.reason is (DispatchReason.HOT_OWNER if moves else DispatchReason.HOT_NO_TARGET)


def test_a_short_session_may_go_where_a_long_one_may_not() -> None:
    fleet, (home, other) = hot_fleet(FULL_AT_20K)
    assert decide(owned(home, context=5_000), fleet).worker is other
    assert decide(owned(home, context=15_000), fleet).worker is home


def test_what_waits_at_the_target_takes_its_room_first() -> None:
    fleet, (home, other) = hot_fleet(FULL_AT_20K)
    load(other, pending=6_000)
    assert decide(owned(home, context=5_000), fleet).worker is home


@pytest.mark.parametrize(
    ("held", "pending", "busy", "since_move_s", "leaves"),
    [
        (12_000, 5_000, 0, 600.0, True),
        (28_000, 5_000, 0, 600.0, False),
        (28_000, 30_000, 0, 600.0, True),
        (28_000, 30_000, 20_000, 600.0, False),
        (28_000, 30_000, 0, 5.0, False),
    ],
    ids=["most is gone", "most is here", "a long wait", "no less busy", "moved just now"],
)
def test_what_is_left_of_a_session_is_taken_along_only_as_by_a_move(
    held: int, pending: int, busy: int, since_move_s: float, leaves: bool
) -> None:
    """Of 40,000 tokens those that home has would go over the network, to a worker that is as
    full."""
    fleet = fleet_of(ABLE, ABLE)
    home, other = fleet
    states(fleet, home, FULL, pending=pending)
    states(fleet, other, FULL, pending=busy)
    turn = request(
        40_500, owner=home, turns=3, copies=(on(home, held),), known_tokens=40_000,
        since_move_s=since_move_s,
    )  # fmt: skip
    assert (decide(turn, fleet).worker is other) is leaves


def test_a_full_one_is_passed_over_for_a_busier_one_that_has_room() -> None:
    fleet, (home, _, calm) = hot_fleet(FULL, CALM)
    assert decide(owned(home), fleet).worker is calm
    assert decide(owned(home), fleet, "ear").worker is not calm, "a baseline as it is published"


def test_a_holder_is_asked_for_what_it_lacks() -> None:
    """It has all but 700 tokens of the prompt: those it can take."""
    fleet, (home, holder, full) = hot_fleet(FULL_AT_20K, FULL)
    copies = (on(home, 10_000), on(holder, 9_900))
    turn = request(10_500, owner=home, turns=3, copies=copies, known_tokens=10_000)
    decision = decide(turn, fleet)
    assert decision.worker is holder
    assert all(option.worker is not full for option in decision.alternatives)


def test_who_comes_back_late_leaves_a_calm_home_only_for_who_can_take_it() -> None:
    fleet = fleet_of(ABLE, ABLE)
    home, other = fleet
    cold = request(
        50_500, owner=home, turns=3, turn=TurnClass.COLD_RESUME, idle_s=900.0,
        copies=(on(home, 1_000), on(other, 50_000, Tier.HOST)), known_tokens=50_000,
    )  # fmt: skip
    states(fleet, other, CALM)
    assert decide(cold, fleet).worker is other
    fleet.heard(replace(status(other.id, 2.0), refill_shares=FULL), 2.0)
    decision = decide(cold, fleet)
    assert decision.worker is home
    assert decision.action in (PlacementAction.COLOCATED_PREFILL, PlacementAction.ARTIFACT_FETCH)


def test_a_new_session_goes_where_it_went_before() -> None:
    """The gate is for moves: somebody has to take who is new."""
    fleet = fleet_of(ABLE, ABLE)
    first, second = fleet
    states(fleet, first, FULL)
    states(fleet, second, CALM)
    load(second, pending=HOT)
    assert decide(request(1000), fleet).worker is first


def test_what_a_worker_said_is_forgotten_with_its_life_and_read_by_size() -> None:
    fleet = fleet_of(ABLE)
    (worker,) = fleet
    assert (worker.load.refill_share(10), worker.load.busy_share) == (None, None)
    said = replace(status(worker.id, 1.0), refill_shares=FULL, busy_share=0.25)
    fleet.heard(said, 1.0)
    assert worker.load.refill_share(50_000) == pytest.approx(3.2)
    assert worker.load.busy_share == 0.25
    fleet.heard(status(worker.id, 2.0), 2.0)
    assert (worker.load.refill_share(10), worker.load.busy_share) == (None, None)
    fleet.heard(replace(said, as_of=3.0), 3.0)
    fleet.heard(status(worker.id, 1.0, incarnation=2), 4.0)
    assert (worker.load.refill_share(10), worker.load.busy_share) == (None, None)


def test_a_prompt_is_prefilled_elsewhere_only_where_that_displaces_nobody_who_comes_back() -> None:
    """What it computes lies there too until the room is needed."""
    fleet = fleet_of(ABLE, ABLE)
    home, other = fleet
    load(home, sequences=40)
    turn = request(40_000, turn=TurnClass.NEW_LONG_PREFIX)
    states(fleet, other, CALM)
    calm = {one.action for one in decide(turn, fleet).alternatives}
    assert PlacementAction.REMOTE_PREFILL in calm
    for number, worker in enumerate(fleet):
        fleet.heard(replace(status(worker.id, 2.0 + number), refill_shares=FULL), 2.0 + number)
    full = {one.action for one in decide(turn, fleet).alternatives}
    assert full == {PlacementAction.COLOCATED_PREFILL}
