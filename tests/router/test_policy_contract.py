"""One contract for every policy: what the state and whoever carries decisions out rely on."""

from __future__ import annotations

import random

import pytest

from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, TurnClass
from ownerserve.router.fleet import Candidates, Fleet
from ownerserve.router.messages import Aborted, Done, Failed, Failure, FirstByte, Refuse
from ownerserve.router.policies import ROUTING_POLICIES, RoutingPolicy, make_policy
from ownerserve.router.policies.pulling import Pulling
from ownerserve.router.requests.body import Usage
from ownerserve.router.settings import DEFAULTS, Settings
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Profile, WorkerRole
from tests.support.examples import examples
from tests.support.router.fleets import (
    ABLE,
    PLAIN,
    dispatched,
    fleet_of,
    load,
    on,
    owned,
    raise_up,
    request,
    stored,
)

SOURCED = {
    PlacementAction.ARTIFACT_FETCH,
    PlacementAction.STATE_MIGRATION,
    PlacementAction.TAIL_RECOMPUTE,
}


PULLS = ", pulls"
EVERY = (*ROUTING_POLICIES, f"kv_aware{PULLS}", f"round_robin{PULLS}")


def made(name: str, settings: Settings = DEFAULTS) -> RoutingPolicy:
    policy = make_policy(name.removesuffix(PULLS), settings)
    return Pulling(policy) if name.endswith(PULLS) else policy


@pytest.fixture(params=EVERY)
def policy(request: pytest.FixtureRequest) -> RoutingPolicy:
    return made(request.param)


def questions(fleet: Fleet) -> list[RoutingRequest]:
    """Every class, with and without owner, copies near and far, prompts short and long."""
    workers = list(fleet)
    first, last = workers[0], workers[-1]
    every = [request(), request(100_000), request(session=None)]
    for turn in TurnClass:
        every += [
            owned(first, turn=turn),
            owned(last, turn=turn, context=200_000, since_move_s=1.0),
            request(5000, turn=turn, copies=(on(first, 4000),)),
            request(5000, turn=turn, turns=3, copies=(on(last, 4000, Tier.DISK),)),
            request(5000, turn=turn, turns=3, copies=(stored(4000),), known_tokens=4500),
        ]
    return every


def fleets() -> list[Fleet]:
    split = [Profile(speed=ABLE.speed, actions=ABLE.actions, role=role) for role in WorkerRole]
    return [fleet_of(PLAIN), fleet_of(*[PLAIN] * 4), fleet_of(*[ABLE] * 4), fleet_of(*split, ABLE)]


def decisions(policy: RoutingPolicy) -> list[tuple[RoutingRequest, Candidates, Decision]]:
    made = []
    for fleet in fleets():
        candidates = fleet.candidates(None)
        for worker in fleet:
            load(worker, pending=worker.order * 50_000, sequences=worker.order)
        for asked in questions(fleet):
            if asked.home is not None and asked.home not in candidates:
                continue
            made.append((asked, candidates, policy.decide(asked, candidates)))
    return made


def test_a_decision_can_be_carried_out(policy: RoutingPolicy) -> None:
    for asked, candidates, decision in decisions(policy):
        worker, action = decision.worker, decision.action
        assert worker in candidates
        assert isinstance(decision.reason, DispatchReason)
        assert action in worker.profile.actions
        assert (decision.prefill is not None) == (action is PlacementAction.REMOTE_PREFILL)
        assert (decision.source is not None) == (action in SOURCED)
        if decision.prefill is not None:
            assert decision.prefill is not worker
            assert candidates.can_prefill(decision.prefill)
        if decision.source is not None:
            assert decision.source in asked.copies
            assert (decision.source.worker, decision.source.tier) != (worker, Tier.DEVICE)


def test_it_expects_no_more_cached_than_is_known(policy: RoutingPolicy) -> None:
    for asked, _, decision in decisions(policy):
        assert 0 <= decision.cached_tokens <= asked.known_tokens
        assert decision.moved_tokens >= 0
        if decision.action not in SOURCED:
            place = decision.prefill or decision.worker
            assert decision.cached_tokens == asked.cached_on(place)


