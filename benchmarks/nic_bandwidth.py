"""What more NIC bandwidth does to a fleet's work and its turns' p95: it must never cost any.

    python benchmarks/nic_bandwidth.py --traces FOLDER [--aiperf FILE] [--draws 10] [--json FILE]

Simulated: four H200 with Qwen3-30B-A3B, device memory alone, `ownerserve` behind its door, or with
`--seats none` without, 64 sessions of which 24 or 48 are open at once. `--aiperf`: sessions that
`aiperf synthesize agentic-code --num-sessions 200` made; its part is left out without them. Each
draw is run at each bandwidth, so that they are compared in pairs: the mean of the draws' ratios to
the run with the next smaller NIC, and to the one without, with its bootstrap 95 % interval. A NIC
of 0 GB/s brings nothing in a session's life.
`--json` is written on after each draw.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from ownerserve.router.admission import SeatSettings
from ownerserve.sim.config.setup import Links
from ownerserve.sim.run import simulate
from ownerserve.sim.suites.base import Scale
from ownerserve.sim.suites.fleet import OURS, agents
from ownerserve.sim.suites.goal import while_full
from ownerserve.sim.suites.traces import find
from ownerserve.trace.model import Trace
from ownerserve.trace.read import read_trace

NICS_GB_S = (0.0, 1.0, 12.5, 50.0, 400.0)
DEAD_GB_S = 1e-6
SESSIONS = 64
RESAMPLES = 10_000


class Case(NamedTuple):
    """A case is a workload: whose sessions, and how many at once."""

    name: str
    role: str
    lanes: int


CASES = (
    Case("claude-code, 24 at once", "claude_code", 24),
    Case("claude-code, 48 at once", "claude_code", 48),
    Case("agentic-code, 48 at once", "aiperf", 48),
    Case("generated, 48 at once", "coding_agent", 48),
)
COLUMNS = ("tasks_per_gpu_hour", "turn_p95_s", "turn_mean_s", "network_kv_bytes")


DOORS = {"shipped": SeatSettings(), "none": None}


def measure(case: Case, trace: Trace, nic_gb_s: float, *, seed: int, door: str) -> dict[str, float]:
    """Return what one run did."""
    links = Links(nic_gb_s=nic_gb_s or DEAD_GB_S)
    setup = agents(OURS, Scale.FULL, lanes=case.lanes, sessions=SESSIONS, seed=seed, links=links)
    setup = msgspec.structs.replace(setup, seats=DOORS[door])
    kept = while_full(simulate(trace, setup))
    return {name: kept[name] or 0.0 for name in COLUMNS}


def traces_of(options: argparse.Namespace) -> Iterator[tuple[Case, Trace]]:
    """Yield the cases whose sessions are to be had, with them."""
    for case in CASES:
        if case.role != "aiperf":
            yield case, find(case.role, options.traces, Scale.FULL)[0]
        elif options.aiperf is not None:
            yield case, read_trace(options.aiperf)


def ratio(numbers: Sequence[float], others: Sequence[float]) -> str:
    """Return the mean of the pairs' ratios less one, in per cent, with its 95 % interval."""
    gains = np.asarray(numbers) / np.asarray(others) - 1.0
    drawn = np.random.default_rng(1).choice(gains, (RESAMPLES, len(gains))).mean(axis=1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return f"{gains.mean():+.1%} [{low:+.1%}, {high:+.1%}]"


def show(console: Console, case: Case, runs: dict[float, list[dict[str, float]]]) -> None:
    """Print the table of one case."""
    table = Table("NIC GB/s", "work", "turn p95 s", "turn mean s", "network TB",
                  "work over the smaller NIC", "p95", "work over none", "p95")  # fmt: skip
    table.title = f"{case.name}: {len(runs[0.0])} draws"
    by = {nic: {name: [run[name] for run in done] for name in COLUMNS}
          for nic, done in runs.items()}  # fmt: skip
    smaller = {high: low for low, high in pairwise(runs)}
    for nic, found in by.items():
        work, p95, mean_s, network = (float(np.mean(found[name])) for name in COLUMNS)
        row = [f"{nic:g}", f"{work:.2f}", f"{p95:.0f}", f"{mean_s:.1f}", f"{network / 1e12:.2f}"]
        for other in (smaller.get(nic), 0.0 if nic else None):
            row += [
                "" if other is None else ratio(found[name], by[other][name]) for name in COLUMNS[:2]
            ]
        table.add_row(*row)
    console.print(table)


def main() -> None:
    """Run all cases, print their tables, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--aiperf", type=Path)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--first-draw", type=int, default=1)
    parser.add_argument("--seats", choices=tuple(DOORS), default="shipped")
    parser.add_argument("--case", action="append", help="only the case of this name; several times")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, told = Console(width=180), list[dict[str, Any]]()
    for case, trace in traces_of(options):
        if options.case and case.name not in options.case:
            continue
        runs: dict[float, list[dict[str, float]]] = {nic: [] for nic in NICS_GB_S}
        for seed in range(options.first_draw, options.first_draw + options.draws):
            for nic in NICS_GB_S:
                runs[nic].append(measure(case, trace, nic, seed=seed, door=options.seats))
                told.append({"case": case.name, "seed": seed, "nic_gb_s": nic, **runs[nic][-1]})
            if options.json is not None:
                options.json.write_bytes(msgspec.json.format(msgspec.json.encode(told)))
        show(console, case, runs)


if __name__ == "__main__":
    main()
