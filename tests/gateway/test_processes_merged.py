"""What several relays say, put together: every key and every gauge has a meaning that is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ownerserve.gateway.admin import admin_app, status
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.metrics import GatewayCollector
from ownerserve.gateway.processes import merging
from ownerserve.gateway.processes.journal import (
    KEPT_MAX,
    RELOAD,
    AdminQuestion,
    ChangeJournal,
)
from ownerserve.gateway.processes.merging_metrics import LARGEST, Counted, read
from ownerserve.gateway.processes.relay import redo, redo_for_who_comes
from ownerserve.gateway.roster import Stay
from ownerserve.gateway.service import Gateway
from tests.support.gateway.metric_names import told
from tests.support.gateway.world import World

OWN = {
    "canary_share", "certificate_end_timestamp_seconds", "discovered_workers",
    "longest_lost_run_turns", "mode", "process_life", "routing_constant", "seat_stay_seconds",
    "turn_move_longest_pause_seconds",
    "worker_busy_share", "worker_extents", "worker_queue_seconds", "worker_refill_share",
    "worker_up",
}  # fmt: skip
"""Gauges that all relays tell alike."""
SUMMED = {
    "clients", "clients_max", "live", "queue_turns", "request_body_bytes", "sessions",
    "sessions_by_kept_share", "sessions_waiting", "turns_waiting",
    "worker_held_tokens", "worker_pending_prefill_tokens", "worker_requests", "worker_sessions",
}  # fmt: skip


def test_every_gauge_is_summed_or_the_largest_counts(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        families = told(GatewayCollector(world.gateway), "gateway")
        gauges = {one.name.removeprefix("ownerserve_gateway_") for one in families
                  if one.kind == "gauge"}  # fmt: skip
        assert gauges == SUMMED | (OWN - {"process_life"})
        assert {name.removeprefix("ownerserve_gateway_") for name in LARGEST} == OWN

    play(scenario, engines=1)


def test_two_relays_count_twice_as_much_as_one(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        registry = CollectorRegistry()
        registry.register(GatewayCollector(world.gateway))
        one = read(generate_latest(registry).decode())
        counted = Counted()
        two = read(counted.exposition({0: (1, one), 1: (1, one)}).decode())
        assert two.keys() == one.keys()
        for name, family in one.items():
            factor = 1 if name in LARGEST else 2
            assert two[name].kind == family.kind
            for sample, value in family.values.items():
                assert two[name].values[sample] == factor * value, (name, sample)
        # The second is away, then another has its number: what it counted stays.
        for lives in ({0: (1, one)}, {0: (1, one), 1: (2, one)}):
            after = read(counted.exposition(lives).decode())
            for name, family in two.items():
                if family.kind in ("counter", "histogram"):
                    assert all(after[name].values[one] >= had for one, had in family.values.items())

    play(scenario, engines=1)


def test_every_key_of_the_status_is_put_together(play: Callable[..., None]) -> None:
    """A new key that says what one relay has is wrong unless it is summed."""

    async def scenario(world: World) -> None:
        said = msgspec.to_builtins(status(world.gateway))
        together = merging.status([said, said], [])
        assert said.keys() <= together.keys()
        assert said.keys() == merging.STATUS_KEYS
        assert together["live"] == 2 * said["live"]
        (worker,), (row,) = together["workers"], said["workers"]
        assert worker.keys() == row.keys() == merging.WORKER_KEYS
        assert worker["connections_opened"] == 2 * row["connections_opened"]

    play(scenario, engines=1)


def put(path: str, body: bytes = b"") -> AdminQuestion:
    return AdminQuestion(method="PUT", target=path, body=body)


@pytest.mark.slow
def test_a_reload_stands_first_and_overrules_what_was_asked_before() -> None:
    """Else who starts again would do to the files' word what was asked for before it, or miss
    workers that were drained after the files had brought them."""
    journal, reload = ChangeJournal(), put(RELOAD)
    drained, canary = put("/workers/b/drain"), put("/canary", b'{"share":0.5,"policy":"ear"}')
    for question in (put("/mode", b'{"mode":"bypass"}'), drained, canary):
        journal.add(question)
    journal.reloaded(reload, ["mode", "canary-share", "worker"])
    assert journal.entries() == [reload, drained, put("/canary", b'{"policy":"ear"}')]
    journal.reloaded(reload, ["canary-policy"])
    assert journal.entries() == [reload, drained]
    for number in range(KEPT_MAX + 10):
        journal.add(put(f"/workers/{number}/drain"))
    kept = journal.entries()
    assert len(kept) == KEPT_MAX + 1 and kept[0] == reload
    assert kept[-1] == put(f"/workers/{KEPT_MAX + 9}/drain")


def test_who_joins_late_is_drained_as_it_was_before() -> None:
    """Discovery may name a drained worker only after a relay has started again."""
    late = Address("127.0.0.1", 2)

    async def main() -> None:
        gateway = Gateway(Config(workers=(Address("127.0.0.1", 1),)))
        app, journal = admin_app(gateway), ChangeJournal()
        journal.add(put("/mode", b'{"mode":"bypass"}'))
        journal.add(AdminQuestion(method="POST", target=f"/workers/{late.worker}/drain"))
        await redo(app, journal.entries())
        task = asyncio.ensure_future(redo_for_who_comes(app, journal, gateway.roster.monitors))
        try:
            await asyncio.sleep(0)
            await gateway.roster.join(late)
            async with asyncio.timeout(30):
                await task
            assert gateway.roster.stay(late.worker) is Stay.DRAINED
        finally:
            await gateway.stop()

    asyncio.run(main())
