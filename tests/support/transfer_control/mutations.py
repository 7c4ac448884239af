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

from math import inf

from ownerserve.cache.lends import Lends
from ownerserve.transfer.control import source
from ownerserve.transfer.control.bring import BringPart, OpenBring
from ownerserve.transfer.control.events import ReadGoal
from ownerserve.transfer.control.rooms import BringRooms, ReadOutcome
from ownerserve.transfer.control.source import TransferSource
from ownerserve.transfer.control.target import TransferTarget
from ownerserve.transfer.vocabulary import Ended, ReadFailed, ReadUnproven
from tests.support.removals import Instead, Schedules, no, nothing, without, yes
from tests.support.transfer_control.world import play


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


REMOVALS = (
    # What is lent
    without(Instead(TransferSource, "_is_after", yes)),  # asked after the digests were
    without(Instead(TransferSource, "_counts_for", yes)),  # ... and after the question came
    without(Instead(TransferSource, "_is_of", yes)),  # the reader's own ticket, of this life
    without(Instead(TransferSource, "_is_cancelled", no)),
    without(Instead(TransferSource, "_tell", nothing)),  # a nonce has one answer
    without(Instead(source, "IDLE_S", inf)),
    without(Instead(Lends, "read", yes)),  # what the answers rest on
    # What is brought
    without(Instead(TransferTarget, "_is_seen", yes)),  # the ticket is asked for after unseen reads
    without(Instead(OpenBring, "slow_s", never)),
    without(Instead(BringPart, "has_all", property(lambda part: not part.cover.missing))),
    without(Instead(BringPart, "has_all", property(lambda part: not part.open_tasks))),
    without(Instead(BringRooms, "_is_given_up", no)),
    without(Instead(BringRooms, "_is_quiet", yes)),
    without(Instead(BringRooms, "_writes", nothing)),
    without(Instead(BringRooms, "_goal", into_blocks)),
    without(Instead(BringRooms, "ended", as_if_proven)),
    without(Instead(BringRooms, "has_credit", yes)),
)

LATE = {"_is_after": 589, "_is_of": 441}
"""Removals that the first schedules do not miss, and a schedule that does."""

SCHEDULES = Schedules(
    play,
    LATE,
    beside=tuple(Instead(where, "check", nothing) for where in (TransferSource, TransferTarget)),
)

if __name__ == "__main__":
    SCHEDULES.tell(REMOVALS, otherwise=1000)
