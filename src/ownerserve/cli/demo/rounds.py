"""This module says in which order the demo's policies run, so that none has the better of it. Pure.

    round 1    A  B  ours  C  D
    round 2    D  C  ours  B  A        and so on, there and back

A machine warms up, or is asked for something else: with two rounds all policies run at the same
time on average. Ours is never the last of a round where another one is there to be.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.cli.demo.fleets import PD_HYBRID

OURS = ("ownerserve", PD_HYBRID)


def rounds_of(policies: Sequence[str], repeats: int) -> list[tuple[str, ...]]:
    """Return which policies run in each round, all of them once, in their order."""
    there = tuple(dict.fromkeys(policies))
    return [_without_us_last(there[:: -1 if number % 2 else 1]) for number in range(repeats)]


def _without_us_last(order: tuple[str, ...]) -> tuple[str, ...]:
    """Return the order with the last policy that is not ours behind those of ours that were."""
    last = next((at for at in reversed(range(len(order))) if order[at] not in OURS), None)
    if last is None:
        return order
    return (*order[:last], *order[last + 1 :], order[last])
