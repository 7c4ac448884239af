"""The goal's evidence over many draws (benchmarks/goal): intervals, resuming, who beats whom."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from goal import tables
from goal.cells import Cell, had
from goal.contenders import (
    BELADY,
    BOUND,
    GATED,
    MAIN,
    OURS,
    POOLS,
    REFERENCE,
    UNMOVED,
    rivals,
    setup_of,
)
from goal.families import FAMILIES, Sources, cases, drawn_anew
from goal.paired import paired
from ownerserve.kv.errors import InvalidInput
from ownerserve.report.page import Verdict
from ownerserve.sim.run import simulate
from ownerserve.sim.suites.base import Scale
from ownerserve.sim.suites.goal import while_full

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

SAME = {
    "turn_mean_s": 5.0,
    "turn_p95_s": 20.0,
    "turn_p99_s": 40.0,
    "first_turn_mean_s": 30.0,
    "session_mean_s": 900.0,
    "held_longest_s": 10.0,
    "network_kv_bytes": 1e12,
    "avoidable_duplicate_share": 0.01,
    "success_rate": 1.0,
}


def noisy(
    mean: float, *, draws: int = 10, scatter: float = 0.05, seed: int = 0
) -> list[list[float]]:
    chance = random.Random(seed)
    return [[mean * chance.lognormvariate(0.0, scatter) for _ in range(3)] for _ in range(draws)]


def cell(contender: str, work: float, *, draw: int = 1, perturbation: int = 0) -> Cell:
    key = f"{contender} {draw} {perturbation}"
    metrics = {**SAME, "tasks_per_gpu_hour": work}
    return Cell(key, "claude-code", "above", 48, contender, draw, perturbation, metrics)


def table_of(works: dict[str, float]) -> tables.Table:
    cells = [
        cell(name, one, draw=draw, perturbation=number)
        for name, work in works.items()
        for draw, by_draw in enumerate(noisy(work, seed=len(name)))
        for number, one in enumerate(by_draw)
    ]
    (found,) = tables.tables(cells)
    return found


def test_an_interval_holds_the_truth_and_parts_what_is_apart() -> None:
    ahead = paired(noisy(1.2, seed=1), noisy(1.0, seed=2))
    level = paired(noisy(1.0, seed=3), noisy(1.0, seed=4))
    assert ahead.low > 1.05
    assert ahead.low < 1.2 < ahead.high
    assert level.low < 1.0 < level.high
    assert paired(noisy(1.2, seed=1), noisy(1.0, seed=2)) == ahead


def test_what_all_draws_share_is_no_scatter() -> None:
    """Draws differ by far more than policies: only their ratio is looked at."""
    sizes = [1.0, 3.0, 9.0, 27.0]
    found = paired([[1.1 * size] for size in sizes], [[size] for size in sizes])
    assert found.low == pytest.approx(1.1)
    assert found.high == pytest.approx(1.1)


def test_two_draws_show_nothing() -> None:
    assert paired([[2.0], [2.0]], [[1.0], [1.0]]).low == 0.0
    assert paired([[0.0]] * 5, [[1.0]] * 5).draws == 0


def test_a_lead_holds_only_when_its_interval_clears() -> None:
    def said(ours: float, goal: str) -> Verdict:
        shown = table_of({OURS: ours, "ear": 6.0, "lmetric_gate + seats 1.0": 9.0})
        return {line.goal: line.verdict for line in tables.lines(shown)}[goal]

    assert said(10.5, "a: work > the best rival's + 5 %") is Verdict.HOLDS
    assert said(9.5, "a: work > the best rival's + 5 %") is not Verdict.HOLDS
    assert said(9.5, "a: work >= the best rival's - 2 %") is Verdict.HOLDS
    assert said(7.0, "a: work >= the best rival's - 2 %") is Verdict.FAILS


def test_who_beats_the_reference_is_named() -> None:
    reference = f"ownerserve + seats 1.0{BELADY}"
    assert tables.beats_reference(table_of({OURS: 8.0, "ear": 6.0, reference: 9.0})) == []
    (said,) = tables.beats_reference(table_of({OURS: 8.0, "ear": 11.0, reference: 9.0}))
    assert said.startswith("ear: ")


def test_ours_with_a_part_taken_away_is_no_rival() -> None:
    """It would be the best of them, and the goal's lines would speak of it."""
    found = table_of({OURS: 1.0, UNMOVED: 2.0, GATED: 2.0, "ear": 0.5, "ownerserve": 0.6})
    assert found.rivals == ["ear", "ownerserve"]
    assert not any("ours" in line.number.split(", ", 1)[-1] for line in tables.lines(found))


