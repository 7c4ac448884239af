"""The queue before a simulated fleet is the gateway's: turns beyond the limit wait, or are told
no."""

from __future__ import annotations

import pytest

from ownerserve.router.admission import SeatSettings
from ownerserve.router.entry.queue import QueueSettings
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.run import Result, simulate
from tests.support.sim.fleet_driver import agents, setup

TRACE = agents(12)


def played(queue: QueueSettings, seats: SeatSettings | None = None) -> Result:
    return simulate(TRACE, setup(workers=2, queue=queue, seats=seats))


def most_at_once(result: Result) -> int:
    """How many turns were past the queue and had not ended, at most."""
    table = result.rows.table()
    changes = sorted([(at, 1) for at in table["routed_s"]] + [(at, -1) for at in table["done_s"]])
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def test_no_more_run_than_may_and_all_are_served() -> None:
    free = played(QueueSettings(waiting_max=None))
    held = played(QueueSettings(running_max=1, waiting_max=None, wait_s=1e9))
    assert most_at_once(free) > 2 >= most_at_once(held)
    assert held.metrics["requests"] == free.metrics["requests"] == TRACE.request_count
    assert held.metrics["success_rate"] == 1.0
    assert digest(held.metrics) == digest(
        played(QueueSettings(running_max=1, waiting_max=None, wait_s=1e9)).metrics
    )


@pytest.mark.parametrize("seats", [None, SeatSettings(share=0.5)], ids=["no seats", "seats"])
def test_who_waits_too_long_is_told_no_and_nothing_is_lost(seats: SeatSettings | None) -> None:
    hasty = played(QueueSettings(running_max=1, waiting_max=2, wait_s=0.05), seats)
    refused = hasty.metrics["reasons"].get("overloaded", 0)
    assert 0 < refused < hasty.metrics["requests"]
    assert hasty.metrics["error_rate"] == pytest.approx(refused / hasty.metrics["requests"])


def test_a_limit_that_nobody_meets_changes_nothing() -> None:
    free, wide = (
        played(QueueSettings(running_max=running_max, waiting_max=None))
        for running_max in (None, 1000)
    )
    assert digest(free.metrics) == digest(wide.metrics)
