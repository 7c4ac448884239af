"""This module shows what `ownerserve transfer` found: which roads are open, how fast each is."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table


class RoadState(StrEnum):
    """A road's state: `open`: bytes came by it, or an answer; `closed`: tried, and not open;
    `absent`: not installed."""

    OPEN = "open"
    CLOSED = "closed"
    ABSENT = "absent"


class RoadFound(msgspec.Struct, frozen=True):
    """What was found of a road, the mend where there is one to make, and what a question and its
    answer take, where that was measured."""

    road: str
    state: RoadState
    found: str
    mend: str = ""
    round_trip_ms: float | None = None


class RoadSpeed(msgspec.Struct, frozen=True):
    """How fast a shape came by a road: the median of all samples, in GB (10^9 bytes) a second and
    CPU seconds a GB, the slowest and the fastest sample, and the rate's share of memcpy's."""

    shape: str
    bytes: int
    road: str
    gb_s: float
    slowest_gb_s: float
    fastest_gb_s: float
    cpu_s_per_gb: float
    of_memcpy: float


COLOURS = {RoadState.OPEN: "green", RoadState.CLOSED: "red", RoadState.ABSENT: "dim"}


def show_roads(roads: Sequence[RoadFound], console: Console) -> None:
    """Print the roads as a table, each with its mend."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "road", "found"):
        table.add_column(heading, overflow="fold")
    for road in roads:
        colour = COLOURS[road.state]
        mend = f"\n[{colour}]mend:[/] {escape(road.mend)}" if road.mend else ""
        table.add_row(f"[{colour}]{road.state}[/]", road.road, f"{escape(road.found)}{mend}")
    console.print(table)


def show_speeds(speeds: Sequence[RoadSpeed], console: Console) -> None:
    """Print the speeds as a table, shape by shape."""
    table = Table("size", "by", title="xxh3 checked; medians", title_justify="left")
    for heading in ("GB/s", "range", "of memcpy", "CPU s/GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for shape, rows in groupby(speeds, key=lambda speed: speed.shape):
        for number, row in enumerate(rows):
            table.add_row(
                "" if number else shape,
                row.road,
                f"{row.gb_s:.2f}",
                f"{row.slowest_gb_s:.2f}-{row.fastest_gb_s:.2f}",
                f"{row.of_memcpy:.2f}",
                f"{row.cpu_s_per_gb:.2f}",
            )
        table.add_section()
    console.print(table)
