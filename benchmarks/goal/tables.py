"""What came of the cells: a table a case, ratios with their intervals, and the goal's lines.

Nothing is concluded from one draw: a line *holds* only where the whole interval lies on its side.
Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from goal.cells import Cell
from goal.contenders import BELADY, BOUND, OURS, SEATS
from goal.families import ABOVE
from goal.paired import paired
from ownerserve.report.page import Verdict
from ownerserve.sim.suites.base import at
from ownerserve.sim.suites.draws import Compared, inverse

COLUMNS = {
    "work (tasks / GPU h)": "tasks_per_gpu_hour",
    "turn mean (s)": "turn_mean_s",
    "p95 (s)": "turn_p95_s",
    "p99 (s)": "turn_p99_s",
    "first turn (s)": "first_turn_mean_s",
    "longest first (s)": "first_turn_longest_s",
    "session (s)": "session_mean_s",
    "longest hold (s)": "held_longest_s",
    "network (TB)": "network_kv_bytes",
    "served": "success_rate",
}
SCALE = {"network_kv_bytes": 1e-12}
WORK, MEAN, P95, SESSION = "tasks_per_gpu_hour", "turn_mean_s", "turn_p95_s", "session_mean_s"
LEAST_WORK, MORE_WORK = 0.98, 1.05
"""Goal (a): no interval begins below the first, one above the knee lies above the second."""
HELD_MOST_S = 600.0
DUPLICATES_MOST = 0.05
NEAR_REFERENCE = 0.90
BEATEN = 1.01

By = Mapping[int, Mapping[int, Cell]]
"""A contender's cells in a case: by draw, by perturbation."""


class Table(NamedTuple):
    """A table has all contenders of one family at one load."""

    family: str
    load: str
    contenders: Mapping[str, By]

    def values(self, contender: str, path: str, *, beside: str) -> list[list[float]]:
        """Return a metric by draw and perturbation, of the cells that `beside` has too."""
        found = []
        theirs = self.contenders[beside]
        for draw, cells in sorted(self.contenders[contender].items()):
            shared = sorted(cells.keys() & theirs.get(draw, {}).keys())
            if shared:
                found.append([at(cells[one].metrics, path) or 0.0 for one in shared])
        return found

    def mean(self, contender: str, path: str) -> float:
        """Return the mean of draws' means."""
        values = self.values(contender, path, beside=contender)
        return SCALE.get(path, 1.0) * fmean(fmean(one) for one in values)

    def ratio(self, ours: str, theirs: str, path: str) -> Compared:
        """Return ours over theirs with its interval."""
        pair = (
            self.values(ours, path, beside=theirs),
            self.values(theirs, path, beside=ours),
        )
        return paired(*pair)

    def best(self, names: Iterable[str], path: str) -> str | None:
        """Return whose mean is best: the most work, the least of anything else."""
        sign = -1 if path == WORK else 1
        return min(names, key=lambda name: sign * self.mean(name, path), default=None)

    @property
    def lanes(self) -> str:
        """How many sessions were open at once, over the draws."""
        by_draw = (by for by in self.contenders.values())
        cells = (cell for draws in by_draw for cells in draws.values() for cell in cells.values())
        lanes = sorted({cell.lanes for cell in cells})
        return f"{lanes[0]}" if len(lanes) == 1 else f"{lanes[0]} to {lanes[-1]}"

    @property
    def rivals(self) -> list[str]:
        """Whoever is neither ours, nor ours with a part taken away, nor told the future."""
        names = (name for name in self.contenders if name != BOUND and not told(name))
        return [name for name in names if name.partition(", ")[0] != OURS]


def told(name: str) -> bool:
    """Return whether the contender knows what is to come."""
    return name.endswith(BELADY)


