"""Records that went from a worker's tiers, as the store's threads tell it: a short list, emptied by
the node's thread. Owns nothing else; what is too much to list is counted."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from ownerserve.kv.ids import PrefixHash
from ownerserve.node.vocabulary.events import RecordsLost
from ownerserve.store.format.model import Meta

LISTED = 4096


class Losses:
    """Any thread may add; one takes."""

    def __init__(self) -> None:
        self._ends: set[PrefixHash] = set()
        self._unnoted = 0
        self._lock = Lock()

    def add(self, metas: Iterable[Meta]) -> None:
        """Records of these are gone from the tier that tells it."""
        with self._lock:
            for meta in metas:
                if len(self._ends) < LISTED:
                    self._ends.add(PrefixHash(meta.prefix_hash))
                else:
                    self._unnoted += 1

    def take(self) -> RecordsLost | None:
        """What went since the last time; None: nothing."""
        if not self._ends:
            return None
        with self._lock:
            lost = RecordsLost(tuple(self._ends), self._unnoted)
            self._ends, self._unnoted = set(), 0
        return lost
