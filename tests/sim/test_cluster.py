"""The same runs on a real Ray cluster: of this machine's cores, started and ended by the test."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from fleet_driver import agents, setup

from ownerserve.cli import simulate
from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.cluster import LOCAL, RayRunner
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.pool import PARTS, Told, run_tasks
from ownerserve.sim.run import Result
from ownerserve.sim.sweep import Jobs, run_all

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    # Ray's own start leaves files to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster's processes import what a task names, as from an installed package."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def kept(result: Result) -> tuple[str, int]:
    return digest(result.metrics), len(result.rows)


def seven(told: Told) -> int:
    told(1, 2)
    return 7


def fails(told: Told) -> int:
    raise InvalidInput("field", "is wrong", "mend it")


def test_a_cluster_gives_what_this_machine_gives() -> None:
    jobs = Jobs(agents(), {name: setup(name) for name in ("ear", "ownerserve", "sticky")}, kept)
    told: list[int] = []
    here = {one.name: one.kept for one in run_all(jobs, runner=run_tasks)}
    there = {
        one.name: one.kept for one in run_all(jobs, runner=RayRunner(LOCAL), progress=told.append)
    }
    assert here == there
    assert sum(told) == 3 * PARTS
    assert not ray.is_initialized()


def test_one_that_fails_is_told_and_the_others_go_on() -> None:
    ends = {one.name: one for one in RayRunner(LOCAL)({"good": seven, "bad": fails})}
    assert ends["good"].answer == 7
    assert isinstance(ends["bad"].error, InvalidInput)


def test_no_cluster_is_one_error() -> None:
    found = CliRunner().invoke(
        simulate.command, ["--sessions", "2", "--policy", "ear", "--ray", "ray://127.0.0.1:1"]
    )
    assert isinstance(found.exception, InvalidInput)
    assert "ray://127.0.0.1:1" in str(found.exception)


def test_jobs_and_a_cluster_exclude_each_other() -> None:
    given = ["--sessions", "2", "--jobs", "2", "--ray", LOCAL]
    found = CliRunner().invoke(simulate.command, given)
    assert isinstance(found.exception, InvalidInput)
