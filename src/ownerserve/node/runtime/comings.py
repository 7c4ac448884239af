"""Sessions come to a node (node.restore.coming) for who moves them (node.transfers.moves): who
waits for which, on the thread that owns the cache.
"""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.kv.ids import TurnId
from ownerserve.node.vocabulary.events import (
    CameIn,
    Event,
    RestoreOutcome,
    SessionCame,
    SessionComing,
    TurnGone,
)

CameTold = Callable[[RestoreOutcome], None]


class Comings:
    """`Comings` owns who hears of each session that comes. `handle` tells the node an event, and
    has the turns run that may run then."""

    def __init__(self, handle: Callable[[Event], None]) -> None:
        self._handle = handle
        self._told: dict[TurnId, CameTold] = {}

    def bring(self, coming: SessionComing, told: CameTold) -> None:
        """Begin to bring a session's state; `told` hears once how that ended, unless it is given
        up."""
        self._told[coming.turn_id] = told
        self._handle(coming)

    def give_up(self, turn_id: TurnId) -> None:
        """Bring it no more; one that came is no error."""
        if self._told.pop(turn_id, None) is not None:
            self._handle(TurnGone(turn_id))

    def came(self, event: SessionCame) -> None:
        """Take in that the session is idle here."""
        self._handle(event)

    def ended(self, end: CameIn) -> None:
        """Tell who waits how bringing it ended; nobody, where it was given up."""
        told = self._told.pop(end.turn_id, None)
        if told is not None:
            told(end.outcome)
