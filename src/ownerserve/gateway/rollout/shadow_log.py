"""The shadow log tells once a minute what came of the turns that a shadow decided too."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ownerserve.gateway.logs import tell
from ownerserve.router.rollout.shadow import ShadowCounts

EVERY_S = 60.0


class ShadowLog:
    """A shadow log remembers what it told last, and tells what came since."""

    def __init__(self, now_s: float) -> None:
        self._due_s = now_s + EVERY_S
        self._told: dict[str, tuple[int, int, float]] = {}

    def look(self, shadows: Mapping[str, ShadowCounts], now_s: float) -> None:
        """Tell what came since the last time, when it is due and there is something."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S
        for name, counts in shadows.items():
            compared, agreed, regret_ms = self._told.get(name, (0, 0, 0.0))
            now = (
                counts.compared,
                counts.agreed.total(),
                sum(counts.regret_ms.values()) - sum(counts.gain_ms.values()),
            )
            self._told[name] = now
            if now[0] > compared:
                tell(
                    logging.INFO, "shadow", policy=name, compared=now[0] - compared,
                    agreed=now[1] - agreed, regret_ms=round(now[2] - regret_ms, 1),
                )  # fmt: skip
