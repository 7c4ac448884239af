"""How long an idle session keeps its seat: long where engines are busy, short where they idle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.router.entry.stay import RETURNS_LEAST, TURNS_LEAST, IdleStay, _load
from tests.support.examples import examples

LONGEST_S = 300.0
GAPS_S = [3.0] * 6 + [30.0] * 2 + [100.0, 200.0]
"""Of ten gaps."""
TOKENS = 100_000
REFILL_S = 5.0
ENGINES = 4


def seen(
    stay: IdleStay, *, engine_s: float, windows: int = 20, refilled_s: float | None = None
) -> IdleStay:
    """Let sessions come and go for some windows of turns, of each of which an engine is busy for
    `engine_s` beside what it brings back; `refilled_s`: of each return beyond the stay in force."""
    for _ in range(windows):
        brought_s = 0.0
        for turn in range(TURNS_LEAST):
            gap_s = GAPS_S[turn % len(GAPS_S)]
            stay.came_back(gap_s, TOKENS, REFILL_S)
            cost_s = REFILL_S if refilled_s is None else refilled_s
            lost_s = cost_s if gap_s > stay.seconds else 0.0
            stay.answered(2.0, lost_s)
            brought_s += lost_s
        stay.ran(engine_s * TURNS_LEAST + brought_s)
        stay.decide(2_900_000.0, ENGINES)
    return stay


def test_it_is_the_longest_until_enough_was_seen() -> None:
    stay = IdleStay(LONGEST_S)
    for _ in range(RETURNS_LEAST - 1):
        stay.came_back(3.0, TOKENS, REFILL_S)
    stay.ran(10.0)
    stay.decide(2_900_000.0, ENGINES)
    assert stay.seconds == LONGEST_S


def test_idle_engines_shorten_it_and_busy_ones_do_not() -> None:
    """29 sessions fit. With engines that a turn takes 0.5 s, who is away for minutes gives his
    memory to somebody; at 12 s a turn the four engines are all that anybody waits for."""
    idle, busy = (seen(IdleStay(LONGEST_S), engine_s=engine_s) for engine_s in (0.5, 12.0))
    assert 3.0 <= idle.seconds < 100.0
    assert busy.seconds == LONGEST_S


def test_it_is_no_shorter_than_is_set() -> None:
    bounded, fixed = (
        seen(IdleStay(LONGEST_S, least_s=least_s), engine_s=0.5) for least_s in (60.0, LONGEST_S)
    )
    assert bounded.seconds == 60.0
    assert fixed.seconds == LONGEST_S


def test_more_memory_needs_no_shorter_one() -> None:
    """Where all fit, nothing is won by letting anybody go."""
    stay = seen(IdleStay(LONGEST_S), engine_s=0.5)
    stay.decide(1e12, ENGINES)
    assert stay.seconds == LONGEST_S


def test_it_is_longer_where_more_is_brought_back_than_was_foretold() -> None:
    """Memory thrashes already: each return costs four times what was foretold."""
    foretold = seen(IdleStay(LONGEST_S), engine_s=2.0)
    worse = seen(IdleStay(LONGEST_S), engine_s=2.0, refilled_s=4.0 * REFILL_S)
    assert foretold.seconds < worse.seconds


def test_a_context_that_takes_much_of_a_worker_keeps_the_longest() -> None:
    stay = seen(IdleStay(LONGEST_S), engine_s=0.5)
    stay.came_back(3.0, 300_000, 20.0)
    stay.decide(2_900_000.0, ENGINES)
    assert stay.seconds == LONGEST_S


def test_a_fleet_that_does_not_say_how_busy_it_is_keeps_the_longest() -> None:
    stay = seen(IdleStay(LONGEST_S), engine_s=0.5)
    assert stay.seconds < LONGEST_S
    stay.decide(0.0, 0)
    assert stay.seconds == LONGEST_S


@given(held=st.floats(1.0, 1e9), waiting=st.floats(1.0, 1e8), memory=st.floats(1.0, 1e9))
@settings(max_examples=examples(200), deadline=None)
def test_the_load_solves_its_equation(held: float, waiting: float, memory: float) -> None:
    load = _load(held, waiting, memory)
    assert 0.0 < load <= 1.0
    if load < 1.0 - 1e-6:
        filled = load * held + waiting * load**2 / (1.0 - load)
        assert filled == pytest.approx(memory, rel=1e-3)
