"""What workers share and how unlike they are: incast and the switch against closed forms, paces by
worker."""

from __future__ import annotations

import numpy as np
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.plan.cost.prices import Medium
from ownerserve.sim.config.setup import Links
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.run import Result, simulate
from ownerserve.sim.timeline.media import Pipe, duplex, through
from tests.support.sim.fleet_driver import agents, setup

TRACE = agents()
BYTES, A_MS = 12_000, 1_000.0
NIC = Medium(0.0, A_MS)
ONE_S = BYTES / A_MS / 1e3
SENDERS = 5


def test_an_incast_fills_the_receivers_nic_and_no_more() -> None:
    """N at once to one: the last is there when all bytes have gone over one NIC, as under fair
    sharing; in order of asking, so that the mean is (N + 1) / 2N of what fair sharing gives."""
    target = duplex("target", NIC)
    ends = [through((duplex(f"{n}", NIC).out, target.back), BYTES, 0.0) for n in range(SENDERS)]
    assert ends == pytest.approx([(n + 1) * ONE_S for n in range(SENDERS)])


@pytest.mark.parametrize("times", [0.5, 2.0, 10.0])
def test_pairs_that_share_a_switch_have_it_together(times: float) -> None:
    """N pairs at once: bounded by the switch where it is less than N NICs, else by each NIC."""
    switch = Pipe("switch", Medium(0.0, times * A_MS))
    ends = [
        through((duplex("a", NIC).out, switch, duplex("b", NIC).back), BYTES, 0.0)
        for _ in range(SENDERS)
    ]
    assert max(ends) == pytest.approx(max(ONE_S, SENDERS * ONE_S / times))


def network_s(result: Result) -> float:
    table = result.rows.table()
    moved = table[table["network_bytes"] > 0]
    assert len(moved)
    return float(np.mean(moved["first_token_s"] - moved["arrived_s"]))


def test_a_narrow_switch_slows_what_moves_and_a_wide_one_nothing() -> None:
    def ran(gb_s: float) -> Result:
        return simulate(TRACE, setup("static_pd_delta", links=Links(switch_gb_s=gb_s)))

    free, wide, narrow = ran(0.0), ran(1e9), ran(0.5)
    assert digest(wide.metrics) == digest(free.metrics)
    assert network_s(narrow) > network_s(free)


def step_s(result: Result, worker: int) -> float:
    """Mean time of an answer's token at the worker."""
    table = result.rows.table()
    here = table[(table["worker"] == worker) & (table["output_tokens"] > 1)]
    took = (here["done_s"] - here["first_token_s"]) / (here["output_tokens"] - 1)
    return float(np.mean(took))


def test_a_straggler_is_slow_alone() -> None:
    even = simulate(TRACE, setup("round_robin"))
    uneven = simulate(TRACE, setup("round_robin", step_factors=(1.0, 4.0)))
    assert step_s(uneven, 1) > 3.0 * step_s(even, 1)
    assert step_s(uneven, 0) < 1.5 * step_s(even, 0)
    same = simulate(TRACE, setup("round_robin", step_factors=(1.0, 1.0)))
    assert digest(same.metrics) == digest(even.metrics)


@pytest.mark.parametrize("factors", [(), (0.0,), (1.0, float("inf"))])
def test_factors_that_are_none_are_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInput, match="step_factors"):
        setup(step_factors=factors)


def test_a_switch_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="switch_gb_s"):
        setup(links=Links(switch_gb_s=-1.0))
