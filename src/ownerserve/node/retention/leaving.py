"""Sessions that leave a node for the store are copied at once, and it is known when that is over.
Pure.

    leaves ── due now ── copies, as of any idle session ── none is left ── put away
"""

from __future__ import annotations

from ownerserve.kv.ids import SessionId
from ownerserve.node.retention.spills import IdleSpills
from ownerserve.node.vocabulary.events import PutAway


class SessionsLeaving:
    """`SessionsLeaving` owns which sessions are being put away."""

    def __init__(self, idle_spills: IdleSpills) -> None:
        self._idle_spills = idle_spills
        self._under_way: set[SessionId] = set()

    def begin(self, session_id: SessionId) -> None:
        """Have the session copied now."""
        self._idle_spills.put_away(session_id)
        self._under_way.add(session_id)

    def over(self) -> list[PutAway]:
        """Take those of which nothing is being copied any more."""
        over = [name for name in self._under_way if not self._idle_spills.is_pending({name})]
        self._under_way.difference_update(over)
        return [PutAway(name) for name in over]