def test_every_contender_is_a_setup() -> None:
    trace = drawn_anew(1, scale=Scale.QUICK)
    (case,) = cases("drawn", trace, 1, loads=["above"], scale=Scale.QUICK)
    case = case._replace(host_bytes=1 << 30)
    names = (OURS, UNMOVED, GATED, *rivals("all"), *POOLS, *REFERENCE, BOUND)
    assert len(set(names)) == len(names)
    setups = [setup_of(name, case, number) for name in names for number in (0, 1)]
    assert len({repr(setup) for setup in setups}) == len(setups)


def test_a_contender_that_pulls_is_its_policy_over_engines_that_pull() -> None:
    trace = drawn_anew(1, scale=Scale.QUICK)
    (case,) = cases("drawn", trace, 1, loads=["above"], scale=Scale.QUICK)
    for name in ("dynamo", "dynamo + seats 1.0", "ours, lmetric_gate"):
        policy, at, share = name.partition(" + ")
        alone, pulling = setup_of(name, case, 0), setup_of(f"{policy}, pulls{at}{share}", case, 0)
        assert (alone.pulls, pulling.pulls) == ("never", "cheaper")
        assert msgspec.structs.replace(pulling, pulls="never") == alone
    with pytest.raises(InvalidInput):
        setup_of("ours, pulls", case, 0)


def test_how_fast_a_fleet_truly_is_is_drawn_alike_for_all_of_a_pair() -> None:
    trace = drawn_anew(1, scale=Scale.QUICK)
    (case,) = cases("drawn", trace, 1, loads=["above"], scale=Scale.QUICK)
    drawn = [
        {setup_of(name, case, number).step_factors for name in (OURS, "ear", "sticky + seats 1.0")}
        for number in range(3)
    ]
    assert [len(one) for one in drawn] == [1, 1, 1]
    assert drawn[0] == {(1.0,)}
    assert len({*drawn[0], *drawn[1], *drawn[2]}) == 3


def test_a_draw_of_nobodys_sessions_is_the_same_twice_and_another_the_next_time() -> None:
    assert drawn_anew(3, scale=Scale.QUICK) == drawn_anew(3, scale=Scale.QUICK)
    assert drawn_anew(3, scale=Scale.QUICK) != drawn_anew(4, scale=Scale.QUICK)
    assert set(Sources(None).families) == set(FAMILIES) - {"agentic-code"}


@pytest.mark.slow
def test_no_policy_surely_does_more_work_than_the_reference() -> None:
    """The best of what knows the future is a reference only while nobody without that beats it."""
    names, cells = (OURS, *MAIN, *(f"{one} + seats 1.0" for one in MAIN), *REFERENCE), list[Cell]()
    for draw in range(1, 4):
        trace = drawn_anew(draw, scale=Scale.QUICK)
        for case in cases("drawn", trace, draw, loads=["above"], scale=Scale.QUICK):
            for name in names:
                metrics = while_full(simulate(trace, setup_of(name, case, 0)))
                cells.append(Cell("", case.family, case.load, 0, name, draw, 0, metrics))
    (table,) = tables.tables(cells)
    assert tables.beats_reference(table) == []


@pytest.mark.slow
def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    command = [
        sys.executable, str(BENCHMARKS / "goal_draws.py"), "--quick", "--draws", "1",
        "--only", "drawn", "knee", "--contenders", "ours", "ear", "--out", str(tmp_path),
        "--json", str(tmp_path / "said.json"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent / "src")}

    def ran() -> str:
        subprocess.run(command, check=True, env=environment, capture_output=True)
        return (tmp_path / "said.json").read_text()

    said, kept = ran(), tmp_path / "cells.jsonl"
    assert [row[0] for row in json.loads(said)["tables"][0][2]] == ["ours", "ear"]
    first = had(kept)
    assert len(first) == 2
    assert ran() == said
    assert had(kept) == first
    whole = kept.read_bytes().rstrip(b"\n")
    kept.write_bytes(whole[:-40])  # ended amid its second line
    assert len(had(kept)) == 1
    assert ran() == said
    assert had(kept) == first
