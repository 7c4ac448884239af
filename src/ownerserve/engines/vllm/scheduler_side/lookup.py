"""A `StoreLookup` finds which records stand in the store: asked by the scheduler, answered by a
thread.

Owns the thread and a read-only view of the store's index. The worker side is the store's one
writer, perhaps in another process; what it has committed is seen here. Never blocks the caller.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Protocol, TypeAlias

from msgspec.structs import replace

from ownerserve.kv.errors import OwnerServeError
from ownerserve.kv.messages import Tier
from ownerserve.node.transfers.offers import PeerOffer
from ownerserve.node.vocabulary.events import FindRecords, PeerPrefix, RecordsFound
from ownerserve.node.vocabulary.records import Inside
from ownerserve.node.vocabulary.settings import BRINGS_AT_ONCE
from ownerserve.store.disk.snapshot import StoreSnapshot
from ownerserve.store.format.model import Want
from ownerserve.store.format.seal import Keys

log = logging.getLogger("vllm.ownerserve")

OPEN_AGAIN_S = 1.0

Chore: TypeAlias = Callable[[], None]


class OfferingPeers(Protocol):
    """`OfferingPeers` are other workers, as the scheduler's side asks them (node.transfers.peers);
    any thread may call."""

    def look(self, prefix: PeerPrefix) -> Mapping[bytes, float]:
        """Return which records of the prefix its peer could lend, and in how many ms it has each at
        hand. Waits."""
        ...

    def offered(self, wants: Sequence[Want]) -> Mapping[bytes, PeerOffer]:
        """Return what was offered of the wants, by id, for who brings it."""
        ...


class StoreLookup:
    """A `StoreLookup` is the thread that looks records up in the store; `submit` and `poll` return
    at once."""

    def __init__(self, directory: Path, peers: OfferingPeers | None = None) -> None:
        """Begin; `peers` None: nobody else is asked."""
        self._directory = directory
        self._peers = peers
        self._asking = ThreadPoolExecutor(BRINGS_AT_ONCE, "ownerserve-peers")
        self._snapshot: StoreSnapshot | None = None
        self._tried_s = -OPEN_AGAIN_S
        self._asked: queue.SimpleQueue[FindRecords | Chore | None] = queue.SimpleQueue()
        self._found: deque[RecordsFound] = deque()
        self._told = Event()
        self._thread = Thread(target=self._run, name="ownerserve-lookup", daemon=True)
        self._thread.start()

    def submit(self, find: FindRecords) -> None:
        """Queue the `find`; every one gets one answer."""
        self._asked.put(find)

    def later(self, chore: Chore) -> None:
        """Do the chore on the thread, after what was asked: a scheduler's hook writes no file."""
        self._asked.put(chore)

    @property
    def has_answers(self) -> bool:
        """`has_answers` tells whether `poll` has any."""
        return bool(self._found)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the thread has done something, since the last call; return whether it has."""
        has_told = self._told.wait(timeout_s)
        self._told.clear()
        return has_told

    def poll(self) -> Iterable[RecordsFound]:
        """Yield the answers since the last call."""
        while self._found:
            yield self._found.popleft()

    def offered(self, wants: Sequence[Want]) -> Mapping[bytes, PeerOffer]:
        """Return who is to lend which of these, that are read for a turn."""
        return {} if self._peers is None else self._peers.offered(wants)

    def close(self) -> None:
        """Stop the thread."""
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._asked.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                answer = self._answer(asked) if isinstance(asked, FindRecords) else asked()
            except Exception:  # the root of this thread; a turn that is not answered would wait
                log.exception("%s failed", asked)
                answer = (
                    RecordsFound(asked.operation_id, {}) if isinstance(asked, FindRecords) else None
                )
            if isinstance(asked, FindRecords) and answer is not None:
                answer = self._also_of_peers(asked, answer)
            if answer is not None:
                self._found.append(answer)
            self._told.set()
        if self._snapshot is not None:
            self._snapshot.close()

    def _answer(self, find: FindRecords) -> RecordsFound:
        snapshot = self._open()
        if snapshot is None:
            return RecordsFound(find.operation_id, {})
        inside = _inside(snapshot, find)
        ids = [*snapshot.find(find.ids), *(item.meta.id for item in inside)]
        return RecordsFound(find.operation_id, dict.fromkeys(ids, Tier.DISK), inside)

    def _also_of_peers(self, find: FindRecords, here: RecordsFound) -> RecordsFound | None:
        """Return what is here, unless a peer may have more of it: then that is asked on a thread
        that may wait, and answered there."""
        peer, peers = find.peer, self._peers
        if peer is None or peers is None or len(here.held) >= len(find.ids):
            return here

        def ask() -> None:
            found = here
            try:
                away = peers.look(peer)
                held = {**dict.fromkeys(away, Tier.PEER), **here.held}
                ready_ms = max(away.values(), default=0.0)
                found = replace(here, held=held, peer_ready_ms=ready_ms)
            finally:
                self._found.append(found)
                self._told.set()

        self._asking.submit(ask)
        return None

    def _open(self) -> StoreSnapshot | None:
        """Return the view of the store's index; None where the store is not there yet: its writer
        makes it."""
        if self._snapshot is None and time.monotonic() - self._tried_s >= OPEN_AGAIN_S:
            self._tried_s = time.monotonic()
            try:
                self._snapshot = StoreSnapshot(self._directory, keys=Keys())
            except OwnerServeError as error:
                log.info("no store to look in yet: %s", error)
        return self._snapshot


def _inside(snapshot: StoreSnapshot, find: FindRecords) -> tuple[Inside, ...]:
    """Return the tenant's records that hold the first boundary that any of them holds: a branch
    shares their front."""
    for digest in find.boundaries:
        at = snapshot.at_boundary(digest)
        if own := [(meta, units) for meta, units in at if meta.tenant == find.tenant]:
            return tuple(Inside(meta, units, digest) for meta, units in own)
    return ()
