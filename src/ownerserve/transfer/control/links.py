"""Links remember which peers are not to be asked now, and which roads to them are closed. Pure.

    a link fails     not asked for BACKOFF_S, twice as long with each failure that follows, up to
                     BACKOFF_MAX_S; what it answers makes it good
    a road is UNABLE not tried for ROAD_CLOSED_S; nor one whose writer may write on, if there is
                     another

Who a peer is, whether its key is right: the mover's and the RPC's to find out. Another life of a
unit, another address or key is another link.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.messages import RoutingUnit
from ownerserve.transfer.control.events import PeerLink
from ownerserve.transfer.vocabulary import Road

BACKOFF_S, BACKOFF_MAX_S = 1.0, 30.0
ROAD_CLOSED_S = 60.0
KNOWN_MAX = 1024


class LinkFailures(msgspec.Struct, frozen=True, gc=False):
    """`LinkFailures` of one link, in a row: it is not asked before `until_s`."""

    count: int
    until_s: float


class PeerLinks:
    """`PeerLinks` are the links of one reader that failed; of all others nothing is kept."""

    def __init__(self) -> None:
        self._failed: dict[PeerLink, LinkFailures] = {}  # the last to fail is last
        self._closed: dict[tuple[PeerLink, str], float] = {}

    def may_ask(self, peer: PeerLink, now: float) -> bool:
        """Tell whether the peer may be asked."""
        failed = self._failed.get(peer)
        return failed is None or failed.until_s <= now

    def failed(self, peer: PeerLink, now: float) -> None:
        """Note that the peer did not answer, or its link broke."""
        before = self._failed.pop(peer, None)
        if before is not None and before.until_s > now:
            self._failed[peer] = before  # the same failure, seen by another bring
            return
        count = 1 if before is None else before.count + 1
        wait_s = min(BACKOFF_S * 2 ** min(count - 1, 16), BACKOFF_MAX_S)
        self._failed[peer] = LinkFailures(count, now + wait_s)
        if len(self._failed) > KNOWN_MAX:
            del self._failed[next(iter(self._failed))]

    def answered(self, peer: PeerLink) -> None:
        """Note that the peer lives."""
        self._failed.pop(peer, None)

    def close(self, peer: PeerLink, road: Road, now: float) -> None:
        """Note that a road to the peer is not open."""
        self._closed.pop((peer, road.name), None)
        self._closed[peer, road.name] = now + ROAD_CLOSED_S
        if len(self._closed) > KNOWN_MAX:
            del self._closed[next(iter(self._closed))]

    def is_open(self, peer: PeerLink, road: Road, now: float) -> bool:
        """Tell whether a road to the peer may be tried."""
        return self._closed.get((peer, road.name), now) <= now

    def forget(self, unit: RoutingUnit) -> None:
        """Forget a life that is over."""
        for peer in [peer for peer in self._failed if peer.unit == unit]:
            del self._failed[peer]
        for key in [key for key in self._closed if key[0].unit == unit]:
            del self._closed[key]
