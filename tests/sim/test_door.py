"""The door beside fixed shares and beside itself (benchmarks/door.py): what is moved, what a run's
name follows, what is compared."""

from __future__ import annotations

from typing import Any

import pytest

import door
from goal.cells import Cell
from goal.families import Case, drawn_anew
from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.suites.base import Scale
from ownerserve.trace.model import Trace

CASE = Case("drawn", "above", 1, 8, 16, 10**9)


def cell(variant: str, draw: int, work: float, first_s: float = 60.0) -> Cell:
    metrics = {
        "tasks_per_gpu_hour": work,
        "first_turn_mean_s": first_s,
        "turn_mean_s": 4.0,
        "turn_p95_s": 20.0,
    }
    return Cell(f"{variant} {draw}", "drawn", "above", 60 + draw, variant, draw, 0, metrics)


def test_each_constant_is_moved_and_each_variant_is_another_run() -> None:
    setups = {name: door.setup_as(name, CASE) for name in door.MOVED}
    ours = setups[door.OURS].seats
    for name in door.SETTINGS:
        for factor in door.FACTORS:
            moved = setups[f"{name} x{factor}"].seats
            assert ours is not None
            assert moved is not None
            assert getattr(moved, name) == pytest.approx(factor * getattr(ours, name))
    keys = {door.key_of(CASE, one, setup=setups[one], digests=("c", "t")) for one in door.MOVED}
    assert len(keys) == len(door.MOVED)


def test_a_run_is_another_one_with_other_code_or_other_sessions() -> None:
    setup = door.setup_as(door.OURS, CASE)
    digests = [("code", "sessions"), ("code", "others"), ("newer", "sessions")]
    keys = {door.key_of(CASE, door.OURS, setup=setup, digests=one) for one in digests}
    assert len(keys) == len(digests)


@pytest.mark.parametrize("name", list(door.MODULES))
def test_a_modules_constant_is_moved_while_it_runs_and_not_after(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, seen = door.MODULES[name], list[float]()

    def simulate(trace: Trace, setup: SimSetup) -> Any:
        seen.append(getattr(module, name))
        raise InvalidInput("trace", "none", "give one")

    monkeypatch.setattr(door, "simulate", simulate)
    before, trace = getattr(module, name), drawn_anew(1, scale=Scale.QUICK)
    for variant in (door.OURS, f"{name} x1.1"):
        with pytest.raises(InvalidInput):
            door.measured(trace, door.setup_as(variant, CASE), variant)
    assert seen == pytest.approx([before, 1.1 * before])
    assert getattr(module, name) == before


def test_ours_is_held_against_the_share_that_is_best_in_the_mean() -> None:
    works = {door.OURS: (10.0, 10.0, 10.0), "a": (9.0, 9.0, 15.0), "b": (10.5, 10.5, 10.5)}
    cells = [
        cell(name, draw, one) for name, all_of in works.items() for draw, one in enumerate(all_of)
    ]
    (family,) = door.by_family(cells)
    assert family.lanes == [60, 61, 62]
    assert family.ours_over("b", door.WORK).ratio == pytest.approx(10.0 / 10.5)
    assert list(door.best_shares([family]).columns[1].cells) == ["a"]


def test_what_was_run_in_some_draws_alone_is_compared_in_those() -> None:
    cells = [cell(door.OURS, draw, 10.0 + draw) for draw in range(4)]
    cells += [cell("a", draw, 2.0 * (10.0 + draw)) for draw in range(2)]
    (family,) = door.by_family(cells)
    found = family.ours_over("a", door.WORK)
    assert (found.ratio, found.draws) == (pytest.approx(0.5), 2)
    assert door.said(found) == "0.500", "of two draws no interval is known"
