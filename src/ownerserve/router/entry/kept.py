"""Places in line, and which of them are kept of clients who left: one that gives up on a silent
server and tries again stands where it stood.

Owns the tickets' numbers and who left with which. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.router.entry.fair import Ticket

PLACE_KEPT_S = 120.0
"""So long the place of a session is kept that left the line: clients and proxies give up on a
silent server, and try again."""
PLACES_MAX = 1 << 12


class KeptPlace(msgspec.Struct, frozen=True, gc=False):
    """A kept place is the ticket that one had since `came_s` who left the line at `left_s`."""

    ticket: Ticket
    came_s: float
    left_s: float


class KeptPlaces:
    """The places of those who left, who left first before the others."""

    def __init__(self) -> None:
        self._left: OrderedDict[SessionId, KeptPlace] = OrderedDict()
        self._issued = 0

    def take(self, session: SessionId, now_s: float) -> KeptPlace:
        """Return the place that the session had a short while ago, or a new one."""
        known = self._left.pop(session, None)
        if known is not None and now_s <= known.left_s + PLACE_KEPT_S:
            return known
        self._issued += 1
        return KeptPlace(Ticket(self._issued), now_s, now_s)

    def keep(self, session: SessionId, place: KeptPlace) -> None:
        """Keep the place of a session that leaves the line."""
        self._left[session] = place
        self._left.move_to_end(session)
        if len(self._left) > PLACES_MAX:
            self._left.popitem(last=False)
