"""This module says what comes of a transfer, for the fleet that asked for it. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec


class TransferOutcome(StrEnum):
    """An outcome says what came of a transfer."""

    LANDED = "landed"
    NOTHING_TO_BRING = "nothing_to_bring"
    NO_ROOM = "no_room"
    LATE = "late"
    """The transfer took too long, by control's own deadlines or by the setup's."""
    GONE = "gone"
    """The source had it no more when it was asked to lend, or needed its room meanwhile."""
    SOURCE_LOST = "source_lost"
    LOST = "lost"
    """The target is down, or died meanwhile: the turn must run elsewhere."""


class TransferResult(msgspec.Struct, frozen=True, gc=False):
    """A result says how a transfer ended.

    When it LANDED, `units` of the prompt are at the target now. `bytes` left the source for it.
    It waited `waited_s` for room.
    """

    landing: TransferOutcome
    units: int = 0
    bytes: int = 0
    waited_s: float = 0.0


Then = Callable[[TransferResult, float], None]
