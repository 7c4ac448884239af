"""This module measures migrations: how often, how long, were they right, did they repeat (seed 002
§5.6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ownerserve.sim.metrics.counters import Migration
from ownerserve.sim.metrics.spreads import Metric, ratio, spread

THRASH_WINDOW_S = 300.0
"""Two moves of one conversation within five minutes are one too many, whatever T_cool forbids: a
window that followed T_cool could find no run in which it is broken."""


def migration_metrics(
    table: NDArray[Any],
    migrations: Sequence[Migration],
    *,
    hot_ms: float,
    next_turns: int,
) -> dict[str, Metric]:
    """Return the metrics of completed moves; `given_up` alone counts the others.

    `table`: every turn of the run. A move takes as long as its transfer, wait for room included;
    the turn that asked for it goes on after that.
    """
    done = [move for move in migrations if move.completed]
    took = np.array([(move.landed_s - move.decided_s) * 1e3 for move in done])
    return {
        "count": len(done),
        "given_up": len(migrations) - len(done),
        "rate": ratio(len(done), len(table)),
        "mean_ms": float(took.mean()) if done else None,
        "ms": spread(took),
        "bytes": sum(move.bytes for move in done),
        "accuracy": _accuracy(table, done, hot_ms=hot_ms, next_turns=next_turns),
        "thrash_rate": _thrash_rate(done),
    }


def _accuracy(
    table: NDArray[Any], done: Sequence[Migration], *, hot_ms: float, next_turns: int
) -> float | None:
    """Return the share of the moves, among those that a turn followed, whose target was not hot for
    any of the next `next_turns` turns that the session sent there."""
    movers = {move.session for move in done}
    moved = table[np.isin(table["session"], sorted(movers))]
    moved = moved[np.lexsort((moved["arrived_s"], moved["session"]))]
    arrived_s, owner = moved["arrived_s"].copy(), moved["owner"].copy()
    is_calm = moved["owner_wait_ms"] <= hot_ms
    wanted = np.array([move.session for move in done], dtype=np.int64)
    sessions = moved["session"].copy()  # columns of their own: each look is at a few rows
    firsts, lasts = np.searchsorted(sessions, wanted), np.searchsorted(sessions, wanted + 1)
    right = judged = 0
    for move, first, last in zip(done, firsts.tolist(), lasts.tolist(), strict=True):
        first += int(np.searchsorted(arrived_s[first:last], move.done_s))
        own = is_calm[first:last][owner[first:last] == move.target][:next_turns]
        judged += len(own) > 0
        right += len(own) > 0 and bool(own.all())
    return ratio(right, judged)


def _thrash_rate(done: Sequence[Migration]) -> float | None:
    """Return the share of the conversations that moved which moved again within THRASH_WINDOW_S."""
    times: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for move in done:
        times[move.session, move.conversation].append(move.decided_s)
    again = sum(
        any(later - earlier < THRASH_WINDOW_S for earlier, later in pairwise(at))
        for at in map(sorted, times.values())
    )
    return ratio(again, len(times))
