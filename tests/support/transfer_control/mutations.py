"""Each check of transfer's control, taken out: what stands there instead when it is missing.

    python -m tests.support.transfer_control.mutations [SEEDS]     which seed first misses each

The machines' own `check` is taken out too, so that it is the schedules which notice: by bytes,
slots, tickets and deadlines. With digests that were made while the ticket stood, wrong bytes are
found without a second look at the ticket; what shows when that look is missing is that nobody took
it, and not the bytes. Not in the list is what only a peer that lies would show (pieces that
nobody asked for, ranks that are not served), and what costs time and nothing else (backoff, the
silent peer, what is told at the end): test_target.py has them as scenarios.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from math import inf
from typing import Any, NamedTuple
from unittest.mock import patch

from ownerserve.cache.lends import Lends
from ownerserve.kv.errors import OwnerServeError
from ownerserve.transfer.control import source
from ownerserve.transfer.control.bring import BringPart, OpenBring
from ownerserve.transfer.control.events import ReadGoal
from ownerserve.transfer.control.rooms import BringRooms, ReadOutcome
from ownerserve.transfer.control.source import TransferSource
from ownerserve.transfer.control.target import TransferTarget
from ownerserve.transfer.vocabulary import Ended, ReadFailed, ReadUnproven
from tests.support.transfer_control.world import play


def yes(*_: object) -> bool:
    return True


def no(*_: object) -> bool:
    return False


def nothing(*_: object) -> None:
    return None


def never(*_: object) -> float:
    return inf


def into_blocks(*_: object) -> ReadGoal:
    return ReadGoal.BLOCKS


ended = BringRooms.ended


def as_if_proven(rooms: BringRooms, event: Ended) -> ReadOutcome:
    """A read that failed has no writer, whatever its mover says."""
    if isinstance(event, ReadUnproven):
        event = ReadFailed(event.number, event.reason)
    return ended(rooms, event)


class Instead(NamedTuple):
    """Check `name` of `where`, replaced."""

    where: Any
    name: str
    by: Callable[..., Any] | property | float


MUTATIONS = (
    # What is lent
    Instead(TransferSource, "_is_after", yes),  # the ticket was asked after the digests were made
    Instead(TransferSource, "_counts_for", yes),  # ... and after the question came
    Instead(TransferSource, "_is_of", yes),  # the reader's own ticket, of this life
    Instead(TransferSource, "_is_cancelled", no),
    Instead(TransferSource, "_tell", nothing),  # a nonce has one answer
    Instead(source, "IDLE_S", inf),
    Instead(Lends, "read", yes),  # what the answers rest on
    # What is brought
    Instead(TransferTarget, "_is_seen", yes),  # the ticket is asked for after unseen reads
    Instead(OpenBring, "slow_s", never),
    Instead(BringPart, "has_all", property(lambda part: not part.cover.missing)),
    Instead(BringPart, "has_all", property(lambda part: not part.open_tasks)),
    Instead(BringRooms, "_is_given_up", no),
    Instead(BringRooms, "_is_quiet", yes),
    Instead(BringRooms, "_writes", nothing),
    Instead(BringRooms, "_goal", into_blocks),
    Instead(BringRooms, "ended", as_if_proven),
    Instead(BringRooms, "has_credit", yes),
)


def name_of(mutation: Instead) -> str:
    return f"{mutation.where.__name__.rsplit('.', 1)[-1]}.{mutation.name}"


class Caught(NamedTuple):
    """The schedule that missed the check, and what went wrong in it."""

    seed: int
    problem: str


LATE = {
    "TransferSource._is_after": 589,
    "TransferSource._is_of": 441,
}
"""Removals that the first schedules do not miss, and a schedule that does."""


def likely_first(mutation: Instead, seeds: int) -> Iterator[int]:
    """`seeds` schedules, the one that is known to miss the check before the others."""
    if name_of(mutation) in LATE:
        yield LATE[name_of(mutation)]
    yield from range(seeds)


def first_caught(mutation: Instead, seeds: Iterable[int]) -> Caught | None:
    """The first of `seeds` on which the missing check shows; None when it never does."""
    with ExitStack() as patched:
        for where in (TransferSource, TransferTarget):
            patched.enter_context(patch.object(where, "check", nothing))
        patched.enter_context(patch.object(mutation.where, mutation.name, mutation.by))
        for seed in seeds:
            try:
                play(seed)
            except (AssertionError, OwnerServeError, LookupError, ValueError) as error:
                return Caught(seed, str(error))
    return None


if __name__ == "__main__":
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for one in MUTATIONS:
        print(f"{name_of(one)}: {first_caught(one, range(limit))}", flush=True)
