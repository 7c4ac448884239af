"""A worker on the heap: arrivals end folds, a fold is the same as its steps, a crash loses all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.cache.layout import Layout
from ownerserve.sim.engine.batch import FOLD_MAX, BatchLimits
from ownerserve.sim.fleet import gauge
from tests.support.sim.engine_driver import (
    HYBRID,
    PLAIN,
    U,
    WorkerDriver,
    make_engine,
    own_ids,
    turn,
)


def test_an_arrival_waits_for_the_step_under_way_and_no_longer() -> None:
    driver = WorkerDriver(make_engine)
    driver.submit(turn(1, own_ids(1), 10, 101), 0.0)
    driver.submit(turn(2, own_ids(2), 20, 1), 0.100)
    driver.heap.run()
    # t1: 20 ms of prefill, then steps of 11 ms; 100 ms lies in the 8th, which ends at 108.
    assert driver.sequences["t2"].begun_s == pytest.approx(0.108)
    assert driver.began_s["t2"] == pytest.approx(0.108 + 0.010 + 0.020 + 0.001)
    # 100 decodes of 11 ms; one of them was 20 tokens of prefill longer.
    assert driver.served_s["t1"] == pytest.approx(0.020 + 100 * 0.011 + 0.020)


def test_one_that_is_too_long_for_the_device_is_turned_away_behind_this_instants_calls() -> None:
    driver = WorkerDriver(lambda: make_engine(blocks=4))
    driver.submit(turn(1, own_ids(1), 40, 1), 1.0)
    driver.submit(turn(2, own_ids(2), 8, 1), 1.0)
    driver.heap.run()
    assert driver.lost_s == {"t1": 1.0} and list(driver.served_s) == ["t2"]


def test_a_crash_loses_what_ran_and_waited_and_the_next_life_is_empty() -> None:
    driver = WorkerDriver(lambda: make_engine(limits=BatchLimits(64, 1)))
    worker = driver.worker
    driver.submit(turn(1, own_ids(1), 12, 1), 0.0)
    driver.submit(turn(2, own_ids(1), 16, 50), 0.1)
    driver.submit(turn(3, own_ids(3), 8, 1), 0.2)
    driver.heap.at(0.3, worker.crash)
    driver.submit(turn(4, own_ids(4), 8, 1), 0.4)  # nobody is there
    driver.heap.at(0.5, lambda now: worker.rise())
    driver.submit(turn(5, own_ids(1), 16, 1), 0.6)
    driver.heap.run()
    assert driver.lost_s == {"t2": 0.3, "t3": 0.3, "t4": 0.4}
    assert list(driver.served_s) == ["t1", "t5"]
    assert driver.sequences["t2"].restored_tokens == 12
    assert driver.sequences["t5"].restored_tokens == 0
    assert worker.incarnation == 2 and len(worker.lives) == 2
    assert gauge.pending_tokens(worker) == 0
    worker.check()


def test_a_stamp_says_what_is_free_what_may_go_and_all() -> None:
    driver = WorkerDriver(make_engine)
    driver.submit(turn(1, own_ids(1), 40, 1), 0.0)
    driver.submit(turn(2, own_ids(2), 40, 30), 1.0)
    driver.heap.run(until_s=1.1)
    status = gauge.status(driver.worker, 1.1)
    assert status.running_sequences == 1 and status.waiting_sequences == 0
    assert status.kv_bytes_total == 100 * 64
    # 40 tokens and the 5 of the steps since: 12 of 100 blocks; t1's 10 could go.
    assert status.kv_bytes_evictable == 10 * 64
    assert status.kv_bytes_free == (100 - 11 - 10) * 64  # a fold's blocks are taken when it ends
    assert status.pending_prefill_tokens == 0


ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt tokens
        st.integers(1, 40),  # answer
        st.integers(0, 2),  # which head it shares
        st.integers(0, 2000),  # ms
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(ARRIVALS, st.integers(20, 60), st.sampled_from([PLAIN, HYBRID]))
def test_a_fold_is_its_steps(
    arrivals: list[tuple[int, int, int, int]], blocks: int, layout: Layout
) -> None:
    """Every instant, every cached token and every preemption; also where the pool is too small."""
    told = []
    for fold in (FOLD_MAX, 1):
        driver = WorkerDriver(
            lambda fold=fold: make_engine(  # type: ignore[misc]
                blocks=blocks, layout=layout, limits=BatchLimits(24, 4), fold=fold, d_ms=0.01
            )
        )
        for number, (prompt, output, head, at_ms) in enumerate(arrivals):
            ids = [*own_ids(900 + head)[: min(prompt // U, 5)], *own_ids(number + 1)]
            # Off the grid of steps: at one instant the order of a step's end would be chance.
            driver.submit(turn(number, ids, prompt, output), (at_ms + 0.0137) / 1000.0)
        driver.heap.run()
        driver.worker.check()
        assert len(driver.served_s) == len(arrivals)
        engine, cache = driver.worker.machine.engine, driver.worker.cache
        told.append(
            {
                "began": {name: round(s, 9) for name, s in driver.began_s.items()},
                "served": {name: round(s, 9) for name, s in driver.served_s.items()},
                "cached": [s.restored_tokens for s in driver.sequences.values()],
                "preempted": [s.preempted for s in driver.sequences.values()],
                "steps": engine.counts.steps,
                "evicted": cache.counters.evicted_tokens,
            }
        )
    assert told[0] == told[1]
