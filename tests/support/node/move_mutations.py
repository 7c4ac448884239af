"""Each check that moves rest on, taken out: what stands there instead when it is missing.

python -m tests.support.node.move_mutations [SEEDS]     which seed first misses each check

Not in the list is `OwnerState._transferred`, by which an owner asks again for a session that nobody
lives to take: here each had a turn of late, so that it is asked for as `RecentSessions` are. By
itself it is tools/mutants' hand-over-that-fails-is-forgotten.
"""

from __future__ import annotations

from ownerserve.cache.ingest import Ingest
from ownerserve.directory.owner.doors import GuardedOwner
from ownerserve.directory.owner.state import OwnerState
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import HandOver, Reject
from ownerserve.node.ownership.ownership import MoveTold, Ownership
from ownerserve.node.rpc.server import Flights
from ownerserve.node.runtime.comings import Comings
from ownerserve.node.state import NodeState
from ownerserve.node.transfers.moves import LeavingSessions, Takes
from ownerserve.node.transfers.turn_moves import ComingTurns, LeavingTurns
from tests.support.directory.mutations import from_receipt
from tests.support.node.schedules.moving_node import MovingNode
from tests.support.node.schedules.moving_world import play
from tests.support.removals import Instead, Schedules, no, nothing, without, yes


def any_version(owner: Ownership, asked: HandOver, told: MoveTold) -> Reject | None:
    """Whatever the version is that the target has."""
    grant = owner.owner.grants.get(asked.session_id)
    version = asked.version if grant is None else grant.version
    return hand_over(owner, HandOver(asked.session_id, version, asked.target, asked.epoch), told)


hand_over = Ownership.hand_over


async def whatever_is_said(*_: object) -> WorkerRefusal | None:
    """Whether or not the target has the turn."""
    return None


REMOVALS = (
    # The owner's
    without(Instead(OwnerState, "_lease_covers", yes)),
    without(Instead(OwnerState, "_lease_end", from_receipt)),
    without(Instead(GuardedOwner, "_is_stale", no)),
    without(Instead(Ownership, "_will_count", no)),
    # The source's
    without(Instead(MovingNode, "is_live", no)),
    without(Instead(Ownership, "hand_over", any_version)),
    without(Instead(LeavingSessions, "_let_go", nothing)),
    without(Instead(OwnerState, "_stop_serving", nothing)),
    # The target's
    without(Instead(Ownership, "moved_here", nothing)),
    without(Instead(Takes, "_install", lambda *_: 0)),
    without(Instead(Comings, "ended", nothing)),
    # Two locks: what comes makes way for who is here, and who lacks room waits for what comes.
    without(
        Instead(NodeState, "_make_way", lambda *_: []), Instead(Ingest, "__len__", lambda _: 0)
    ),
    # A word's, and a turn's
    without(Instead(Flights, "again", nothing)),
    without(Instead(Scheduler, "stop", yes)),
    without(Instead(LeavingTurns, "_kept", whatever_is_said)),
    without(Instead(ComingTurns, "poll", nothing)),
)


FIRST = {
    "_lease_covers": 13,
    "_lease_end": 13,
    "_is_stale": 1,
    "_will_count": 0,
    "is_live": 1,
    "hand_over": 3,
    "_let_go": 0,
    "_stop_serving": 4,
    "moved_here": 3,
    "_install": 4,
    "ended": 0,
    "_make_way": 1,
    "again": 1,
    "stop": 3,
    "_kept": 1,
    "poll": 2,
}
"""Schedules that are known to miss a removal."""

SCHEDULES = Schedules(play, FIRST)

if __name__ == "__main__":
    SCHEDULES.tell(REMOVALS, otherwise=100)