def tables(cells: Iterable[Cell]) -> list[Table]:
    """Return the tables of the cells, in their order."""
    found: dict[tuple[str, str], dict[str, dict[int, dict[int, Cell]]]] = defaultdict(dict)
    for cell in cells:
        contenders = found[cell.family, cell.load]
        contenders.setdefault(cell.contender, {}).setdefault(cell.draw, {})[cell.perturbation] = (
            cell
        )
    return [Table(family, load, contenders) for (family, load), contenders in found.items()]


def rows(table: Table) -> list[list[str | float]]:
    """Return a row a contender: means over draws, and ours over its work with the interval."""
    found = list[list[str | float]]()
    for name in table.contenders:
        ratio = ""
        if OURS in table.contenders and name != OURS:
            ratio = str(table.ratio(OURS, name, WORK))
        cells = (table.mean(name, path) for path in COLUMNS.values())
        found.append([name, *cells, ratio])
    return found


class Line(NamedTuple):
    """A line of the goal in one case: what was measured, and whether it holds."""

    family: str
    load: str
    goal: str
    verdict: Verdict
    number: str


def lines(table: Table) -> list[Line]:
    """Return the goal's lines in this case; none without ours."""
    if OURS not in table.contenders:
        return []
    found: list[Line] = []

    def say(goal: str, verdict: Verdict, number: str) -> None:
        found.append(Line(table.family, table.load, goal, verdict, number))

    rivals = table.rivals
    if rivals:
        best = table.best(rivals, WORK) or ""
        ratio = table.ratio(OURS, best, WORK)
        say("a: work >= the best rival's - 2 %", _above(ratio, LEAST_WORK), f"{ratio} of {best}")
        if table.load in ABOVE:
            say("a: work > the best rival's + 5 %", _above(ratio, MORE_WORK), f"{ratio} of {best}")
        for path, what in ((MEAN, "turn mean"), (SESSION, "session time")):
            if table.load not in ABOVE:
                best = table.best(rivals, path) or ""
                ratio = inverse(table.ratio(OURS, best, path))
                number = f"theirs over ours {ratio}, {best}"
                say(f"b: {what} <= the best rival's", _above(ratio, LEAST_WORK), number)
        unseated = [name for name in rivals if SEATS not in name]
        best = table.best(unseated, P95)
        if best is not None:
            ratio = inverse(table.ratio(OURS, best, P95))
            number = f"theirs over ours {ratio}, {best}"
            say("c: turn p95 <= every unseated rival's", _above(ratio, 1.0), number)
    held_s = max(_all(table, "held_longest_s"))
    say("held turns wait <= 600 s", _is(held_s <= HELD_MOST_S), f"{held_s:.0f} s")
    share = max(_all(table, "avoidable_duplicate_share"))
    say("avoidable duplicates <= 5 %", _is(share <= DUPLICATES_MOST), f"{share:.2%}")
    reference = table.best([name for name in table.contenders if told(name)], WORK)
    if reference is not None:
        ratio = table.ratio(OURS, reference, WORK)
        number = f"{ratio} of {reference}"
        say("within 10 % of the reference in work", _above(ratio, NEAR_REFERENCE), number)
    return found


def beats_reference(table: Table) -> list[str]:
    """Return who does over 1 % more work than the reference, surely: it is none, then."""
    reference = table.best([name for name in table.contenders if told(name)], WORK)
    if reference is None:
        return []
    names = [OURS, *table.rivals] if OURS in table.contenders else table.rivals
    ratios = ((name, table.ratio(name, reference, WORK)) for name in names)
    return [f"{name}: {ratio} of {reference}" for name, ratio in ratios if ratio.low > BEATEN]


def _all(table: Table, path: str) -> Sequence[float]:
    values = table.values(OURS, path, beside=OURS)
    return [one for by_draw in values for one in by_draw]


def _is(holds: bool) -> Verdict:  # noqa: FBT001
    return Verdict.HOLDS if holds else Verdict.FAILS


def _above(ratio: Compared, least: float) -> Verdict:
    if ratio.low >= least:
        return Verdict.HOLDS
    return Verdict.FAILS if ratio.high < least else Verdict.NOT_SHOWN
