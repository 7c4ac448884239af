"""Who owns a session in a simulated fleet: production's owners and directory over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from ownerserve.directory.messages import FindSession, SessionIs
from ownerserve.directory.owner.state import SessionGrant, SessionTip
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit
from ownerserve.node.ownership.ownership import FLUSH_S
from ownerserve.router.messages import AskRelease, Claimed, ReleaseEnd
from ownerserve.sim.fleet import gauge
from ownerserve.sim.fleet.ownership import LEASE_S, SimOwnership
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.turns import prefix_name
from ownerserve.sim.workload import Capped, WorkloadShape
from tests.support.sim.fleet_driver import agents, ready, setup

DELAY_S = 0.002
ASKED_S = FLUSH_S + DELAY_S
SETTLED_S = 3 * ASKED_S
W0 = RoutingUnit(WorkerId("w0"), 0, Incarnation(1))
W1 = RoutingUnit(WorkerId("w1"), 0, Incarnation(1))
W0_AGAIN = RoutingUnit(WorkerId("w0"), 0, Incarnation(2))
S = SessionId("s0")


class Fleet:
    """Two workers' ownership on a heap; `at` lets time pass and then tells something."""

    def __init__(self) -> None:
        self.heap = Heap()
        self.ownership = SimOwnership(self.heap, delay_s=DELAY_S)
        for unit in (W0, W1):
            self.ownership.lives(unit, 0.0)
        self.until(1.0)

    def until(self, when_s: float) -> None:
        self.heap.run(until_s=when_s)
        self.heap.now = when_s
        self.ownership.check(when_s)

    def at(self, when_s: float, tell: Callable[[float], object]) -> None:
        self.until(when_s)
        tell(when_s)
        self.until(when_s + SETTLED_S)

    def comes(self, unit: RoutingUnit, when_s: float, *, epoch: Epoch | None = None) -> None:
        self.at(when_s, partial(self.came, unit, epoch))

    def came(self, unit: RoutingUnit, epoch: Epoch | None, now: float) -> None:
        self.ownership.came(S, unit, parent=None, epoch=epoch, now=now)

    def leaves(self, unit: RoutingUnit, when_s: float, *, tokens: int = 640) -> None:
        tip = SessionTip(prefix_name(tokens.to_bytes(4, "little")), tokens)
        self.at(when_s, lambda now: self.ownership.left(S, unit, tip, now))

    def standing(self, unit: RoutingUnit) -> SessionGrant | None:
        return self.ownership.standing(S, unit, self.heap.now)

    def found(self) -> Claimed | None:
        """The directory's word, as a gateway would hear it now."""
        heard: list[Claimed | None] = []
        now = self.heap.now
        self.ownership.find(S, lambda claimed, _now: heard.append(claimed), now)
        self.until(now + DELAY_S)
        return heard[0]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_the_first_worker_owns_the_session_after_a_flush_and_a_round_trip(fleet: Fleet) -> None:
    fleet.until(1.0)
    fleet.ownership.came(S, W0, parent=None, epoch=None, now=1.0)
    fleet.until(1.0 + ASKED_S - 0.001)
    assert fleet.standing(W0) is None, "its turn is served meanwhile, and its answer says nothing"
    fleet.until(1.0 + ASKED_S)
    grant, claimed = fleet.standing(W0), fleet.found()
    assert grant is not None and claimed is not None
    assert (claimed.unit, claimed.epoch) == (W0, grant.epoch)


def test_a_turn_elsewhere_is_a_guests_until_the_owner_hands_over(fleet: Fleet) -> None:
    fleet.comes(W0, 1.0)
    fleet.comes(W1, 2.0)
    owned = fleet.standing(W0)
    assert owned is not None and fleet.standing(W1) is None
    said = fleet.ownership.owner_of(S, W1, fleet.heap.now)
    assert said == Claimed(S, W0, owned.epoch), "a guest says whose"
    asked = AskRelease(S, W0, owned.epoch, W1)
    assert fleet.ownership.release(asked, 3.0) is ReleaseEnd.RELEASED
    assert fleet.standing(W0) is None, "it has stopped before it asks"
    assert fleet.ownership.release(asked, 3.0) is ReleaseEnd.NOT_OWNER, "nor is it asked twice"
    fleet.comes(W1, 4.0)
    moved = fleet.standing(W1)
    assert moved is not None and moved.epoch > owned.epoch


