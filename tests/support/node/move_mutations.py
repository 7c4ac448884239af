"""Each check that moves rest on, taken out: what stands there instead when it is missing.

python -m tests.support.node.move_mutations [SEEDS]     which seed first misses each check

Not in the list is what some tens of schedules did not miss: a hand-over under an epoch of before, a
lease that is over, and one that is counted from its answer, which tests/support/directory's
schedules miss; a word that is done again when it is repeated (engines/hf/test_moves.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

from ownerserve.directory.owner.state import OwnerState
from ownerserve.kv.wire.rpc import HandOver, Reject
from ownerserve.node.ownership.ownership import MoveTold, Ownership
from ownerserve.node.runtime.comings import Comings
from ownerserve.node.transfers.moves import LeavingSessions, Takes
from tests.support.node.schedules.moving_node import MovingNode
from tests.support.node.schedules.moving_world import play
from tests.support.ranges import VIOLATIONS


def yes(*_: object) -> bool:
    return True


def no(*_: object) -> bool:
    return False


def nothing(*_: object, **__: object) -> None:
    return None


def nobody(*_: object) -> list[object]:
    return []


def from_receipt(owner: OwnerState, _ask: object, lease_s: float, now_s: float) -> float:
    return now_s + lease_s


def any_version(owner: Ownership, asked: HandOver, told: MoveTold) -> Reject | None:
    """Whatever the version is that the target has."""
    grant = owner.owner.grants.get(asked.session_id)
    version = asked.version if grant is None else grant.version
    return hand_over(owner, HandOver(asked.session_id, version, asked.target, asked.epoch), told)


hand_over = Ownership.hand_over


class Instead(NamedTuple):
    """Check `name` of `where`, replaced."""

    where: Any
    name: str
    by: Callable[..., Any]


class Mutation(NamedTuple):
    """What is missing at the same time."""

    name: str
    missing: tuple[Instead, ...]


def without(*missing: Instead) -> Mutation:
    return Mutation(" + ".join(one.name for one in missing), missing)


MUTATIONS = (
    # The source's
    without(Instead(MovingNode, "is_live", no)),
    without(Instead(Ownership, "hand_over", any_version)),
    without(Instead(LeavingSessions, "_let_go", nothing)),
    without(Instead(OwnerState, "_stop_serving", nothing)),
    # The target's
    without(Instead(Ownership, "moved_here", nothing)),
    without(Instead(Takes, "_install", lambda *_: 0)),
    without(Instead(Comings, "ended", nothing)),
)


class Caught(NamedTuple):
    """The schedule that missed the check, and what went wrong in it."""

    seed: int
    problem: str


FIRST = {
    "is_live": 1,
    "hand_over": 1,
    "_let_go": 3,
    "_stop_serving": 8,
    "moved_here": 9,
    "_install": 1,
    "ended": 0,
}
"""Schedules that are known to miss a removal: they are played before the others."""


def likely_first(mutation: Mutation, seeds: int) -> Iterator[int]:
    """`seeds` schedules, the one that is known to miss the check before the others."""
    if mutation.name in FIRST:
        yield FIRST[mutation.name]
    yield from range(seeds)


def first_caught(mutation: Mutation, seeds: Iterable[int]) -> Caught | None:
    """The first of `seeds` on which the missing check shows; None when it never does."""
    with ExitStack() as patched:
        for where, name, by in mutation.missing:
            patched.enter_context(patch.object(where, name, by))
        for seed in seeds:
            try:
                play(seed)
            except VIOLATIONS as error:
                return Caught(seed, str(error))
    return None


if __name__ == "__main__":
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for one in MUTATIONS:
        print(f"{one.name}: {first_caught(one, range(limit))}", flush=True)
