"""Runs by cell: what was run before is not run again.

A cell is one contender in one case under one perturbation. Its line in the folder's `cells.jsonl`
bears a digest of its setup, of its sessions and of the code that decides: with other code or
defaults it is another cell. Lines are whole or ignored, so an end at any time loses one run a core.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import ownerserve
from goal.contenders import setup_of
from goal.families import Case
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.pool import Told, run_tasks
from ownerserve.sim.run import simulate
from ownerserve.sim.suites.goal import while_full
from ownerserve.trace.model import Trace

DECIDE = ("cache", "directory", "kv", "node", "plan", "router", "sim", "transfer")
"""Folders of the package on which a run's result depends, beside its trace."""


class Cell(msgspec.Struct, frozen=True):
    """A cell is one run, and what came of it."""

    key: str
    family: str
    load: str
    lanes: int
    contender: str
    draw: int
    perturbation: int
    metrics: dict[str, Any]


class Wanted(msgspec.Struct, frozen=True):
    """A wanted cell has its setup and its sessions."""

    case: Case
    contender: str
    perturbation: int
    setup: SimSetup
    trace: Trace
    key: str


def code_digest() -> str:
    """Return a digest of the code that decides."""
    digest, root = hashlib.sha256(), Path(ownerserve.__file__).parent
    for folder in DECIDE:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def trace_digest(trace: Trace) -> str:
    """Return a digest of the sessions."""
    return hashlib.sha256(msgspec.json.encode(trace.sessions)).hexdigest()[:16]


def wanted(
    case: Case, contender: str, perturbation: int, *, trace: Trace, digests: Iterable[str]
) -> Wanted:
    """Return the cell that is to be had; `digests` are those of the code and of the sessions."""
    setup = setup_of(contender, case, perturbation)
    said = msgspec.json.encode([setup, *digests, case])
    key = hashlib.sha256(said).hexdigest()[:24]
    return Wanted(case, contender, perturbation, setup, trace, key)


def had(path: Path) -> dict[str, Cell]:
    """Return the cells that the file holds, by key."""
    found: dict[str, Cell] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            cell = msgspec.json.decode(line, type=Cell)
        except msgspec.DecodeError:
            continue  # cut off by an end amid its writing
        found[cell.key] = cell
    return found


def run(
    cells: Mapping[str, Wanted], path: Path, *, processes: int, told: Any = None
) -> Iterator[Cell]:
    """Run the cells and yield each, written to the file. Raises what a run raised."""
    tasks = {key: partial(_run, one.trace, one.setup) for key, one in cells.items()}
    with path.open("ab") as lines:
        lines.write(b"\n")  # behind a line that was cut off
        for ended in run_tasks(tasks, processes=processes, progress=told):
            if ended.error is not None:
                raise ended.error
            one = cells[ended.name]
            case = one.case
            cell = Cell(
                one.key, case.family, case.load, case.lanes, one.contender, case.draw,
                one.perturbation, ended.answer,
            )  # fmt: skip
            lines.write(msgspec.json.encode(cell) + b"\n")
            lines.flush()
            yield cell


def _run(trace: Trace, setup: SimSetup, told: Told) -> dict[str, Any]:
    return while_full(simulate(trace, setup, told))
