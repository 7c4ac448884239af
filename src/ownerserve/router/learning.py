"""Learning makes a fleet's constants follow its own sessions: T_hot, T_cool, lambda, delta and mu.

A router begins with what was derived for PRIOR (settings.py). From LEARNT_FROM ended turns on, and
from then on every DERIVED_EVERY_S in which turns end, they are derived anew, from the window of
turns (workload.py) and the speeds at which the workers are priced: nothing of the prior is left
then. With workers of unlike speed each number is the median of what is derived for each.

    turn ends ── took ──> window      due: derived(workers) ──> Settings in force for what comes
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from ownerserve.kv.messages import Tier
from ownerserve.router.settings import DERIVED, Settings, WorkloadFacts, derive
from ownerserve.router.worker import Worker
from ownerserve.router.workload import EndedTurn, WorkloadWindow

LEARNT_FROM = 128
"""Turns that must have ended before they say what sessions are like."""
DERIVED_EVERY_S = 20.0
SPEEDS_MAX = 16
"""So many workers of a large fleet are looked at, evenly spread."""


class Learning:
    """Learning derives settings for a fleet whose evicted state goes to the tier `spilled_to`."""

    def __init__(self, *, spilled_to: Tier) -> None:
        self.facts: WorkloadFacts | None = None
        """What the settings were last derived from; None: nothing is learnt yet."""
        self.learnt: Settings | None = None
        self._spilled_to = spilled_to
        self._window = WorkloadWindow()
        self._due_s = float("-inf")

    @property
    def turns(self) -> int:
        """How many turns the window holds now."""
        return len(self._window)

    def took(self, turn: EndedTurn, now_s: float) -> bool:
        """Take in a turn that has ended; return whether it is time to derive."""
        self._window.took(turn)
        return now_s >= self._due_s and len(self._window) >= LEARNT_FROM

    def derive(self, workers: Sequence[Worker], now_s: float) -> Settings | None:
        """Derive the settings anew for these workers, and return them; None where there is no
        worker."""
        self._due_s = now_s + DERIVED_EVERY_S
        every = max(-(-len(workers) // SPEEDS_MAX), 1)
        speeds = {id(worker.speed): worker.speed for worker in workers[::every]}
        if not speeds:
            return None
        self.facts = facts = self._window.facts()
        found = [derive(one, facts, spilled_to=self._spilled_to) for one in speeds.values()]
        middle = {name: median(getattr(one, name) for one in found) for name in DERIVED}
        self.learnt = msgspec.structs.replace(found[0], **middle)
        return self.learnt