def test_priced_alternatives_add_up_and_are_sorted(policy: RoutingPolicy) -> None:
    for _, _, decision in decisions(policy):
        options = decision.alternatives
        assert list(options) == sorted(options, key=lambda option: option.total_ms)
        for option in options:
            assert option.total_ms == pytest.approx(sum(option.terms().values()))
            assert min(option.terms().values()) >= 0
        if options:
            assert (options[0].worker, options[0].action) == (decision.worker, decision.action)


def test_the_only_candidate_is_chosen(policy: RoutingPolicy) -> None:
    fleet = fleet_of(PLAIN)
    (only,) = fleet
    for asked in questions(fleet):
        assert policy.decide(asked, fleet.candidates(None)).worker is only


def test_it_reads_and_never_counts(policy: RoutingPolicy) -> None:
    fleet = fleet_of(*[ABLE] * 3)
    before = [(worker.queue_ms, worker.requests, worker.bound_sessions) for worker in fleet]
    for asked in questions(fleet):
        policy.decide(asked, fleet.candidates(None))
    assert before == [(worker.queue_ms, worker.requests, worker.bound_sessions) for worker in fleet]
    fleet.check()


@pytest.mark.parametrize("name", EVERY)
def test_two_of_a_kind_agree(name: str) -> None:
    one, other = (decisions(made(name)) for _ in range(2))
    assert [d.worker.id for _, _, d in one] == [d.worker.id for _, _, d in other]
    assert [(d.action, d.reason) for _, _, d in one] == [(d.action, d.reason) for _, _, d in other]


@pytest.mark.parametrize("profile", [PLAIN, ABLE])
def test_new_sessions_spread_over_an_idle_fleet(policy: RoutingPolicy, profile: Profile) -> None:
    """No worker may get all of them, as two routers' policies let happen."""
    state = RouterState(policy)
    raise_up(state, "w0", "w1", "w2", "w3", profile=profile)
    for number in range(64):
        dispatch = dispatched(state, f"s{number}", float(number))
        state.handle(FirstByte(dispatch.receipt), float(number))
        state.handle(Done(dispatch.receipt), float(number))
    assert {worker.bound_sessions for worker in state.fleet} == {16}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("seed", range(examples(3)))
def test_the_books_stay_whole_under_any_load(name: str, seed: int) -> None:
    """Random turns, forks, failures and hang-ups through the state: audited all along."""
    draw = random.Random(seed)
    settings = Settings(hot_ms=5.0, cool_s=2.0)
    state = RouterState(made(name, settings), settings=settings)
    raise_up(state, "w0", "w1", "w2", "w3", "w4")
    live = []
    for step in range(300):
        now = step * 0.1
        if live and draw.random() < 0.5:
            dispatch = live.pop(draw.randrange(len(live)))
            if draw.random() < 0.8:
                state.handle(FirstByte(dispatch.receipt), now)
            end = draw.choice(["done", "done", "done", "aborted", "failed"])
            if end == "done":
                tokens = dispatch.prompt_tokens
                state.handle(Done(dispatch.receipt, Usage(tokens, 20, 0)), now)
            elif end == "aborted":
                state.handle(Aborted(dispatch.receipt), now)
            else:
                failure = draw.choice([Failure.CLOSED, Failure.REFUSED, Failure.STALE])
                again = state.handle(Failed(dispatch.receipt, failure), now)
                if not isinstance(again, Refuse):
                    live.append(again)
        else:
            number = draw.randrange(12)
            parent = SessionId(f"s{number % 3}") if number > 6 else None
            size = draw.choice([400, 40_000, 400_000]) + step * 100
            live.append(dispatched(state, f"s{number}", now, prompt_bytes=size, parent=parent))
        state.check()
    assert state.account.received > 100
