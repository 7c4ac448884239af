"""The order in which gateways meet workers: it decides between those that are as good, and no
more."""

from __future__ import annotations

import numpy as np
import pytest

from goal.contenders import PERTURBATIONS
from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.run import Result, simulate
from tests.support.sim.fleet_driver import agents, setup

TRACE = agents(12)
(ORDER,) = (one["worker_order"] for one in PERTURBATIONS if "worker_order" in one)
WHO = ("worker", "prefill_worker", "owner")


def ran(policy: str, order: object, **changes: object) -> Result:
    return simulate(TRACE, setup(policy, worker_order=order, **changes))


@pytest.mark.parametrize(
    "policy",
    ["ownerserve", "ear", "sticky", "round_robin", "lmetric", "least_load", "static_pd_delta"],
)
def test_equal_workers_in_another_order_are_the_same_run_under_other_names(policy: str) -> None:
    """To the digit: each turn runs when it ran, at the worker that now stands where its stood."""
    order = (1, 0, 3, 2) if policy == "static_pd_delta" else ORDER  # whose first half prefills
    before, after = ran(policy, ()), ran(policy, order)
    names = np.array([*order, -1])  # -1: nobody
    one, other = before.rows.table(), after.rows.table()
    assert len(set(one["worker"].tolist())) > 1
    for column in one.dtype.names:
        expected = names[one[column]] if column in WHO else one[column]
        assert (expected == other[column]).all(), column
    assert digest(before.metrics) == digest(after.metrics)


def test_between_workers_that_are_unlike_the_order_decides_who_gets_what() -> None:
    """The first turn of all goes to the first in line, which is another machine now."""
    unlike = (1.0, 1.5, 2.0, 3.0)
    before, after = (ran("least_load", one, step_factors=unlike) for one in ((), ORDER))
    firsts = [int(result.rows.table()["worker"][0]) for result in (before, after)]
    assert digest(before.metrics) != digest(after.metrics)
    assert firsts[0] != firsts[1]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4)])
def test_an_order_of_other_workers_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="worker_order"):
        setup(worker_order=order)
