"""This module says how measurements become a verdict: one place for the rules that experiments
share.

Owns no claim. Each rule can say all four verdicts: a claim that no measurement could refute is no
claim, and one for which the run had nothing to measure is "not shown", never "holds".
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.report.page import Verdict


def all_of(parts: Sequence[bool]) -> Verdict:
    """Return that the claim holds when all parts are so, in a range when some are; not shown
    without parts."""
    return counted(sum(parts), len(parts))


def counted(won: int, of: int) -> Verdict:
    """Return that the claim holds when all `of` parts were `won`, in a range when some were; not
    shown for no parts."""
    if not of:
        return Verdict.NOT_SHOWN
    if won == of:
        return Verdict.HOLDS
    return Verdict.IN_RANGE if won else Verdict.FAILS


def first_of(holds: bool, partly: bool) -> Verdict:  # noqa: FBT001
    """Return the best grade whose condition is met."""
    if holds:
        return Verdict.HOLDS
    return Verdict.IN_RANGE if partly else Verdict.FAILS


def smaller(ratio: float, *, holds: float, partly: float) -> Verdict:
    """Judge by how much a value is smaller: a ratio below `holds` holds, below `partly` in a
    range."""
    return first_of(ratio < holds, ratio < partly)


def larger(ratio: float, *, holds: float, partly: float) -> Verdict:
    """Judge by how much a value is larger: a ratio from `holds` on holds, from `partly` on in a
    range."""
    return first_of(ratio >= holds, ratio >= partly)
