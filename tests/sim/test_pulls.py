"""A policy that moves nothing, over simulated engines that pull: the bytes cross and are not
computed."""

from __future__ import annotations

from typing import Any

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import ExecutionMode
from ownerserve.sim.config.setup import Links
from ownerserve.sim.fleet.fleet import SimFleet
from ownerserve.sim.metrics.rows import MODES
from ownerserve.trace.model import Trace, TraceRequest, TraceSession
from tests.support.sim.fleet_driver import U, agents, ready, run, setup

UNITS, MORE = 150, 10
FETCH = MODES.index(ExecutionMode.FETCH)


def one_session() -> Trace:
    """Two turns of one session, the second one 640 tokens longer; `round_robin` sends it on."""
    head = (10_000, UNITS)
    first = TraceRequest(0.0, UNITS * U, 8, runs=(head,))
    second = TraceRequest(
        1.0, (UNITS + MORE) * U, 8, runs=(head, (20_000, MORE)), after=(0,), think_s=5.0
    )
    session = TraceSession("s0", (first, second))
    return Trace("one", "hand", U, "trace", "recorded", "unknown", (session,))


def ran(trace: Trace, policy: str = "round_robin", **changes: Any) -> SimFleet:
    return run(ready(trace, setup(policy, workers=2, **changes)), check_every=97)


def test_what_a_peer_holds_crosses_and_is_not_computed() -> None:
    alone = ran(one_session(), kv_bytes=0).rows.table()
    fleet = ran(one_session(), kv_bytes=0, pulls="cheaper")
    pulled = fleet.rows.table()
    assert list(alone["worker"]) == list(pulled["worker"]) == [0, 1]
    assert alone["cached_tokens"][1] == 0 and alone["network_bytes"].sum() == 0
    assert pulled["network_bytes"][0] == 0
    assert pulled["network_bytes"][1] == UNITS * fleet.workers[1].unit_bytes
    assert pulled["mode"][1] == FETCH
    assert pulled["cached_tokens"][1] == UNITS * U
    assert pulled["computed_tokens"][1] == MORE * U
    assert alone["computed_tokens"][1] == (UNITS + MORE) * U
    first_token_s = [table["first_token_s"][1] - table["arrived_s"][1] for table in (pulled, alone)]
    assert first_token_s[0] < first_token_s[1]
    assert not fleet.counters.migrations  # the peer keeps what it had


def test_over_a_slow_network_it_is_computed() -> None:
    slow = Links(nic_gb_s=0.01)
    table = ran(one_session(), kv_bytes=0, pulls="cheaper", links=slow).rows.table()
    assert table["network_bytes"].sum() == 0
    assert table["computed_tokens"][1] == (UNITS + MORE) * U


@pytest.mark.parametrize("policy", ["dynamo", "kv_aware", "llm_d_precise", "round_robin"])
def test_every_turn_is_served_while_devices_are_short(policy: str) -> None:
    trace = agents()
    table = ran(trace, policy, pulls="cheaper").rows.table()
    assert sorted(table["number"]) == list(range(trace.request_count))
    assert (table["cached_tokens"] + table["computed_tokens"] >= table["prompt_tokens"]).all()
    assert (table["output_tokens"] == table["wanted_tokens"]).all()


def test_a_policy_that_brings_by_its_own_prices_is_refused() -> None:
    with pytest.raises(InvalidInput, match="ear brings state by its own prices"):
        setup("ear", pulls="cheaper")
