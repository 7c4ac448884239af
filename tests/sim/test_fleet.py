"""A fleet from release to row, under every policy: nothing is lost, nothing is owned twice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import ExecutionMode
from ownerserve.router.policies import ROUTING_POLICIES
from ownerserve.sim.config.setup import Links, Tiers
from ownerserve.sim.metrics.rows import MODES, SERVED
from ownerserve.sim.workload import Capped, WorkloadShape
from tests.support.sim.fleet_driver import MIB, agents, ready, run, setup

TRACE = agents()


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_every_turn_ends_in_one_row_whatever_the_policy(policy: str) -> None:
    fleet = run(ready(TRACE, setup(policy)), check_every=97)
    table = fleet.rows.table()
    assert sorted(table["number"]) == list(range(TRACE.request_count))
    assert np.isin(table["mode"], SERVED).all()
    times = [table[f"{name}_s"] for name in ("arrived", "routed", "started", "first_token", "done")]
    for before, after in pairwise(times):
        assert (before <= after + 1e-9).all()
    assert (table["cached_tokens"] + table["computed_tokens"] >= table["prompt_tokens"]).all()
    assert (table["cached_tokens"] < table["prompt_tokens"]).all()
    assert (table["output_tokens"] == table["wanted_tokens"]).all()
    assert (table["duplicate_bytes"] <= table["placed_bytes"]).all()
    assert len(fleet.counters.completed) == len(TRACE.sessions)


def test_one_idle_worker_by_hand() -> None:
    """TTFT of the first turn is one step, after the directory was asked whose the session is; of
    the second, a step over what is new."""
    trace = agents(1, 2)
    wanted = setup("least_load", workers=1, kv_bytes=0)
    built = ready(trace, wanted)
    fleet = run(built)
    table, pace = fleet.rows.table(), built.pace
    first, second = trace.sessions[0].requests
    ttft_ms = (table["first_token_s"] - table["arrived_s"]) * 1e3
    n = first.input_tokens
    assert ttft_ms[0] == pytest.approx(wanted.directory_ms + pace.step_ms(n, n * n / 2, 0, 0))
    decode_ms = sum(pace.step_ms(0, 0.0, n + i, 1) for i in range(first.output_tokens - 1))
    assert (table["done_s"][0] - table["first_token_s"][0]) * 1e3 == pytest.approx(decode_ms)
    cached = n // 64 * 64  # the full units of the first prompt; its answer is told apart by ids
    assert table["cached_tokens"][1] >= cached
    cached, new = table["cached_tokens"][1], second.input_tokens - table["cached_tokens"][1]
    assert ttft_ms[1] == pytest.approx(pace.step_ms(new, new * (cached + new / 2), 0, 0))
    assert table["arrived_s"][1] == pytest.approx(table["done_s"][0] + (second.think_s or 0.0))


def test_a_split_turn_pays_the_network_for_what_the_decoder_lacks() -> None:
    fleet = run(ready(TRACE, setup("static_pd_delta")))
    table = fleet.rows.table()
    apart = table[table["mode"] == MODES.index(ExecutionMode.REMOTE_PREFILL)]
    assert len(apart) == len(table)
    assert (apart["prefill_worker"] < 2).all() and (apart["worker"] >= 2).all()
    assert apart["network_bytes"].sum() > 0
    unit_bytes = fleet.workers[0].unit_bytes
    assert (apart["network_bytes"] <= apart["prompt_tokens"] / 64 * unit_bytes + 1).all()


def test_a_device_that_is_too_small_preempts_and_serves_all() -> None:
    crowded = setup(
        "least_load", workers=1, kv_bytes=900 * MIB, shape=WorkloadShape(mode=Capped(8))
    )
    trace = agents(8, 3, most_output=400)
    fleet = run(ready(trace, crowded))
    fleet.tally()
    assert fleet.counters.preemptions > 0
    assert np.isin(fleet.rows.table()["mode"], SERVED).all()


def test_a_prompt_longer_than_the_device_fails_once_and_its_session_goes_on() -> None:
    tiny = setup("ear", workers=2, kv_bytes=500 * MIB)
    fleet = run(ready(agents(2, 6), tiny))
    table = fleet.rows.table()
    failed = table[table["mode"] == MODES.index(ExecutionMode.FAILED)]
    assert 0 < len(failed) < len(table) and (failed["attempts"] == 1).all()
    assert (failed["prompt_tokens"] > 500 * MIB / fleet.workers[0].unit_bytes * 64 - 64).all()


def test_with_tiers_a_session_comes_back_from_below() -> None:
    small = setup("sticky", workers=1, kv_bytes=1000 * MIB, tiers=Tiers(host_bytes=64 << 30))
    fleet = run(ready(agents(6, 6), small), check_every=211)
    table = fleet.rows.table()
    assert (table["restored_tokens"] > 0).any()
    fetched = table[table["mode"] == MODES.index(ExecutionMode.FETCH)]
    assert len(fetched) and (fetched["restore_load_ms"] > 0).all()


def test_a_move_takes_as_long_as_its_transfer_and_not_as_the_turn_behind_it() -> None:
    [moved] = run(ready(TRACE, setup("ear", hot_ms=0.0, cool_s=0.0))).counters.migrations
    assert moved.completed and moved.bytes > 0
    links = setup().links
    # A look, a Lend and a More go there and back, then the bytes come.
    least_s = moved.bytes / links.nic_gb_s / 1e9 + 7 * links.nic_ms / 1e3
    a_step_s = 0.02  # of the source, which looks and lends between two of them
    assert least_s <= moved.landed_s - moved.decided_s < least_s + a_step_s
    assert moved.done_s > moved.landed_s


def test_a_move_that_comes_too_late_is_counted_as_given_up() -> None:
    slow = setup("ear", hot_ms=0.0, cool_s=0.0, links=Links(nic_gb_s=0.02), transfer_s=1.0)
    fleet = run(ready(TRACE, slow))
    assert [move.completed for move in fleet.counters.migrations] == [0]
    assert np.isin(fleet.rows.table()["mode"], SERVED).all()


def test_a_policy_that_nobody_can_carry_out_is_refused_before_anything_happens() -> None:
    with pytest.raises(InvalidInput, match="static_pd needs remote_prefill, which none of 1"):
        ready(TRACE, setup("static_pd", workers=1, prefill_workers=0))
