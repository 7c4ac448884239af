"""Sessions and prefixes come to a node (node.restore.coming), and sessions leave it for the store
(node.retention.leaving), for who moves them (node.transfers): who waits for which, on the thread
that owns the cache.
"""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.node.vocabulary.events import (
    CameIn,
    Event,
    PrefixCame,
    SessionCame,
    SessionComing,
    SessionLeaves,
    TurnGone,
)

CameTold = Callable[[CameIn], None]


class Comings:
    """`Comings` owns who hears of each session that comes or is put away. `handle` tells the node
    an event, and has the turns run that may run then."""

    def __init__(self, handle: Callable[[Event], None]) -> None:
        self._handle = handle
        self._told: dict[TurnId, CameTold] = {}
        self._putting_away: dict[SessionId, list[Callable[[], None]]] = {}

    def bring(self, coming: SessionComing, told: CameTold) -> None:
        """Begin to bring a session's state; `told` hears once how that ended, unless it is given
        up."""
        self._told[coming.turn_id] = told
        self._handle(coming)

    def give_up(self, turn_id: TurnId) -> None:
        """Bring it no more; one that came is no error."""
        if self._told.pop(turn_id, None) is not None:
            self._handle(TurnGone(turn_id))

    def came(self, event: SessionCame | PrefixCame) -> None:
        """Take in that the session is idle here, or that a replica of its beginning is."""
        self._handle(event)

    def ended(self, end: CameIn) -> None:
        """Tell who waits how bringing it ended; nobody, where it was given up."""
        told = self._told.pop(end.turn_id, None)
        if told is not None:
            told(end)

    def put_away(self, session_id: SessionId, told: Callable[[], None]) -> None:
        """Begin to put an idle session's state into the store; `told` hears once when that is
        over."""
        self._putting_away.setdefault(session_id, []).append(told)
        self._handle(SessionLeaves(session_id))

    def is_put_away(self, session_id: SessionId) -> None:
        """Tell who waits that nothing of the session is being copied any more."""
        for told in self._putting_away.pop(session_id, ()):
            told()
