"""Clients that ask again: after a refusal, after a time without an answer, and what that does to a
fleet that has too much to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.router.admission import SeatSettings
from ownerserve.router.entry.queue import RETRY_MIN_S, QueueSettings
from ownerserve.sim.config.clients import BACKOFF_MOST_S, BACKOFF_S, JITTER, ClientSettings
from ownerserve.sim.config.faults import read_faults
from ownerserve.sim.config.setup import Links, Tiers
from ownerserve.sim.fleet.fleet import SimFleet
from ownerserve.sim.metrics.rows import SERVED
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.run import simulate
from ownerserve.sim.workload import Capped, WorkloadShape
from tests.support.sim.fleet_driver import agents, ready, run, setup

TRACE = agents(12)
FULL = QueueSettings(running_max=1, waiting_max=1)
"""A queue that turns away all but one who does not run at once."""
HASTY_S = 0.03
"""Half of a crowded worker's turns take longer until they begin."""
CROWDED: dict[str, Any] = {"workers": 1, "shape": WorkloadShape(mode=Capped(12))}


def served_share(fleet: SimFleet) -> float:
    return float(np.isin(fleet.rows.table()["mode"], SERVED).mean())


def asked_again(fleet: SimFleet) -> int:
    return int(fleet.rows.table()["client_retries"].sum())


def played(policy: str = "ownerserve", **changes: Any) -> SimFleet:
    return run(ready(TRACE, setup(policy, **changes)), check_every=20)


def test_who_is_told_when_comes_then_and_who_is_not_backs_off() -> None:
    settings = ClientSettings(retries=3)
    assert settings.wait_s(0, 12.0, 0.9) == 12.0
    assert settings.wait_s(0, None, 0.0) == BACKOFF_S
    assert settings.wait_s(2, None, 0.0) == 4 * BACKOFF_S
    assert settings.wait_s(9, None, 0.0) == BACKOFF_MOST_S
    assert settings.wait_s(0, None, 0.5) == BACKOFF_S * (1 - JITTER / 2)
    assert settings.wait_s(1, 600.0, 0.0) == 2 * BACKOFF_S, "told to wait for too long"


@pytest.mark.parametrize(("field", "value"), [("retries", -1), ("timeout_s", 0.0)])
def test_clients_that_can_not_be_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=field):
        ClientSettings(**{field: value})


def test_what_was_refused_is_asked_for_again_and_mostly_served() -> None:
    once = played(**CROWDED, queue=FULL)
    again = played(**CROWDED, queue=FULL, clients=ClientSettings(retries=6))
    assert served_share(once) < 0.8
    assert asked_again(once) == 0
    assert served_share(again) > served_share(once) + 0.1
    table = again.rows.table()
    late = table[table["client_retries"] > 0]
    assert len(late)
    least_s = late["client_retries"] * RETRY_MIN_S  # what the queue told them at least
    assert (late["routed_s"] - late["arrived_s"] >= least_s - 1e-6).all()


def test_who_was_refused_often_enough_gives_up() -> None:
    table = played(**CROWDED, queue=FULL, clients=ClientSettings(retries=1)).rows.table()
    refused = table[~np.isin(table["mode"], SERVED)]
    assert len(refused)
    assert (refused["client_retries"] == 1).all()


def test_clients_without_patience_storm_a_fleet_that_is_slow() -> None:
    """Each try that is hung up takes room in line and is computed in part: clients that wait have
    every turn served, those that do not ask several times for each and have fewer."""
    patient = played(**CROWDED)
    hasty = played(**CROWDED, clients=ClientSettings(retries=3, timeout_s=HASTY_S))
    assert served_share(patient) == 1.0
    assert served_share(hasty) < 0.9
    assert asked_again(hasty) > len(hasty.rows) // 2
    table = hasty.rows.table()
    begun_s = table["first_token_s"] - table["routed_s"]
    assert begun_s[np.isin(table["mode"], SERVED)].max() <= HASTY_S + 1e-6


def test_retries_are_in_the_metrics() -> None:
    wanted = setup(**CROWDED, clients=ClientSettings(retries=3, timeout_s=HASTY_S))
    metrics = simulate(TRACE, wanted).metrics
    assert metrics["client_retries"] > 0
    assert metrics["reasons"].get("client_timeout", 0) > 0
    assert metrics["error_rate"] > 0


@pytest.mark.parametrize(
    ("policy", "timeout_s", "changes"),
    [
        ("ownerserve", 0.03, {}),
        ("ownerserve", 0.04, {"seats": SeatSettings(), "queue": QueueSettings(running_max=1)}),
        ("ownerserve", 0.04, {"tiers": Tiers(host_bytes=1 << 30, disk_bytes=1 << 32)}),
        ("static_pd_delta", 0.03, {"links": Links(nic_gb_s=0.5)}),
        ("static_pd_delta", 0.25, {"links": Links(nic_gb_s=0.5)}),
        ("ear", 0.03, {"gateways": 2}),
    ],
)
def test_a_client_may_hang_up_wherever_its_turn_is(
    policy: str, timeout_s: float, changes: dict[str, Any]
) -> None:
    """In line, while state is brought, while it is computed here or apart, with deaths between:
    every turn ends once, and all books are whole."""
    faults = read_faults("death:w1@3+4", workers=4, disks=0, seed=0)
    clients = ClientSettings(retries=2, timeout_s=timeout_s)
    changes = {"shape": WorkloadShape(mode=Capped(12)), **changes}
    built = ready(TRACE, setup(policy, clients=clients, faults=faults, **changes))
    fleet = run(built, check_every=20)
    assert len(fleet.rows) == TRACE.request_count
    assert asked_again(fleet) > 0
    built.heap.run(until_s=built.heap.now + 60.0)  # steps that were under way
    assert not any(worker.machine.engine.everyone() for worker in fleet.workers)


def test_patience_that_nobody_needs_changes_nothing() -> None:
    calm = simulate(TRACE, setup())
    with_patience = simulate(TRACE, setup(clients=ClientSettings(retries=5, timeout_s=3600.0)))
    assert digest(calm.metrics) == digest(with_patience.metrics)
