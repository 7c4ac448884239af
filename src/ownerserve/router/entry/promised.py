"""Which sessions were let in once and are not over: their later turns, sub-agents and forks are
held for nothing but a state that is gone.

Owns who they are, and since when no turn of each runs. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

from ownerserve.kv.ids import SessionId

PROMISES_MAX = 1 << 17
"""So many sessions are remembered; of more, those unseen for longest are forgotten."""


class PromisedSessions:
    """The sessions that were let in, the least recently seen first."""

    def __init__(self) -> None:
        self._left_s: OrderedDict[SessionId, float | None] = OrderedDict()

    def __contains__(self, session: object) -> bool:
        return session in self._left_s

    def begin(self, session: SessionId) -> None:
        """Note that a turn of the session begins."""
        self._left_s[session] = None
        self._left_s.move_to_end(session)
        if len(self._left_s) > PROMISES_MAX:
            self._left_s.popitem(last=False)

    def leave(self, session: SessionId, now_s: float) -> None:
        """Note that no turn of the session runs from now on."""
        if session in self._left_s:
            self._left_s[session] = now_s

    def come_back(self, session: SessionId) -> float | None:
        """Return since when the session was away that is here again; None: it was not."""
        left_s = self._left_s.get(session)
        if left_s is not None:
            self._left_s[session] = None
        return left_s

    def over(self, session: SessionId) -> None:
        """Forget a session that is over."""
        self._left_s.pop(session, None)