def test_a_session_is_not_handed_over_under_another_epoch(fleet: Fleet) -> None:
    fleet.comes(W0, 1.0)
    owned = fleet.standing(W0)
    assert owned is not None
    fleet.ownership.release(AskRelease(S, W0, owned.epoch, W1), 2.0)
    fleet.comes(W1, 3.0)
    late = AskRelease(S, W1, owned.epoch, W0)
    assert fleet.ownership.release(late, 4.0) is ReleaseEnd.NOT_OWNER
    assert fleet.standing(W1) is not None


def test_a_session_has_as_many_turns_as_its_owners_finished(fleet: Fleet) -> None:
    fleet.comes(W0, 1.0)
    fleet.leaves(W0, 2.0)
    fleet.comes(W1, 3.0)
    fleet.leaves(W1, 4.0)  # a guest's
    fleet.leaves(W0, 5.0, tokens=1280)
    owned = fleet.standing(W0)
    assert owned is not None and owned.version == 2 and owned.tokens == 1280
    assert fleet.ownership.state.counts().prefixes == 2
    fleet.at(6.0, lambda now: fleet.ownership.over(S, W0, now))
    assert fleet.found() is None and fleet.ownership.state.counts().sessions == 0


def test_an_idle_worker_keeps_its_sessions(fleet: Fleet) -> None:
    fleet.comes(W0, 1.0)
    fleet.until(5 * LEASE_S)
    assert fleet.standing(W0) is not None and fleet.found() is not None


def test_a_directory_that_forgot_learns_from_the_owner_under_a_later_term(fleet: Fleet) -> None:
    fleet.comes(W0, 1.0)
    before, owned = fleet.ownership.state.term, fleet.standing(W0)
    fleet.ownership.lose()
    fleet.comes(W1, 2.0)
    assert fleet.found() is None, "nobody answers"
    fleet.ownership.restore(10.0)
    assert fleet.ownership.state.term > before
    fleet.until(10.0 + 0.6 * LEASE_S)
    assert fleet.standing(W0) == owned and fleet.standing(W1) is None
    claimed = fleet.found()
    assert claimed is not None and claimed.unit == W0


def test_a_directory_that_was_away_beyond_a_lease_binds_anew_when_leases_are_over(
    fleet: Fleet,
) -> None:
    fleet.comes(W0, 1.0)
    fleet.ownership.lose()
    fleet.until(2 * LEASE_S)
    assert fleet.standing(W0) is None, "by its own clock"
    fleet.ownership.restore(2 * LEASE_S)
    fleet.comes(W1, 2 * LEASE_S + 5.0)
    assert fleet.standing(W1) is None, "leases of before may run still, for all it knows"
    fleet.until(3 * LEASE_S + 10.0)
    grant = fleet.standing(W1)
    assert grant is not None and grant.epoch.term == fleet.ownership.state.term


def test_a_dead_workers_session_is_free_with_its_next_life_or_when_its_lease_is_over(
    fleet: Fleet,
) -> None:
    fleet.comes(W0, 1.0)
    fleet.ownership.silent(W0)
    fleet.comes(W1, 2.0)
    assert fleet.standing(W1) is None and fleet.found() is not None
    fleet.ownership.lives(W0_AGAIN, 3.0)
    fleet.comes(W1, 4.0)
    assert fleet.standing(W1) is not None
    fleet.ownership.silent(W1)
    fleet.until(4.0 + 2 * LEASE_S)
    assert fleet.found() is None, "its owner is gone"
    fleet.comes(W0_AGAIN, 5.0 + 2 * LEASE_S)
    assert fleet.standing(W0_AGAIN) is not None


# -- in a fleet


def test_who_hears_of_a_later_epoch_with_a_turn_owns_no_more(fleet: Fleet) -> None:
    fleet.comes(W0, 1.0)
    owned = fleet.standing(W0)
    assert owned is not None
    fleet.comes(W0, 2.0, epoch=owned.epoch)
    assert fleet.standing(W0) == owned
    fleet.at(3.0, partial(fleet.came, W0, Epoch(owned.epoch.term, owned.epoch.counter + 1)))
    again = fleet.standing(W0)
    assert again is None or again.epoch > owned.epoch


def test_a_fork_stands_on_what_its_parent_left(fleet: Fleet) -> None:
    fleet.comes(W0, 1.0)
    fleet.leaves(W0, 2.0)
    fork = SessionId("s0.1")
    fleet.at(3.0, lambda now: fleet.ownership.came(fork, W1, parent=S, epoch=None, now=now))
    state, now = fleet.ownership.state, fleet.heap.now
    parent, found = (state.handle(FindSession(one), now) for one in (S, fork))
    assert isinstance(parent, SessionIs) and isinstance(found, SessionIs)
    assert found.prefix_hash == parent.prefix_hash and found.tokens == parent.tokens > 0


