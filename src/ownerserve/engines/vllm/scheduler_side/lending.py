"""An engine core lends what its store has to peers, from the scheduler's process.

    holding's thread   what the store has of a session, and a lend's books
    transfer threads   records read from the store, as its writer last committed them

The workers' blocks are not lent: they are a device's, and vLLM's. Several ranks lend each for
itself (worker_side/lending.py), what it has of a record; here is told what all of them have, and
who they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from math import inf
from pathlib import Path
from threading import Lock

from ownerserve.engines.vllm.scheduler_side.holding import Holding
from ownerserve.engines.vllm.stated_ranks import stated_ranks
from ownerserve.kv.errors import OwnerServeError
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.holders import LendingRank
from ownerserve.kv.wire.rpc import AskPrefix, RpcAnswer, RpcRequest
from ownerserve.node.transfers.bringing import Bringing
from ownerserve.node.transfers.counting import BringCounts
from ownerserve.node.transfers.lenders import Lenders, OnEngine, no_engine
from ownerserve.node.transfers.opening import Answerer
from ownerserve.node.transfers.stored_looks import StoredLooks
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


class LentShards:
    """`LentShards` are the stores of several ranks, of which what all of them have counts."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories
        self._shards = [LentShard(directory) for directory in directories]

    def ranks(self) -> tuple[LendingRank, ...]:
        """Return who the ranks are; none until all have stated themselves."""
        return stated_ranks(self._directories)

    def standing(self, ids: Sequence[bytes]) -> Mapping[Tier, Set[bytes]]:
        """Return which of `ids` stand on disk at all ranks; nothing while one of them does not
        lend."""
        found = [shard.standing(ids).get(Tier.DISK, frozenset()) for shard in self._shards]
        held = frozenset(ids).intersection(*found) if self.ranks() else frozenset()
        return {Tier.DISK: held}

    def close(self) -> None:
        """Let go of the stores."""
        for shard in self._shards:
            shard.close()


class RankedTransfers:
    """`RankedTransfers` are an engine core's whose ranks lend and bring, each for itself: what they
    hold is told here, and peers are asked what they hold."""

    def __init__(self, bringing: Bringing, looks: StoredLooks, shards: LentShards) -> None:
        self.peers = bringing.peers
        self._bringing, self._looks, self._shards = bringing, looks, shards
        self._lenders = Lenders(None)
        self._lenders.looks, self._lenders.ranks = looks, shards.ranks
        self._on_engine: OnEngine = no_engine

    def start(self, on_engine: OnEngine, *, rpc: str = "") -> None:
        """Begin to tell; `on_engine` runs calls where the sessions are known."""
        self._on_engine = on_engine

    def answering(self, others: Answerer) -> Answerer:
        """Return what answers peers here, and leaves everything else to `others`."""

        def answer(request: RpcRequest) -> Future[RpcAnswer]:
            if isinstance(request, AskPrefix):
                return self._lenders.prefix(request, self._on_engine)
            return others(request)

        return answer

    def counts(self) -> BringCounts:
        """Return what peers were asked: what is lent and brought each rank counts."""
        return self._bringing.counts()

    def stop(self) -> None:
        """Tell and ask nothing any more."""
        self._bringing.stop()
        self._looks.close()
        self._shards.close()
