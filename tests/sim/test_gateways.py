"""Several gateways before one fleet: each knows its own turns, and of the others' what workers
say."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.router.admission import SeatSettings
from ownerserve.sim.config.faults import read_faults
from ownerserve.sim.metrics.rows import SERVED
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.run import simulate
from ownerserve.sim.workload import Capped, Closed, WorkloadShape
from ownerserve.trace.model import Trace
from tests.support.sim.fleet_driver import agents, ready, run, setup

WORKERS = 4
AT_ONCE = WorkloadShape(mode=Capped(WORKERS))


def apart(seconds: float) -> Trace:
    """Sessions of one turn of 400 tokens and more of answer, that begin so far apart."""
    trace = agents(WORKERS, 1, most_output=2)
    sessions = tuple(
        msgspec.structs.replace(
            one,
            start_s=seconds * number,
            agents=one.agents[:1],
            requests=(msgspec.structs.replace(one.requests[0], output_tokens=4000),),
        )
        for number, one in enumerate(trace.sessions)
    )
    return msgspec.structs.replace(trace, sessions=sessions)


def went(trace: Trace, gateways: int, shape: WorkloadShape, probe_s: float = 1.0) -> list[int]:
    """Where the sessions' first turns went, in order of their sessions."""
    wanted = setup("least_load", gateways=gateways, probe_s=probe_s, shape=shape)
    table = simulate(trace, wanted).rows.table()
    firsts = table[table["position"] == 0]
    workers: list[int] = firsts[np.argsort(firsts["session"])]["worker"].tolist()
    return workers


def test_gateways_that_see_nothing_of_each_other_all_take_the_same_worker() -> None:
    """Four sessions at once: one gateway spreads them, each of four takes the first that is
    idle."""
    assert sorted(went(apart(0.0), 1, AT_ONCE)) == [0, 1, 2, 3]
    assert went(apart(0.0), 4, AT_ONCE) == [0, 0, 0, 0]


def test_what_workers_say_is_heard_with_the_next_probe_and_no_sooner() -> None:
    """Three seconds apart, with answers of 40 s: a probe each second tells of the others' turns."""
    shape = WorkloadShape(mode=Closed())
    assert sorted(went(apart(3.0), 4, shape)) == [0, 1, 2, 3]
    assert went(apart(3.0), 4, shape, probe_s=60.0) == [0, 0, 0, 0]


def test_one_gateway_alone_asks_nobody() -> None:
    trace = agents()
    runs = [simulate(trace, setup(gateways=1, probe_s=every_s)) for every_s in (0.1, 50.0)]
    assert digest(runs[0].metrics) == digest(runs[1].metrics)


@pytest.mark.parametrize("policy", ["ownerserve", "ear", "round_robin", "static_pd_delta"])
def test_all_books_are_whole_whoever_routes(policy: str) -> None:
    """Deaths, too, are heard by each, and every turn ends once."""
    faults = read_faults("death:w1@4+6", workers=WORKERS, disks=0, seed=0)
    trace = agents(12)
    built = ready(trace, setup(policy, gateways=3, seats=SeatSettings(), faults=faults))
    fleet = run(built, check_every=50)
    table = fleet.rows.table()
    assert len(table) == trace.request_count
    assert np.isin(table["mode"], SERVED).mean() > 0.9
    assert not any(gateway.router.live for gateway in fleet.gateways)


@pytest.mark.parametrize(("field", "value"), [("gateways", 0), ("probe_s", 0.0)])
def test_gateways_that_can_not_be_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=field):
        setup(**{field: value})
