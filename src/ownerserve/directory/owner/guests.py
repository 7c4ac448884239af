"""Guests: sessions whose last turn here was a guest's, and when to ask for them again. Pure.

A gateway asks the owner to hand such a session over to where its turns are done, and the directory
tells nobody of what it is given. So who had the turn asks again, along with frames that go anyway:
at first after AGAIN_S, then after twice as long, until ASKED_FOR_S have passed.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.ids import SessionId

AGAIN_S = 1.0
ASKED_FOR_S = 60.0
"""Two leases: so long a former owner may ask for the hand-over."""
SESSIONS_MAX = 1000


class _Guest(msgspec.Struct):
    due_s: float
    wait_s: float


class Guests:
    """Owns nothing but these times. Of too many sessions the oldest is forgotten: its next turn
    asks for it."""

    def __init__(self) -> None:
        self._sessions: dict[SessionId, _Guest] = {}

    def add(self, session_id: SessionId, now_s: float) -> None:
        """A turn of it has ended here, or it is said to be ours."""
        self._sessions.pop(session_id, None)
        self._sessions[session_id] = _Guest(now_s + AGAIN_S, AGAIN_S)
        if len(self._sessions) > SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]

    def discard(self, session_id: SessionId) -> None:
        """It is ours, or over."""
        self._sessions.pop(session_id, None)

    def due(self, now_s: float) -> list[SessionId]:
        """Those that are to be asked for with the frame that goes now."""
        due = [name for name, guest in self._sessions.items() if guest.due_s <= now_s]
        for name in due:
            guest = self._sessions[name]
            guest.wait_s *= 2
            guest.due_s = now_s + guest.wait_s
            if guest.wait_s > ASKED_FOR_S:
                del self._sessions[name]
        return due
