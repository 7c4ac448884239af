"""By how much sessions grow: learnt from those that are over and those that still run."""

from __future__ import annotations

from math import isclose

import pytest

from ownerserve.kv.ids import SessionId
from ownerserve.router.admission import SeatSettings, SessionAdmission
from ownerserve.router.entry import growth
from ownerserve.router.entry.growth import LONGEST_GAP_S, OVER_LEAST, SESSIONS_KEPT, SessionGrowth
from ownerserve.router.entry.seats import GROWTH_ASSUMED_TOKENS
from ownerserve.router.entry.terms import ENTER
from ownerserve.router.worker import Profile
from tests.support.router.fleets import PLAIN, fleet_of, load


def s(name: object) -> SessionId:
    return SessionId(f"{name}")


def ran(grown: SessionGrowth, name: object, tokens: int, *, now_s: float = 0.0) -> None:
    grown.began(s(name), 1000)
    grown.ended(s(name), 1000 + tokens, now_s)


def test_it_is_the_mean_of_sessions_that_are_over() -> None:
    grown = SessionGrowth()
    for number in range(OVER_LEAST):
        assert grown.tokens(0.0) is None
        ran(grown, number, 100 * number)
        grown.over(s(number))
    assert grown.tokens(0.0) == pytest.approx(100 * (OVER_LEAST - 1) / 2)


def test_who_still_runs_says_that_it_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weeks of remission under 6-MP of Freireich et al. (1963), 21 patients of whom 9 relapsed,
    as every text on survival analysis has them: restricted to 35 weeks their mean is 23.29 (R's
    survfit gives 23.29 with rmean=35)."""
    monkeypatch.setattr(growth, "OVER_LEAST", 9)
    relapsed = (6, 6, 6, 7, 10, 13, 16, 22, 23)
    censored = (6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35)
    grown = SessionGrowth()
    for number, weeks in enumerate((*relapsed, *censored)):
        ran(grown, number, weeks)
    for number in range(len(relapsed)):
        grown.over(s(number))
    mean = grown.tokens(0.0)
    assert mean is not None
    assert isclose(mean, 23.29, abs_tol=0.005)


def test_who_is_away_for_long_counts_as_over_until_it_is_back() -> None:
    grown = SessionGrowth()
    for number in range(OVER_LEAST):
        ran(grown, number, 500, now_s=10.0)
    assert grown.tokens(10.0) is None
    assert grown.tokens(10.0 + LONGEST_GAP_S) == pytest.approx(500.0)
    grown.began(s(0), 2000)
    assert grown.tokens(10.0 + LONGEST_GAP_S) is None


def test_only_the_last_sessions_that_began_are_remembered() -> None:
    grown = SessionGrowth()
    for number in range(2 * SESSIONS_KEPT):
        ran(grown, number, 8000 if number < SESSIONS_KEPT else 10)
        grown.over(s(number))
    assert grown.tokens(0.0) == pytest.approx(10.0)


def test_seats_count_new_sessions_for_what_those_before_grew_to() -> None:
    """Four sessions of 20,000 tokens enter while each is taken to grow by 40,000, and eight once it
    is known that they don't."""
    memory = Profile(speed=PLAIN.speed, kv_bytes_total=1000 * 200_000)
    fleet = fleet_of(memory, memory)
    for worker in fleet:
        load(worker, sequences=1)
    room = SessionAdmission(fleet, SeatSettings())
    assert room.growth_tokens == 12_500, "a sixteenth of a worker's memory"
    for number in range(OVER_LEAST):
        assert room.ask(s(number), 20_000, parent=None, now_s=number) == ENTER
        room.ended(s(number), 60_000, now_s=number)
        room.over(s(number))
    entered = 0
    while room.ask(s(f"new {entered}"), 20_000, parent=None, now_s=100.0) == ENTER:
        entered += 1
    assert room.growth_tokens == 40_000
    assert entered == 400_000 // 60_000
    room.check()


def test_growth_is_assumed_where_no_worker_says_its_memory() -> None:
    assert SessionAdmission(fleet_of(PLAIN)).growth_tokens == GROWTH_ASSUMED_TOKENS
