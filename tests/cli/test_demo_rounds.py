"""In which order the demo's policies run."""

from __future__ import annotations

import itertools

import pytest

from ownerserve.cli.demo.command import POLICIES
from ownerserve.cli.demo.fleets import ALL_POLICIES, PD_HYBRID
from ownerserve.cli.demo.rounds import OURS, rounds_of

SMALL = ("round_robin", "ear", "ownerserve", PD_HYBRID)


@pytest.mark.parametrize("repeats", [1, 2, 5])
@pytest.mark.parametrize("policies", [POLICIES, ALL_POLICIES, *itertools.permutations(SMALL)])
def test_each_round_has_every_policy_once_and_none_of_ours_last(
    policies: tuple[str, ...], repeats: int
) -> None:
    rounds = rounds_of(policies, repeats)
    assert len(rounds) == repeats
    for order in rounds:
        assert sorted(order) == sorted(policies)
        assert order[-1] not in OURS


def test_what_ran_early_runs_late_in_the_next_round() -> None:
    """So that of two rounds none has the better half of a machine that warms up."""
    assert OURS[0] in POLICIES and POLICIES[-1] not in OURS and POLICIES[0] not in OURS
    there, back = rounds_of(POLICIES, 2)
    assert there == POLICIES and back == POLICIES[::-1]
    places = {name: there.index(name) + back.index(name) for name in POLICIES}
    assert set(places.values()) == {len(POLICIES) - 1}


def test_of_two_ours_goes_first_each_time() -> None:
    assert rounds_of(("sticky", "ownerserve"), 2) == [("ownerserve", "sticky")] * 2
    assert rounds_of(("ownerserve", "sticky"), 2) == [("ownerserve", "sticky")] * 2


def test_ours_alone_runs_all_the_same() -> None:
    assert rounds_of(("ownerserve",), 2) == [("ownerserve",)] * 2
    assert rounds_of(("ownerserve", "ownerserve"), 1) == [("ownerserve",)]
    assert rounds_of(OURS, 2) == [OURS, OURS[::-1]]
