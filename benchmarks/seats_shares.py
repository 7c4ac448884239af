"""How much work a fleet does by the share of its memory that sessions inside may fill (seats).

    python benchmarks/seats_shares.py --traces FOLDER [--aiperf FILE] [--draws 3] [--json FILE]

Simulated: four H200 with Qwen3-30B-A3B, device memory alone, `ownerserve` above the knee. Tools as
recorded, and some times slower, so that GPUs idle while memory is short. `--aiperf`: sessions that
`aiperf synthesize agentic-code --num-sessions 200` made; its part is left out without them. Work
(tasks a GPU hour), turn p95, turn mean and first turn's mean (s) are those of the first half of all
turns, as in the experiment `goal`; a cell holds the means over the draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from goal.contenders import fixed_seats
from ownerserve.sim.run import simulate
from ownerserve.sim.suites.base import Scale
from ownerserve.sim.suites.fleet import OURS, agents
from ownerserve.sim.suites.goal import while_full
from ownerserve.sim.suites.traces import find
from ownerserve.trace.model import Trace
from ownerserve.trace.read import read_trace

SHARES = (0.8, 1.0, 1.25, 1.5, 2.0, None)
"""None: no seats."""


class Case(NamedTuple):
    """A case is a workload: whose sessions, how many at once, how slow its tools are."""

    name: str
    role: str
    lanes: int
    sessions: int
    tool_scale: float


CASES = (
    Case("claude-code", "claude_code", 48, 96, 1.0),
    Case("claude-code, tools x4", "claude_code", 84, 140, 4.0),
    Case("generated", "held_out_generated", 84, 140, 1.0),
    Case("generated, tools x6", "held_out_generated", 84, 140, 6.0),
    Case("agentic-code", "aiperf", 84, 200, 1.0),
    Case("agentic-code, tools x8", "aiperf", 84, 200, 8.0),
)
COLUMNS = ("tasks_per_gpu_hour", "turn_p95_s", "turn_mean_s", "first_turn_mean_s")


def measure(case: Case, trace: Trace, share: float | None, seed: int) -> dict[str, float]:
    """Return what one run did."""
    seats = None if share is None else fixed_seats(share)
    setup = agents(
        OURS,
        Scale.FULL,
        lanes=case.lanes,
        sessions=case.sessions,
        seed=seed,
        tool_scale=case.tool_scale,
        seats=seats,
    )
    kept = while_full(simulate(trace, setup))
    return {name: kept[name] for name in COLUMNS}


def traces_of(options: argparse.Namespace) -> Iterator[tuple[Case, Trace]]:
    """Yield the cases whose sessions are to be had, with them."""
    for case in CASES:
        if case.role != "aiperf":
            yield case, find(case.role, options.traces, Scale.FULL)[0]
        elif options.aiperf is not None:
            yield case, read_trace(options.aiperf)


def main() -> None:
    """Run all cases, print the table, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--aiperf", type=Path)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table("case", *("none" if share is None else f"{share}" for share in SHARES))
    table.title = "work / turn p95 / turn mean / first turn, by share of seats"
    found: list[dict[str, Any]] = []
    for case, trace in track(list(traces_of(options)), description="cases"):
        cells = []
        for share in SHARES:
            runs = [measure(case, trace, share, seed) for seed in range(1, options.draws + 1)]
            means = [fmean(run[name] for run in runs) for name in COLUMNS]
            cells.append(f"{means[0]:.2f} / {means[1]:.0f} / {means[2]:.0f} / {means[3]:.0f}")
            found.append({"case": case._asdict(), "share": share, "draws": runs})
        table.add_row(case.name, *cells)
    Console(width=160).print(table)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))


if __name__ == "__main__":
    main()
