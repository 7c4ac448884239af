"""Seeded random schedules: everything may happen, in any order, and no invariant breaks.

A few hundred here; ten thousand with `-m slow`, or any range by hand:

    python -m tests.cache.test_schedules 0 10000
"""

from __future__ import annotations

import random
import sys

import pytest

from tests.support.cache.cache_play import Play
from tests.support.examples import examples

STEPS = 40


def play(seed: int) -> None:
    """One schedule; an error names its seed."""
    try:
        game = Play(random.Random(seed).randrange)
        for _ in range(STEPS):
            game.step()
        game.wind_up()
    except BaseException as error:
        error.add_note(f"schedule seed {seed}")
        raise


@pytest.mark.parametrize("first", range(0, examples(100), 25))
def test_random_schedules(first: int) -> None:
    for seed in range(first, first + 25):
        play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 500))
def test_ten_thousand_schedules(first: int) -> None:
    for seed in range(first, first + 500):
        play(seed)


if __name__ == "__main__":
    low, high = (int(word) for word in sys.argv[1:3])
    for number in range(low, high):
        play(number)
        if number % 500 == 499:
            print(f"{number + 1 - low} schedules of {STEPS} steps, no violation", flush=True)
