"""This module shows what `ownerserve doctor` found: one line a check, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Level(StrEnum):
    """A level grades a check. `warn`: works, not as well as it could. `bypassed`: the engine works,
    and nothing is kept. `fail`: does not work."""

    OK = "ok"
    WARN = "warn"
    BYPASSED = "bypassed"
    FAIL = "fail"


class CheckResult(msgspec.Struct, frozen=True):
    """A check's result says what was looked at, what was found, and the mend where there is one to
    make."""

    check: str
    level: Level
    found: str
    mend: str = ""


COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.BYPASSED: "yellow", Level.FAIL: "red"}


def worst(findings: Sequence[CheckResult]) -> Level:
    """Return the worst level of all findings; OK when there are none."""
    return max((finding.level for finding in findings), key=list(Level).index, default=Level.OK)


def show(findings: Sequence[CheckResult], console: Console) -> None:
    """Print the findings as a table for people, each with its mend."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = COLOURS[finding.level]
        mend = f"\n[{colour}]mend:[/] {escape(finding.mend)}" if finding.mend else ""
        table.add_row(
            f"[{colour}]{finding.level}[/]", finding.check, f"{escape(finding.found)}{mend}"
        )
    console.print(table)


def to_json(findings: Sequence[CheckResult]) -> dict[str, Any]:
    """Return the findings and their worst level as plain data, for programs."""
    return {
        "level": worst(findings),
        "checks": [msgspec.to_builtins(finding) for finding in findings],
    }