def test_a_fleet_says_whose_fork_a_session_is_and_what_epoch_its_gateway_heard() -> None:
    built = ready(
        agents(4, 5), setup("round_robin", workers=2, shape=WorkloadShape(mode=Capped(4)))
    )
    said = Counter[str]()
    came = built.fleet.ownership.came

    def noted(
        session: SessionId,
        unit: RoutingUnit,
        *,
        parent: SessionId | None,
        epoch: Epoch | None,
        now: float,
    ) -> None:
        said.update({"parent": parent is not None, "epoch": epoch is not None})
        came(session, unit, parent=parent, epoch=epoch, now=now)

    built.fleet.ownership.came = noted  # type: ignore[method-assign]
    built.fleet.begin()
    while built.fleet.is_busy:
        built.heap.run_some(100)
    assert said["parent"] and said["epoch"]


def test_what_moves_is_let_go_by_its_former_owner_after_the_turn_elsewhere() -> None:
    """The worker that a session left keeps no soft reference, and the directory has the other."""
    built = ready(agents(), setup("ear", hot_ms=0.0, cool_s=0.0))
    fleet, heap = built.fleet, built.heap
    moved: list[AskRelease] = []
    release = fleet.ownership.release

    def noted(asked: AskRelease, now: float) -> ReleaseEnd:
        end = release(asked, now)
        moved.extend([asked] if end is ReleaseEnd.RELEASED else [])
        return end

    fleet.ownership.release = noted  # type: ignore[method-assign]
    fleet.begin()
    while fleet.is_busy and not moved:
        heap.run_some(1)
    (asked,) = moved
    (source,) = (worker for worker in fleet.workers if worker.unit == asked.source)
    left = source.cache.sessions.get(asked.session)
    assert left is None or not left.is_referenced
    assert left is None or left.stop is None or left.stop.is_let_go
    heard: list[Claimed | None] = []
    fleet.ownership.find(asked.session, lambda found, _now: heard.append(found), heap.now + 1.0)
    heap.run(until_s=heap.now + 2.0)
    fleet.check()
    assert heard[0] is not None and heard[0].unit == asked.target
    assert heard[0].epoch > asked.epoch


def test_a_worker_where_a_turn_of_the_session_is_keeps_it() -> None:
    built = ready(agents(1, 2, most_output=4000), setup("sticky", workers=2))
    fleet, heap = built.fleet, built.heap
    fleet.begin()
    while fleet.is_busy and not any(gauge.has_turn_of(worker, S) for worker in fleet.workers):
        heap.run_some(1)
    (source,) = (worker for worker in fleet.workers if gauge.has_turn_of(worker, S))
    (other,) = (worker for worker in fleet.workers if worker is not source)
    heap.run(until_s=heap.now + SETTLED_S)
    assert gauge.has_turn_of(source, S)
    owned = fleet.ownership.standing(S, source.unit, heap.now)
    assert owned is not None
    fleet.gateways[0].claims.ask(AskRelease(S, source.unit, owned.epoch, other.unit), heap.now)
    heap.run(until_s=heap.now + SETTLED_S)
    assert fleet.ownership.standing(S, source.unit, heap.now) == owned
    assert source.cache.sessions.get(S) is not None


def test_a_fleet_tells_the_directory_each_turn_and_the_end_of_each_session() -> None:
    """Sessions that never move: their records count the turns that were served so far."""
    built = ready(agents(4, 5), setup("sticky", workers=2, shape=WorkloadShape(mode=Capped(4))))
    fleet, heap = built.fleet, built.heap
    fleet.begin()
    while fleet.is_busy and len(fleet.rows) < 12:
        heap.run_some(1)
    heard: dict[int, Claimed] = {}

    def hear(number: int, claimed: Claimed | None, _now: float) -> None:
        if claimed is not None:
            heard[number] = claimed

    for number in (0, 2):  # the others have sub-agents
        fleet.ownership.find(SessionId(f"s{number}"), partial(hear, number), heap.now + ASKED_S)
    heap.run(until_s=heap.now + 2 * ASKED_S)
    served = Counter(int(number) for number in fleet.rows.table()["session"])
    assert heard and all(claimed.version == served[number] for number, claimed in heard.items())
    while fleet.is_busy:
        heap.run_some(100)
    heap.run(until_s=heap.now + SETTLED_S)
    fleet.check()
    assert not fleet.ownership.state.counts().sessions
