"""How every benchmark reports: a table on the screen and benchmarks/results/NAME.json.

A row compares ours with another system measured in the same run; `ratio` above 1 means ours is
better, whichever direction is good for the metric.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"


class Row(msgspec.Struct, frozen=True):
    """One comparison. `other` None: nothing comparable; `goal` as the issue words it.

    Of several draws `ours` and `other` are the medians, and the spans hold their middle halves."""

    metric: str
    unit: str
    ours: float
    other: float | None = None
    other_name: str = ""
    ratio: float | None = None
    goal: str = ""
    ours_span: tuple[float, float] | None = None
    other_span: tuple[float, float] | None = None


def smaller_is_better(
    metric: str, unit: str, ours: float, *, other: float, other_name: str, goal: str = ""
) -> Row:
    """A row for times and bytes: ratio = other / ours."""
    return Row(metric, unit, ours, other, other_name, other / ours if ours else None, goal)


def larger_is_better(
    metric: str, unit: str, ours: float, *, other: float, other_name: str, goal: str = ""
) -> Row:
    """A row for rates and shares: ratio = ours / other."""
    return Row(metric, unit, ours, other, other_name, ours / other if other else None, goal)


def machine() -> dict[str, str | int]:
    """What this ran on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {"cpu": cpu, "cores": os.cpu_count() or 0, "system": platform.platform()}


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions of `packages`, Python's included."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def _told(value: float, span: tuple[float, float] | None) -> str:
    within = "" if span is None else f" [{span[0]:,.4g}-{span[1]:,.4g}]"
    return f"{value:,.4g}{within}"


def report(name: str, rows: Sequence[Row], *, others: Mapping[str, str] | None = None) -> Path:
    """Print the table and write the JSON; `others`: versions of what ran in other environments."""
    table = Table(title=name, title_justify="left")
    for heading in ("metric", "unit", "ours", "other", "", "ratio", "goal"):
        table.add_column(heading, justify="left" if heading in ("metric", "") else "right")
    for row in rows:
        table.add_row(
            row.metric,
            row.unit,
            _told(row.ours, row.ours_span),
            "" if row.other is None else _told(row.other, row.other_span),
            row.other_name,
            "" if row.ratio is None else f"{row.ratio:.2f}",
            row.goal,
        )
    Console().print(table)
    body = {
        "schema": f"ownerserve.benchmark.{name}/1",
        "rows": rows,
        "machine": machine(),
        "versions": {**versions(["ownerserve", "numpy", "msgspec"]), **(others or {})},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
    return path
