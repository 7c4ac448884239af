"""Sessions that nobody ends: one without a turn for a day is over. Pure.

Few clients say that a session ends. The sweep takes the records of those whose owner is gone; an
owner that lives ends them itself, or its grants, its records and what stands on them would grow for
as long as it lives. A turn that comes after all binds the session anew, from version 0; what is
cached of it stays what it was.
"""

from __future__ import annotations

from collections import OrderedDict

from ownerserve.directory.decisions.state import SWEEP_IDLE_S
from ownerserve.kv.ids import SessionId

IDLE_S = SWEEP_IDLE_S
AT_ONCE = 1000
"""Ended with one frame."""


class Idle:
    """When each session last had a turn here, the longest ago first. Owns nothing else."""

    def __init__(self) -> None:
        self._used_s: OrderedDict[SessionId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used_s)

    def used(self, session_id: SessionId, now_s: float) -> None:
        """A turn of it is here, or has ended."""
        self._used_s[session_id] = now_s
        self._used_s.move_to_end(session_id)

    def discard(self, session_id: SessionId) -> None:
        """It is over, or another's."""
        self._used_s.pop(session_id, None)

    def due(self, now_s: float) -> list[SessionId]:
        """Those without a turn for IDLE_S; they are not named again."""
        due: list[SessionId] = []
        for session_id, used_s in self._used_s.items():
            if used_s + IDLE_S > now_s or len(due) == AT_ONCE:
                break
            due.append(session_id)
        for session_id in due:
            del self._used_s[session_id]
        return due
