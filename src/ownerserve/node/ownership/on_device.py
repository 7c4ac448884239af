"""What of each session the device could go on from, told as it comes and goes. Pure.

The tree is the owner of what is resident and says which frontiers slid; this looks at those alone.
"""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.specs import Coverage
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.ownership.kinds import kinds_of

DigestAt = Callable[[SessionId, int], PrefixHash | None]
"""The digest of a session's first n blocks, where it is known."""


class OnDevice:
    """Looks after one cache. `digest_at` None: nobody hashes here."""

    def __init__(
        self, cache: HeteroCache, inventory: Inventory, *, digest_at: DigestAt | None = None
    ) -> None:
        self._cache = cache
        self._inventory = inventory
        self._digest_at = digest_at
        self._kinds = kinds_of(cache.layout, Coverage.RANGE) | kinds_of(
            cache.layout, Coverage.POINT
        )
        cache.tree.slid = set()

    def ended(self, session_id: SessionId) -> None:
        """A turn of the session is over."""
        status = self._cache.sessions.status(session_id)
        tokens = 0 if status is None else status.restorable_tokens
        digest = None
        if tokens and self._digest_at is not None:
            digest = self._digest_at(session_id, tokens // self._cache.layout.block_tokens)
        self._inventory.has(session_id, Tier.DEVICE, tokens, digest=digest, kinds=self._kinds)

    @property
    def is_due(self) -> bool:
        """Whether a frontier slid since the last `tick`."""
        return bool(self._cache.tree.slid)

    def tick(self) -> None:
        """Some time has passed: blocks may have gone."""
        slid = self._cache.tree.slid
        if not slid:
            return
        stops, self._cache.tree.slid = slid, set()
        for stop in stops:
            for session in (stop.anchors or {}).values():
                if self._inventory.tokens(session.session_id, Tier.DEVICE):
                    self.ended(session.session_id)
