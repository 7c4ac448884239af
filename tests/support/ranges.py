"""Seeded schedules, a range of them by hand: `python -m tests.SOMETHING LOW HIGH`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable

from ownerserve.kv.errors import OwnerServeError

TOLD_EVERY_S = 10.0
VIOLATIONS = (AssertionError, OwnerServeError, LookupError, ValueError)


def play_range(play: Callable[[int], Counter[str]], low: int, high: int) -> int:
    """Play a range, tell how far it is, and go on behind a violation; 1 when there was one. `play`
    returns what was in the schedule of a seed."""
    counts, failures = Counter[str](), 0
    began_s = told_s = time.monotonic()
    for seed in range(low, high):
        try:
            counts += play(seed)
        except VIOLATIONS as error:
            failures += 1
            print(f"schedule {seed}: {type(error).__name__}: {error}", flush=True)
        now_s = time.monotonic()
        if now_s - told_s >= TOLD_EVERY_S:
            told_s, done = now_s, seed + 1 - low
            left_s = (now_s - began_s) / done * (high - seed - 1)
            print(
                f"{done:,} of {high - low:,} schedules, {failures} violations, "
                f"{left_s / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )
    told = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
    print(f"{high - low:,} schedules, {failures} violations; in them: {told}")
    return 1 if failures else 0
