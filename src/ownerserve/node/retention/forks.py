"""Forks: from which sessions others were forked here. Pure.

The one unheard of for longest is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict

from ownerserve.kv.ids import SessionId

SESSIONS_KEPT = 4096


class Forks:
    """Sessions whose state others stand on."""

    def __init__(self) -> None:
        self._parents: OrderedDict[SessionId, None] = OrderedDict()

    def add(self, parent: SessionId) -> None:
        """A session was forked from `parent`."""
        self._parents[parent] = None
        self._parents.move_to_end(parent)
        if len(self._parents) > SESSIONS_KEPT:
            self._parents.popitem(last=False)

    def __contains__(self, session_id: SessionId) -> bool:
        return session_id in self._parents
