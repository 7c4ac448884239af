"""The engine's desk: answers the node's RPC requests on the thread that owns the cache.

Translates the scheduler's and the cache's state into what admission asks; decides nothing.
"""

from __future__ import annotations

import time

from ownerserve.cache.hetero import HeteroCache
from ownerserve.engines.hf.scheduler import Scheduler
from ownerserve.engines.hf.status import Identity, worker_load
from ownerserve.kv.wire.rpc import (
    Answer,
    Commit,
    Probe,
    Release,
    ReleaseSession,
    Request,
    Reserve,
    Status,
    StatusIs,
)
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.admission import Admission, Levels


class Desk:
    """See the module."""

    def __init__(self, cache: HeteroCache, scheduler: Scheduler, identity: Identity) -> None:
        self.admission = Admission(cache.sessions)
        self._cache = cache
        self._scheduler = scheduler
        self._identity = identity

    def answer(self, request: Request) -> Answer:
        """What the worker says to `request`."""
        now, admission = time.monotonic(), self.admission
        match request:
            case Status():
                return StatusIs(self._load())
            case Probe(wanted):
                return admission.probe(wanted, self._levels(), now)
            case Reserve(turn_id, wanted):
                return admission.reserve(turn_id, wanted, levels=self._levels(), now=now)
            case Commit(reservation):
                return admission.commit(reservation, now)
            case Release(reservation):
                return admission.release(reservation)
            case ReleaseSession(session_id):
                return admission.release_session(session_id)

    def _levels(self) -> Levels:
        load, limits = self._scheduler.load(), self._scheduler.limits
        rooms = self._cache.rooms
        blocks = rooms.blocks.free + rooms.evictable_blocks()
        return Levels(
            waiting=load.waiting,
            max_waiting=limits.max_waiting,
            pending_prefill_tokens=load.pending_prefill_tokens,
            room_tokens=blocks * self._cache.layout.block_tokens,
            sequence_tokens=limits.sequence_tokens,
        )

    def _load(self) -> WorkerLoad:
        return worker_load(
            self._identity, self._cache, load=self._scheduler.load(), as_of_s=time.time()
        )
