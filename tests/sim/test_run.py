"""The same trace, setup and code: the same bytes, in whatever process and however many at once."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.pool import PARTS, run_tasks
from ownerserve.sim.run import Result, simulate
from ownerserve.sim.sweep import Jobs, run_all
from tests.support.children import importing
from tests.support.sim.fleet_driver import agents, setup

TRACE = agents()
TWO = partial(run_tasks, processes=2)
TELL = """
from hashlib import sha256
from tests.support.sim.fleet_driver import agents, setup
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.run import simulate
from ownerserve.sim.config.setup import Tiers
for policy in ("ownerserve", "static_pd_delta"):
    wanted = setup(policy, tiers=Tiers(host_bytes=1 << 30, disk_bytes=64 << 30))
    result = simulate(agents(), wanted)
    print(digest(result.metrics), sha256(result.rows.table().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_processes_with_other_hash_seeds_say_the_same() -> None:
    told = []
    for seed in ("1", "4242"):
        env = importing(PYTHONHASHSEED=seed)
        command = [sys.executable, "-c", TELL]
        told.append(subprocess.run(command, env=env, capture_output=True, text=True, check=True))
    assert told[0].stdout == told[1].stdout and len(told[0].stdout.split()) == 4


def test_the_samples_and_the_clock_end_with_the_last_turn() -> None:
    result = simulate(TRACE, setup())
    table = result.rows.table()
    assert result.metrics["requests"] == TRACE.request_count
    assert result.metrics["makespan_s"] == pytest.approx(table["done_s"].max())
    assert result.samples.times_s()[-1] == pytest.approx(table["done_s"].max())


def test_progress_is_told_in_turns() -> None:
    told: list[tuple[int, int]] = []
    simulate(TRACE, setup(), lambda ended, total: told.append((ended, total)))
    assert told[-1] == (TRACE.request_count, TRACE.request_count)
    assert told == sorted(told)


def turns(result: Result) -> tuple[str, int]:
    return digest(result.metrics), len(result.rows)


@pytest.mark.slow
def test_how_many_run_at_once_changes_nothing() -> None:
    setups = {name: setup(name) for name in ("ear", "least_load", "ownerserve")}
    jobs = Jobs(TRACE, setups, turns)
    told: list[int] = []
    alone = {
        out.name: out.kept
        for out in run_all(jobs, runner=partial(run_tasks, processes=1), progress=told.append)
    }
    assert sum(told) == 3 * PARTS
    apart = {out.name: out.kept for out in run_all(jobs, runner=TWO)}
    assert alone == apart and set(alone) == set(setups)


def test_a_failure_in_a_process_is_raised_here() -> None:
    setups = {name: setup("ear", pace=name) for name in ("no-such@h200", "nor-this@h200")}
    with pytest.raises(InvalidInput, match="none is shipped"):
        list(run_all(Jobs(TRACE, setups, turns), runner=TWO))


def test_closing_the_iterator_ends_the_processes() -> None:
    setups = {str(n): setup("ear") for n in range(6)}
    found = run_all(Jobs(agents(20, 10), setups, turns), runner=TWO)
    next(found)
    found.close()  # type: ignore[attr-defined]
    import multiprocessing

    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "best"},
        {"workers": 0},
        {"prefill_workers": 8},
        {"longest_fold": 0},
        {"transfer_s": 0.0},
        {"sample_s": -1.0},
    ],
)
def test_a_setup_that_can_not_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        SimSetup(**wrong)  # type: ignore[arg-type]
