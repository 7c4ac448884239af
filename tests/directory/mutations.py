"""Each safety check, taken out: what stands there instead when it is missing.

python tests/directory/mutations.py [SEEDS]     which seed first misses each check
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

import fault_world
from fault_world import World, play

from ownerserve.directory import checks
from ownerserve.directory.owner import Ask, Grant, OwnerState
from ownerserve.kv.epoch import Admitted, Fence, Term
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import SessionId


def yes(*_: object) -> bool:
    return True


def no(*_: object) -> bool:
    return False


def from_receipt(owner: OwnerState, _ask: Ask, lease_s: float, now_s: float) -> float:
    return now_s + lease_s


def nothing(*_: object) -> None:
    return None


def every_answer(owner: OwnerState, number: int) -> Ask | None:
    """Answers to attempts that were given up count too."""
    owner._asks.pop(number, None)
    known: dict[int, Ask] = owner.__dict__.setdefault("_ever_asked", {})
    return known.get(number)


def remembered(original: Callable[..., Ask]) -> Callable[..., Ask]:
    def ask(owner: OwnerState, request: Any, now_s: float) -> Ask:
        one = original(owner, request, now_s)
        owner.__dict__.setdefault("_ever_asked", {})[one.number] = one
        return one

    return ask


def still_served(owner: OwnerState) -> dict[SessionId, Grant]:
    return dict(owner.grants)


def adopt_all(owner: OwnerState, _outcome: object) -> None:
    owner.grants.update(owner._carried)
    owner._carried = {}


def same_term(_world: World, above: Term | None) -> Term:
    """A directory that lost its memory goes on as if it were the first."""
    return Term(above.ordinal + 1 if above else 1, 1)


class Mutation(NamedTuple):
    """Check `name` of `where` is replaced."""

    where: Any
    name: str
    instead: Callable[..., Any]


MUTATIONS = (
    Mutation(checks, "incarnation_advances", yes),
    Mutation(checks, "is_current", yes),
    Mutation(checks, "owner_lives", no),
    Mutation(checks, "copy_counts", yes),
    Mutation(checks, "may_issue", yes),
    Mutation(checks, "owns", yes),
    Mutation(checks, "is_news", yes),
    Mutation(checks, "version_matches", yes),
    Mutation(checks, "report_is_later", yes),
    Mutation(checks, "owns_duty", yes),
    Mutation(checks, "may_drop", yes),
    Mutation(checks, "is_behind", no),
    Mutation(OwnerState, "_lease_covers", yes),
    Mutation(OwnerState, "_lease_end", from_receipt),
    Mutation(OwnerState, "_void_if_over", nothing),
    Mutation(OwnerState, "_stop_serving", nothing),
    Mutation(OwnerState, "_take", every_answer),
    Mutation(OwnerState, "_carry", still_served),
    Mutation(OwnerState, "_adopted", adopt_all),
    Mutation(Fence, "admit", lambda fence, epoch: Admitted()),
    Mutation(fault_world.World, "new_term", same_term),
)


class Caught(NamedTuple):
    """The schedule that missed the check, and what went wrong in it."""

    seed: int
    problem: str


def first_caught(mutation: Mutation, seeds: int) -> Caught | None:
    """The first seed on which the missing check shows; None when it never does."""
    ask = patch.object(OwnerState, "_ask", remembered(OwnerState._ask))
    with patch.object(mutation.where, mutation.name, mutation.instead), ask:
        for seed in range(seeds):
            try:
                play(seed)
            except (AssertionError, InvariantViolated) as error:
                return Caught(seed, str(error))
    return None


if __name__ == "__main__":
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for one in MUTATIONS:
        print(f"{one.name:24} {first_caught(one, limit)}", flush=True)
