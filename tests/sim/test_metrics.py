"""Metrics against hand-worked runs: what each name in docs/metrics.md means, to the number."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ownerserve.kv.messages import ExecutionMode, PlacementAction, UnservedReason
from ownerserve.sim.metrics.counters import FleetCounters, Migration
from ownerserve.sim.metrics.coupling import coupling
from ownerserve.sim.metrics.fleet_load import heat_map
from ownerserve.sim.metrics.moves import THRASH_WINDOW_S
from ownerserve.sim.metrics.rows import DTYPE, MODES, NO_WORKER, Rows, TurnRow
from ownerserve.sim.metrics.samples import Samples, WorkerSample
from ownerserve.sim.metrics.summary import Run, digest, summarise
from ownerserve.sim.metrics.tasks import tasks, tool_idle_utilisation

RUN = Run(gpus=4, workers=2, hot_ms=1_000, trace_span_s=50)


def turn(number: int, session: int, arrived_s: float, done_s: float, **more: object) -> TurnRow:
    """A turn of 1,000 prompt tokens, 11 sampled ones and 500 ms to the first of them."""
    row = TurnRow(number, session, number, arrived_s, 1_000, 11)
    told = {
        "worker": 0,
        "routed_s": arrived_s,
        "started_s": arrived_s + 0.1,
        "first_token_s": arrived_s + 0.5,
        "done_s": done_s,
        "output_tokens": 11,
        "cached_tokens": 600,
        "computed_tokens": 400,
        "mode": ExecutionMode.DIRECT_APPEND,
        "action": PlacementAction.COLOCATED_PREFILL,
        **more,
    }
    for name, value in told.items():
        setattr(row, name, value)
    return row


def rows_of(*turns: TurnRow) -> Rows:
    rows = Rows()
    for row in turns:
        rows.add(row)
    return rows


def summary(*turns: TurnRow, counters: FleetCounters | None = None, samples: Samples | None = None):
    return summarise(rows_of(*turns), counters or FleetCounters(), samples or Samples(2, 1.0), RUN)


def test_a_row_comes_back_as_it_was_put_in() -> None:
    row = turn(7, 3, 1.25, 9.5, reason=UnservedReason.OVERLOADED, network_bytes=1 << 40, attempts=3)
    kept = rows_of(row).table()[0]
    for name in DTYPE.names:
        value = kept[name]
        expected = getattr(row, name)
        if name == "mode":
            assert MODES[value] is expected
        elif name not in ("action", "reason"):
            assert value == expected, name


def test_rows_do_not_follow_the_object() -> None:
    row = turn(0, 0, 0, 1)
    rows = rows_of(row)
    table = rows.table()
    row.done_s = 99
    rows.add(row)
    assert (len(table), len(rows)) == (1, 2)
    assert list(rows.table()["done_s"]) == [1, 99]


def test_latencies_and_tokens() -> None:
    found = summary(turn(0, 0, 0, 1.5), turn(1, 0, 10, 12.5, cached_tokens=900))
    assert found["ttft_ms"]["mean"] == 500
    assert found["tpot_ms"]["mean"] == pytest.approx(150)  # (1000 + 2000) / 2 over 10 tokens
    assert found["step_latency_ms"]["p50"] == 2_000
    assert found["queue_ms"]["p99"] == pytest.approx(100)
    assert found["cached_token_share"] == 0.75
    assert found["prefill_tokens_saved"] == 1_500
    assert found["wall_clock_factor"] == 0.25


def test_one_sampled_token_has_no_time_per_token() -> None:
    assert summary(turn(0, 0, 0, 1, output_tokens=1, wanted_tokens=1))["tpot_ms"] is None


def test_outcomes_add_up_and_only_whole_sessions_are_completed() -> None:
    refused = turn(
        3, 2, 0, 0, mode=ExecutionMode.REFUSED, reason=UnservedReason.NO_ROOM, worker=NO_WORKER
    )
    found = summary(
        turn(0, 0, 0, 36),
        turn(1, 0, 40, 50, attempts=3, routed_s=42),
        turn(2, 1, 0, 3600, output_tokens=5),
        refused,
        counters=FleetCounters(completed=[0, 1, 2]),
    )
    rates = [found[f"{name}_rate"] for name in ("success", "truncation", "error")]
    assert rates == [0.5, 0.25, 0.25]
    assert found["retries"] == 2
    assert found["reasons"] == {"no_room": 1}
    assert found["completed_tasks"] == 1  # 1 was cut short, 2 refused
    assert found["completed_tasks_per_hour"] == 1
    assert found["completed_tasks_per_gpu_hour"] == 0.25
    assert found["task_s"]["retry_s"] == pytest.approx(2 / 3)
    assert found["modes"]["refused"]["ttft_ms"] is None
    assert found["modes"]["direct_append"]["share"] == 0.75


def test_parallel_agents_of_a_session_count_once_in_its_task_time() -> None:
    """0-4 and 2-10 overlap; then a gap of 5 s after the one that ended last (at worker 1)."""
    rows = rows_of(turn(0, 5, 0, 4), turn(1, 5, 2, 10, worker=1), turn(2, 5, 15, 20))
    found = tasks(rows.table())
    assert (found.e2e_s[0], found.tool_s[0]) == (20, 5)
    assert [found.gaps.from_s[0], found.gaps.until_s[0], found.gaps.worker[0]] == [10, 15, 1]


def test_tool_idle_utilisation_is_the_busy_share_of_the_gaps() -> None:
    rows = rows_of(turn(0, 0, 0, 10, worker=1), turn(1, 0, 20, 30, worker=1))
    samples = Samples(2, 1.0)
    for at_s, busy_s in ((0, 0), (10, 10), (20, 14), (30, 20)):
        samples.add(at_s, [WorkerSample(0, 0, 0, 0.0), WorkerSample(0, 0, 0, busy_s)])
    assert tool_idle_utilisation(tasks(rows.table()).gaps, samples) == pytest.approx(0.4)


def sampled(*pending: tuple[int, int]) -> Samples:
    samples = Samples(2, 1.0)
    for at, load in enumerate(pending):
        samples.add(at, [WorkerSample(p, 0, 300, 0.0) for p in load])
    return samples


def test_indices_of_load() -> None:
    pinned = summary(
        turn(0, 0, 0, 1, computed_tokens=900),
        turn(1, 1, 0, 1, computed_tokens=100, worker=0, prefill_worker=1),
        samples=sampled((100, 0), (0, 0), (300, 0)),  # the moment without a queue does not count
    )
    assert pinned["hotspot_index"] == 1.8  # by who computed the prompt: 900 over 500
    assert pinned["pending_hotspot_index"] == 2  # all on one of two, all the time
    assert pinned["interference_index"] == (100**2 + 300**2) / 4 / (400 / 4) ** 2
    even = summary(turn(0, 0, 0, 1), samples=sampled((100, 100), (100, 100)))
    assert (even["pending_hotspot_index"], even["interference_index"]) == (1, 1)


def test_memory_is_shared_by_the_sessions_that_are_open() -> None:
    """600 bytes at 0, 1, 2, 3 s; one session is open from 0 to 3, another from 2 to 9."""
    found = summary(
        turn(0, 0, 0, 1),
        turn(1, 0, 2, 3),
        turn(2, 1, 2, 9),
        samples=sampled((0, 0), (0, 0), (0, 0), (0, 0)),
    )
    assert found["hbm_bytes_per_session"] == 4 * 600 / (1 + 1 + 2 + 1)
    assert found["max_concurrent_sessions"] == 2
    assert found["interference_index"] is None  # no load, no index


def test_what_the_run_does_not_tell_is_null() -> None:
    found = summary(turn(0, 0, 0, 1))
    assert found["hbm_bytes_per_session"] is None
    assert found["duplicate_factor"] is None
    assert found["ssd_write_amplification"] is None
    assert found["decode_interference"] is None
    assert found["restore"]["load_ms"] is None


def test_an_empty_run_has_a_summary() -> None:
    found = summary()
    assert found["requests"] == 0
    assert found["ttft_ms"] is None
    assert found["cached_token_share"] is None
    assert found["coupling"]["gain"] is None


def test_bytes_and_interference() -> None:
    counters = FleetCounters(
        decode_alone_ms=200, decode_stall_ms=50, ssd_new_bytes=100, ssd_written_bytes=130
    )
    found = summary(
        turn(0, 0, 0, 1, placed_bytes=80, duplicate_bytes=30, avoidable_bytes=8, network_bytes=9),
        turn(1, 0, 2, 3, placed_bytes=80, owner=0),
        turn(2, 0, 4, 5, owner=1),
        counters=counters,
    )
    assert found["avoidable_duplicate_share"] == 0.05
    assert found["duplicate_factor"] == pytest.approx(160 / 130)
    assert (found["duplicate_bytes"], found["network_kv_bytes"]) == (30, 9)
    assert found["owner_hit_rate"] == 0.5  # the first turn had no owner
    assert found["decode_interference"] == 0.25
    assert found["ssd_write_amplification"] == 1.3


def test_restore_breakdown_is_of_turns_that_restored() -> None:
    found = summary(
        turn(0, 0, 0, 1),
        turn(1, 0, 2, 3, restore_queue_ms=1, restore_load_ms=30, restore_recompute_ms=9),
    )["restore"]
    assert (found["turns"], found["queue_ms"], found["load_ms"]) == (1, 1, 30)
    assert found["total_ms"]["mean"] == 40


def move(session: int, at_s: float, *, target: int = 1, completed: int = 1) -> Migration:
    """Landed after 2 s; the turn that asked for it took 5 s more."""
    return Migration(session, f"s{session}", 0, target, at_s, at_s + 2, at_s + 7, 1_000, completed)


def test_migrations_are_judged_by_what_the_next_turns_found() -> None:
    """Session 0's target stays cool; session 1's is hot at the second turn; session 2 ends."""
    counters = FleetCounters(
        migrations=[move(0, 10), move(1, 10), move(1, 50), move(2, 10), move(0, 200, completed=0)]
    )
    cool, hot = {"owner": 1, "owner_wait_ms": 10.0}, {"owner": 1, "owner_wait_ms": 5_000.0}
    found = summary(
        turn(0, 0, 9, 17, owner=0, owner_wait_ms=9_000.0),  # the turn that set it off
        turn(1, 0, 20, 21, **cool),
        turn(2, 0, 30, 31, **cool),
        turn(3, 1, 20, 21, **cool),
        turn(4, 1, 30, 31, **hot),
        turn(5, 2, 9, 12, owner=0),
        counters=counters,
    )["migrations"]
    assert (found["count"], found["given_up"]) == (4, 1)
    assert found["mean_ms"] == 2_000  # the transfer's time, not the turn's
    assert found["accuracy"] == 0.5
    assert found["thrash_rate"] == pytest.approx(1 / 3)  # session 1: 40 s after
    assert found["rate"] == pytest.approx(4 / 6)


def test_moves_thrash_by_a_fixed_window_whatever_the_cool_down_was() -> None:
    apart_s = {"within": THRASH_WINDOW_S - 1, "beyond": THRASH_WINDOW_S + 1}
    rates = {
        name: summary(
            turn(0, 0, 0, 1), counters=FleetCounters(migrations=[move(0, 10), move(0, 10 + gap_s)])
        )["migrations"]["thrash_rate"]
        for name, gap_s in apart_s.items()
    }
    assert rates == {"within": 1, "beyond": 0}


def test_coupling_finds_the_slope_that_a_run_has() -> None:
    """Each turn takes 1 s + 0.1 s for every turn it finds."""
    table = np.zeros(400, DTYPE)
    arrived = np.cumsum(np.tile([0.1] * 10 + [3.0], 40)[:400])
    ends: list[float] = []
    for at, row in zip(arrived, table, strict=True):
        inside = sum(end > at for end in ends)
        ends.append(at + 1 + 0.1 * inside)
        row["arrived_s"], row["done_s"] = at, ends[-1]
    found = coupling(table)
    assert found["turn_s_per_turn"] == pytest.approx(0.1, rel=1e-3)
    assert found["gain"] == pytest.approx(400 / (max(ends) - arrived[0]) * 0.1, rel=1e-3)
    assert found["amplification"] == pytest.approx(1 / (1 - found["gain"]))
    law = found["sessions_per_s"] * found["turns_per_session"] * found["turn_s"]
    assert found["turns_in_system"] == pytest.approx(law)


def test_samples_stay_bounded_and_even() -> None:
    samples = Samples(2, 0.5, most=8)
    at_s = 0.0
    for count in range(40):
        samples.add(at_s, [WorkerSample(count, 0, 0, at_s), WorkerSample(0, 1, 0, 0.0)])
        at_s += samples.period_s
    times = samples.times_s()
    assert len(samples) <= 8
    assert set(np.diff(times)) == {samples.period_s}
    assert (samples.column("busy_s")[:, 0] == times).all()


def test_heat_map_has_the_loads_and_the_completed_moves() -> None:
    counters = FleetCounters(migrations=[move(0, 1), move(1, 1, completed=0)])
    found = heat_map(sampled((5, 1), (7, 2)), counters)
    assert found["pending_prefill_tokens"] == [[5, 7], [1, 2]]
    assert found["moves"] == [{"at_s": 3, "source": 0, "target": 1}]


def test_digest_is_of_every_metric_in_any_order() -> None:
    found = summary(turn(0, 0, 0, 1))
    assert digest(found) == digest(dict(reversed(found.items())))
    assert digest(found) != digest({**found, "retries": 1})


def test_every_metric_has_its_line_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    named = set(re.findall(r"`([a-z0-9_]+)`", text))
    found = summary(turn(0, 0, 0, 1))
    inner = {
        name for part in ("task_s", "restore", "migrations", "coupling") for name in found[part]
    }
    assert not (set(found) | inner | set(found["pressure"])) - named
