"""An engine core lends what its store has to peers, from the scheduler's process.

    holding's thread   what the store has of a session, and a lend's books
    transfer threads   records read from the store, as its writer last committed them

The workers' blocks are not lent: they are a device's, and vLLM's. Of several ranks none lends yet:
each has only its part of a record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence, Set
from math import inf
from pathlib import Path
from threading import Lock

from ownerserve.engines.vllm.scheduler_side.holding import Holding
from ownerserve.kv.errors import OwnerServeError
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.node.vocabulary.records import TipRecords
from ownerserve.store.disk.snapshot import StoreSnapshot
from ownerserve.store.format.model import MissReason, ReadMiss, ReadOutcome, Want

log = logging.getLogger("vllm.ownerserve")

OPEN_AGAIN_S = 1.0


class HeldSessions:
    """`HeldSessions` are those that a `Holding` knows; asked on its thread."""

    def __init__(self, holding: Holding) -> None:
        self._holding = holding

    def records(self, session_id: SessionId) -> TipRecords | None:
        """Return the records of the session as it was last stored; None: it is not known."""
        return self._holding.residency.records(session_id)


class LentShard:
    """A `LentShard` is one rank's store, as peers read it: a view beside its writer. Any thread may
    call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._snapshot: StoreSnapshot | None = None
        self._tried_s = -OPEN_AGAIN_S
        self._lock = Lock()

    def standing(self, ids: Sequence[bytes]) -> Mapping[Tier, Set[bytes]]:
        """Return which of `ids` stand on disk; nothing where the index does not answer."""
        snapshot = self._open()
        standing = None if snapshot is None else snapshot.standing(ids)
        return {} if standing is None else {Tier.DISK: standing}

    def read_own(self, wants: Sequence[Want]) -> ReadOutcome:
        """Read and verify the wants, or give a miss."""
        snapshot = self._open()
        if snapshot is None:
            return ReadMiss(MissReason.ABSENT, wants[0].id)
        return snapshot.read(wants)

    def close(self) -> None:
        """Let go of the store, and open it no more."""
        with self._lock:
            snapshot, self._snapshot, self._tried_s = self._snapshot, None, inf
        if snapshot is not None:
            snapshot.close()

    def _open(self) -> StoreSnapshot | None:
        """Return the view; None where there is no store yet: its writer makes it."""
        with self._lock:
            if self._snapshot is None and time.monotonic() - self._tried_s >= OPEN_AGAIN_S:
                self._tried_s = time.monotonic()
                try:
                    self._snapshot = StoreSnapshot(self._directory)
                except (OwnerServeError, OSError) as error:
                    log.info("no store to lend of yet: %s", error)
            return self._snapshot
