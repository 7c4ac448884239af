"""Simulated gateways grant moves between turns and replicas of hot prefixes, by production's own
classes. Where none is granted, nothing differs."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from ownerserve.gateway import moves
from ownerserve.router.gap_moves import GapMoves
from ownerserve.router.hot_prefixes import HotPrefixes
from ownerserve.router.messages import Dispatch
from ownerserve.sim.config.faults import read_faults
from ownerserve.sim.config.setup import Links, SimSetup
from ownerserve.sim.fleet import gap_moves
from ownerserve.sim.fleet.fleet import SimFleet
from ownerserve.sim.metrics.rows import SERVED
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.run import simulate
from ownerserve.sim.workload import Capped, WorkloadShape
from ownerserve.trace.model import Agent, Trace, TraceRequest, TraceSession
from tests.support.sim.fleet_driver import U, agents, ready, run, setup

HEAD_UNITS, FORK_UNITS, FORKS = 1000, 40, 20


def growing(sessions: int = 12, turns: int = 5, *, seed: int = 2) -> Trace:
    """Sessions of 20,000 to 120,000 tokens that grow by up to 30,000 a turn."""
    random = Random(seed)
    fresh = iter(range(10_000, 10_000_000, 3000))
    made = []
    for number in range(sessions):
        tokens = random.choice((20_000, 60_000, 120_000))
        runs = [(next(fresh), tokens // U)]
        requests = []
        for position in range(turns):
            if position:
                tokens += random.randrange(2_000, 30_000)
                have = sum(count for _, count in runs)
                runs.append((next(fresh), tokens // U - have))
            request = TraceRequest(
                float(position),
                tokens,
                random.randrange(1, 200),
                runs=tuple(runs),
                after=(position - 1,) if position else (),
                think_s=random.choice((1.0, 5.0, 20.0)) if position else None,
            )
            requests.append(request)
        made.append(TraceSession(f"s{number}", tuple(requests)))
    return Trace("growing", "hand", U, "trace", "recorded", "unknown", tuple(made))


def forking() -> Trace:
    """One agent with a long head, and sub-agents that share it, some seconds apart."""
    random = Random(1)
    head = (10_000, HEAD_UNITS)
    requests = [TraceRequest(0.0, HEAD_UNITS * U, 8, runs=(head,))]
    named = [Agent("main")]
    for number in range(FORKS):
        named.append(Agent(f"sub{number}"))
        request = TraceRequest(
            1.0 + number,
            (HEAD_UNITS + FORK_UNITS) * U,
            random.randrange(20, 60),
            runs=(head, (100_000 * (number + 1), FORK_UNITS)),
            agent=number + 1,
            after=(0,),
            think_s=3.0 + number * random.uniform(0.2, 0.6),
        )
        requests.append(request)
    session = TraceSession("s0", tuple(requests), agents=tuple(named))
    return Trace("forking", "hand", U, "trace", "recorded", "unknown", (session,))


def hot(nic_gb_s: float, **changes: object) -> SimSetup:
    """Three workers behind links over which state is slow to come for who waits."""
    shape = WorkloadShape(mode=Capped(12))
    links = Links(nic_gb_s=nic_gb_s)
    return setup("ownerserve", workers=3, kv_bytes=0, links=links, shape=shape, **changes)


def crossed_bytes(fleet: SimFleet) -> int:
    return sum(worker.host.nic.out.moved_bytes for worker in fleet.workers)


def all_moved_bytes(fleet: SimFleet) -> int:
    fleet.tally()
    return int(fleet.rows.table()["network_bytes"].sum()) + fleet.counters.in_gaps.moved_bytes


def p95_ms(metrics: dict[str, object]) -> float:
    latency = metrics["step_latency_ms"]
    assert isinstance(latency, dict)
    return float(latency["p95"])


def test_idle_sessions_leave_a_busy_worker_and_go_on_where_they_are() -> None:
    built = ready(growing(), hot(2.0))
    fleet = run(built, check_every=101)
    table = fleet.rows.table()
    assert np.isin(table["mode"], SERVED).all()
    taken = fleet.counters.in_gaps.moves.pop("taken")
    assert taken and not fleet.counters.in_gaps.moves
    assert all_moved_bytes(fleet) == crossed_bytes(fleet) > 0
    ran_at = [set(table["worker"][table["session"] == number]) for number in range(12)]
    assert sum(len(workers) > 1 for workers in ran_at) >= taken
    assert not len(fleet.takes)


def test_the_gateway_knows_when_a_session_moved() -> None:
    """T_cool runs from then, of a move between turns too."""
    built = ready(growing(), hot(2.0))
    fleet, heap = built.fleet, built.heap
    (gateway,) = fleet.gateways
    fleet.begin()
    while not fleet.counters.in_gaps.moves:
        heap.run_some(1)
    sessions = gateway.router.sessions.items()
    [(name, moved)] = [(name, one) for name, one in sessions if one.moved_at_s == heap.now]
    assert moved.owner is not None
    [there] = [worker for worker in fleet.workers if worker.name == moved.owner.id]
    assert there.cache.sessions.get(name) is not None
    heap.run(until_s=heap.now + 0.2)  # its node asks the directory with its next frame
    assert fleet.ownership.standing(name, there.unit, heap.now) is not None


def test_a_hot_prefix_is_copied_and_forks_run_beside_it() -> None:
    trace = forking()
    fleet = run(ready(trace, hot(4.0)), check_every=101)
    assert fleet.counters.in_gaps.replicas == {"made": 1}
    assert all_moved_bytes(fleet) == crossed_bytes(fleet) > 0
    assert len(set(fleet.rows.table()["worker"])) == 2
    with_it, without = (
        simulate(trace, hot(4.0, gap_moves=how)).metrics for how in ("granted", "never")
    )
    assert p95_ms(with_it) < 0.7 * p95_ms(without)
    assert with_it["in_gaps"] == {
        "moves": {},
        "replicas": {"made": 1},
        "moved_bytes": HEAD_UNITS * fleet.workers[0].unit_bytes,
    }


@pytest.mark.parametrize("trace", [growing(), forking()], ids=["moves", "replicas"])
def test_with_the_wire_cut_nothing_is_granted_and_nothing_differs(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends: list[Dispatch] = []
    for kind in (GapMoves, HotPrefixes):
        monkeypatch.setattr(kind, "sent", lambda self, sent, now: sends.append(sent))
    cut = simulate(trace, hot(4.0)).metrics
    assert [one.decision.wanted for one in sends if one.decision.wanted is not None]
    assert "in_gaps" not in cut
    assert digest(cut) == digest(simulate(trace, hot(4.0, gap_moves="never")).metrics)


@pytest.mark.parametrize("policy", ["least_load", "sticky", "lmetric", "ear", "ownerserve"])
def test_a_run_in_which_none_is_granted_is_the_same_to_the_byte(policy: str) -> None:
    trace = agents(10, 6, seed=5, most_output=200)
    granted, never = (
        simulate(trace, setup(policy, gap_moves=how)).metrics for how in ("granted", "never")
    )
    assert "in_gaps" not in granted
    assert digest(granted) == digest(never)


def test_what_is_granted_is_the_same_twice() -> None:
    first, second = (digest(simulate(growing(), hot(2.0)).metrics) for _ in range(2))
    assert first == second


def test_several_gateways_each_move_their_own_sessions() -> None:
    fleet = run(ready(growing(), hot(2.0, gateways=2)), check_every=101)
    assert np.isin(fleet.rows.table()["mode"], SERVED).all()
    assert all_moved_bytes(fleet) == crossed_bytes(fleet)
    assert not len(fleet.takes)


@pytest.mark.parametrize("faults", ["death:w0@8+5", "death:w1@12+5", "directory@6+20"])
def test_whatever_breaks_all_turns_end_and_nobody_owns_twice(faults: str) -> None:
    broken = read_faults(faults, workers=3, disks=0, seed=7)
    fleet = run(ready(growing(), hot(2.0, faults=broken)), check_every=101)
    assert len(fleet.rows) == growing().request_count
    assert all_moved_bytes(fleet) == crossed_bytes(fleet)


def test_a_gateway_looks_as_often_as_in_production() -> None:
    assert gap_moves.LOOK_S == moves.LOOK_S
