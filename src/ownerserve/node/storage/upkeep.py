"""Upkeep: the store forgets what nobody asked for, and gives its room back. A thread.

Off the engine's thread and off those that read and write for it: a pass may wait for the medium,
and holds the store's lock for one bounded step at a time. A pass is bounded too, since the worker
stops behind it: where it leaves something to do the next one comes soon.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from threading import Event, Thread

from ownerserve.kv.errors import InvalidInput
from ownerserve.store.disk.maintain import collect
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.tiers.backend import TierBackend
from ownerserve.store.tiers.buffers import BufferPool

log = logging.getLogger("ownerserve.node")

STOP_S = 10.0
EXPIRE_AT_ONCE = 4096
"""Records of each tier that one pass removes at most."""
COMPACT_AT_ONCE = 2
"""Segments that one pass compacts at most."""
MORE_AFTER_S = 1.0
"""How soon the next pass comes behind one that reached a bound."""


class Upkeep:
    """Runs a pass over `tiers` every `every_s` seconds between `start` and `stop`; 0: never."""

    def __init__(self, tiers: Sequence[TierBackend], every_s: float) -> None:
        if every_s < 0:
            raise InvalidInput("store-upkeep", f"{every_s:g} s", "use 0 (never) or more")
        self.counts: Counter[str] = Counter()  # replaced whole: any thread may read it
        self._tiers = tiers
        self._every_s = every_s
        self._landing = BufferPool()
        self._stopping = Event()
        self._thread = Thread(target=self._serve, name="store-upkeep", daemon=True)

    def start(self) -> None:
        """Begin; the first pass comes after one interval."""
        if self._every_s:
            self._thread.start()

    def stop(self) -> bool:
        """End after the pass that is under way, within `STOP_S`. Before the tiers are closed.
        False: a medium is silent, and the pass still uses a tier."""
        self._stopping.set()
        if self._thread.ident is None:
            return True
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.warning("the store's upkeep does not end: its medium is silent")
        return not self._thread.is_alive()

    def run_once(self) -> float:
        """One pass: TTLs, old quarantine, sparse and empty segments. How many seconds later the
        next one is to come."""
        total, has_more = self.counts.copy(), False
        total["passes"] += 1
        for tier in self._tiers:
            expired = tier.expire(EXPIRE_AT_ONCE)
            total["expired"] += expired
            has_more = has_more or expired >= EXPIRE_AT_ONCE
            if isinstance(tier, DiskTier):
                done = collect(tier.core, self._landing, most=COMPACT_AT_ONCE)
                has_more = has_more or done.segments_compacted >= COMPACT_AT_ONCE
                total["segments_compacted"] += done.segments_compacted
                total["segments_dropped"] += done.segments_dropped
                total["compacted_bytes"] += done.bytes_copied
                total["quarantine_released"] += done.quarantine_released
        self.counts = total
        return min(MORE_AFTER_S, self._every_s) if has_more else self._every_s

    def _serve(self) -> None:
        after_s = self._every_s
        while not self._stopping.wait(after_s):
            after_s = self._every_s
            try:
                after_s = self.run_once()
            except Exception:  # a thread's root: a store that can't be tidied still serves
                self.counts = self.counts + Counter(failed=1)
                log.exception("the store's upkeep failed")
