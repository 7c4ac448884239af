"""Stays of idle sessions that no fleet decides."""

from __future__ import annotations

from ownerserve.router.entry.stay import IdleStay


class FixedStay(IdleStay):
    """It is what it was made with, whatever was seen."""

    def decide(self, memory_tokens: float, engines: int) -> None:
        """Nothing."""
