"""One contract for every policy, and what sets each apart."""

from __future__ import annotations

from collections import Counter

import pytest

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.fleet import Load, Worker
from ownerserve.router.messages import Reason
from ownerserve.router.policies import POLICIES, Policy, Request, RoundRobin, SessionAffinity


def workers(count: int) -> list[Worker]:
    return [Worker(WorkerId(f"w{order}"), order) for order in range(count)]


def request(session: str | None = "s", owner: str | None = None, turns: int = 0) -> Request:
    return Request(
        session=SessionId(session) if session else None,
        owner=WorkerId(owner) if owner else None,
        turns=turns,
        prompt_tokens=100,
    )


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]()


class TestContract:
    def test_the_only_candidate_is_chosen(self, policy: Policy) -> None:
        (only,) = workers(1)
        for asked in (request(), request(None), request(owner="w0"), request(owner="gone")):
            assert policy.choose(asked, [only]).worker is only

    def test_the_choice_is_a_candidate_with_a_reason(self, policy: Policy) -> None:
        fleet = workers(4)
        for gone in range(4):
            candidates = [worker for worker in fleet if worker.order != gone]
            choice = policy.choose(request(owner=f"w{gone}", turns=1), candidates)
            assert choice.worker in candidates
            assert isinstance(choice.reason, Reason)

    def test_it_reads_and_never_counts(self, policy: Policy) -> None:
        fleet = workers(3)
        for _ in range(5):
            policy.choose(request(), fleet)
        assert all(worker.requests == worker.bound_sessions == 0 for worker in fleet)

    def test_two_of_a_kind_agree(self, policy: Policy) -> None:
        twin, fleet = type(policy)(), workers(3)
        asked = [request(), request(None), request(owner="w2"), request(owner="w1", turns=3)] * 3
        mine = [policy.choose(one, fleet).worker.id for one in asked]
        assert mine == [twin.choose(one, fleet).worker.id for one in asked]

    def test_new_sessions_spread_over_an_idle_fleet(self, policy: Policy) -> None:
        """Bound as the state binds them: no worker may get all (the routers' hot pin)."""
        fleet = workers(4)
        for number in range(64):
            policy.choose(request(f"s{number}"), fleet).worker.sessions.add(SessionId(str(number)))
        assert {worker.bound_sessions for worker in fleet} == {16}


def test_round_robin_takes_turns_over_whoever_is_up() -> None:
    policy, fleet = RoundRobin(), workers(3)
    order = [policy.choose(request(owner="w0"), fleet).worker.id for _ in range(4)]
    assert order == ["w0", "w1", "w2", "w0"]
    assert policy.choose(request(), [fleet[0], fleet[2]]).worker.id == "w2"
    assert policy.choose(request(), [fleet[0], fleet[2]]).worker.id == "w0"


def test_affinity_stays_with_its_owner_however_busy() -> None:
    policy, fleet = SessionAffinity(), workers(3)
    fleet[1].pending_prefill_tokens = 10**9
    choice = policy.choose(request(owner="w1", turns=4), fleet)
    assert (choice.worker.id, choice.reason) == ("w1", Reason.OWNER)


def test_affinity_starts_where_least_is_pending_then_where_fewest_are_bound() -> None:
    policy, fleet = SessionAffinity(), workers(3)
    fleet[0].pending_prefill_tokens = 5
    fleet[1].sessions.add(SessionId("other"))
    choice = policy.choose(request(), fleet)
    assert (choice.worker.id, choice.reason) == ("w2", Reason.NEW_SESSION)
    fleet[2].pending_prefill_tokens = 6
    assert policy.choose(request(), fleet).worker.id == "w1"


def test_affinity_says_when_an_owner_was_lost_and_when_there_is_no_session() -> None:
    policy, fleet = SessionAffinity(), workers(2)
    assert policy.choose(request(turns=2), fleet).reason is Reason.OWNER_LOST
    fleet[0].requests = 1
    choice = policy.choose(request(None), fleet)
    assert (choice.worker.id, choice.reason) == ("w1", Reason.NO_SESSION)
    spread = Counter(policy.choose(request(None), fleet).worker.id for _ in range(3))
    assert spread == {"w1": 3}  # only the state's counting makes them spread


def test_load_is_plain_data() -> None:
    assert Load(1, 2) == Load(1, 2)
