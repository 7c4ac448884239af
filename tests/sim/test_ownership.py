"""Who owns a session in a simulated fleet: the production directory, told and heard over time."""

from __future__ import annotations

from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.gateway.stamps import Extent
from ownerserve.router.messages import Claimed
from ownerserve.sim.heap import Heap
from ownerserve.sim.ownership import LEASE_S, Ownership
from ownerserve.sim.turns import prefix_name

W0 = RoutingUnit(WorkerId("w0"), 0, Incarnation(1))
W1 = RoutingUnit(WorkerId("w1"), 0, Incarnation(1))
S = SessionId("s0")
EXTENT = Extent(prefix_name(b"unit"), 640)


class Heard:
    """An Ownership, and what the router would hear of it."""

    def __init__(self) -> None:
        self.heap = Heap()
        self.claims: list[tuple[float, Claimed]] = []
        self.ownership = Ownership(
            self.heap, lambda claim, now: self.claims.append((now, claim)), delay_s=0.002
        )
        for unit in (W0, W1):
            self.ownership.lives(unit, 0.0)
        self.heap.run()

    def runs_at(self, unit: RoutingUnit, at_s: float) -> None:
        self.heap.run(until_s=at_s)
        self.heap.now = at_s
        self.ownership.runs_at(S, unit, parent=None, now=at_s)
        self.heap.run()
        self.ownership.state.check()


def test_where_the_first_turn_runs_is_the_owner_after_a_round_trip() -> None:
    heard = Heard()
    heard.runs_at(W0, 1.0)
    assert [(when_s, claim.unit) for when_s, claim in heard.claims] == [(1.002, W0)]
    assert heard.ownership.state.counts().sessions == 1


def test_a_turn_elsewhere_moves_it_under_a_later_epoch() -> None:
    heard = Heard()
    heard.runs_at(W0, 1.0)
    heard.runs_at(W1, 2.0)
    first, second = (claim for _, claim in heard.claims)
    assert second.unit == W1 and second.epoch > first.epoch


def test_what_it_stands_on_is_known_and_forgotten_with_it() -> None:
    heard = Heard()
    heard.runs_at(W0, 1.0)
    heard.ownership.stands_on(S, W0, EXTENT, now=1.5)
    heard.heap.run()
    assert heard.ownership.state.counts().prefixes == 1
    heard.ownership.ends(S, 2.0)
    heard.heap.run()
    heard.ownership.state.check()
    assert heard.ownership.state.counts().sessions == 0


def test_a_lost_directory_says_nothing_and_comes_back_empty_under_a_later_term() -> None:
    heard = Heard()
    heard.runs_at(W0, 1.0)
    before = heard.ownership.state.term
    heard.ownership.lose()
    heard.runs_at(W1, 2.0)
    assert len(heard.claims) == 1  # turns go by the last view
    heard.ownership.restore(3.0)
    assert heard.ownership.state.term > before
    assert heard.ownership.state.counts().sessions == 0
    heard.runs_at(W1, 3.0 + LEASE_S + 2.0)  # leases of before have run out by then
    heard.runs_at(W1, 3.0 + LEASE_S + 5.0)
    assert heard.claims[-1][1].unit == W1
    assert heard.claims[-1][1].epoch.term == heard.ownership.state.term


def test_a_silent_workers_session_can_be_had_by_another() -> None:
    heard = Heard()
    heard.runs_at(W0, 1.0)
    heard.ownership.silent(W0)
    heard.runs_at(W1, 1.0 + 2 * LEASE_S)
    heard.runs_at(W1, 2.0 + 2 * LEASE_S)
    assert heard.claims[-1][1].unit == W1
