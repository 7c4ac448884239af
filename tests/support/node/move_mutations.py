"""Each check that moves rest on, taken out: what stands there instead when it is missing.

python -m tests.support.node.move_mutations [SEEDS]     which seed first misses each check

Not in the list is what some tens of schedules did not miss: a hand-over under an epoch of before, a
lease that is over, and one that is counted from its answer, which tests/support/directory's
schedules miss; a word that is done again when it is repeated (engines/hf/test_moves.py).
"""

from __future__ import annotations

from ownerserve.directory.owner.state import OwnerState
from ownerserve.kv.wire.rpc import HandOver, Reject
from ownerserve.node.ownership.ownership import MoveTold, Ownership
from ownerserve.node.runtime.comings import Comings
from ownerserve.node.transfers.moves import LeavingSessions, Takes
from tests.support.node.schedules.moving_node import MovingNode
from tests.support.node.schedules.moving_world import play
from tests.support.removals import Instead, Schedules, no, nothing, without


def any_version(owner: Ownership, asked: HandOver, told: MoveTold) -> Reject | None:
    """Whatever the version is that the target has."""
    grant = owner.owner.grants.get(asked.session_id)
    version = asked.version if grant is None else grant.version
    return hand_over(owner, HandOver(asked.session_id, version, asked.target, asked.epoch), told)


hand_over = Ownership.hand_over


REMOVALS = (
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


FIRST = {
    "is_live": 1,
    "hand_over": 1,
    "_let_go": 3,
    "_stop_serving": 8,
    "moved_here": 9,
    "_install": 1,
    "ended": 0,
}
"""Schedules that are known to miss a removal."""

SCHEDULES = Schedules(play, FIRST)

if __name__ == "__main__":
    SCHEDULES.tell(REMOVALS, otherwise=100)
