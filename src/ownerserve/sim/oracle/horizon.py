"""Receding horizon: at each eviction the true time of every conversation's next turn is known.

Belady's rule, online: state that no conversation stands on goes first, then what is wanted latest,
in the fleet's own caches and block by block as ever. Routing is the policy's own.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ownerserve.cache.policies.base import Candidate, Key, Policy
from ownerserve.sim.setup import Setup
from ownerserve.sim.turns import Turn
from ownerserve.sim.workload import Workload

LATEST_MS = 1 << 50
NEVER_AGAIN = 1


class NextUse(Policy):
    """The eviction order of one who knows. Turns carry their next use as their priority, and soft
    references for ever: a dead branch is told by having none."""

    name: ClassVar[str] = "next-use"

    def key(self, candidate: Candidate) -> Key:
        heat = candidate.heat
        return (float(heat.refs > 0 and heat.priority > NEVER_AGAIN), float(heat.priority))


class Foresight:
    """When conversations go on. Asks the workload, changes nothing."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def priority(self, turn: Turn, now: float) -> int:
        """Higher the sooner the state that `turn` leaves is wanted: as if it ended at once."""
        next_s = self._workload.next_release_s(turn, now)
        return NEVER_AGAIN if next_s is None else LATEST_MS - round(next_s * 1000.0)


def horizon(setup: Setup) -> Setup:
    """The same fleet and router, evicting by true next-turn times."""
    return msgspec.structs.replace(setup, oracle="horizon")
