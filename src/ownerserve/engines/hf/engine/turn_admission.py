"""The engine's desk: who is let in, and what the worker says of itself, on the cache's own thread.

Translates the scheduler's and the cache's state into what admission asks; decides nothing. Owns the
order of arrivals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.engines.hf.metrics.status import WorkerIdentity, worker_load
from ownerserve.engines.hf.scheduling.requests import EngineRequest
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import RequestRejected
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    AskLine,
    Commit,
    ListHeld,
    Probe,
    Reject,
    Release,
    ReleaseSession,
    Reserve,
    RpcAnswer,
    RpcRequest,
    Status,
    StatusIs,
)
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.admission.reservations import (
    Admission,
    Levels,
    PlaceTaken,
    Standing,
    probe_seed,
)


class LetIn(msgspec.Struct, frozen=True):
    """A request may enter the queue, at this place among arrivals."""

    order: int
    is_promised: bool


class TurnAdmission:
    """See the module. Keeps promised room from turns that stand behind it (step.Promises)."""

    def __init__(
        self,
        cache: HeteroCache,
        scheduler: Scheduler,
        identity: WorkerIdentity,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.admission = Admission(cache.sessions)
        self._cache = cache
        self._scheduler = scheduler
        self._identity = identity
        self._now = now
        self._block = cache.layout.block_tokens
        self._orders = count(1)
        scheduler.promises = self

    # ---- asked over RPC

    def answer(self, request: RpcRequest) -> RpcAnswer:
        """What the worker says to `request`."""
        now, admission = self._now(), self.admission
        match request:
            case Status():
                return StatusIs(self._load())
            case Probe(wanted):
                return probe_seed(wanted, self.standing())
            case Reserve(turn_id, wanted):
                order = next(self._orders)
                return admission.reserve(
                    turn_id, wanted, levels=self._levels(), now=now, order=order
                )
            case Commit(reservation):
                return admission.commit(reservation, now)
            case Release(reservation):
                return admission.release(reservation)
            case ReleaseSession(session_id=session_id):
                return admission.release_session(session_id)
            case ListHeld():
                raise AssertionError("the loop answers it")
            case AskLine():
                return Reject(WorkerRefusal.MALFORMED)  # each answer of this engine says it

    def standing(self) -> Standing:
        """What seeds are judged by: a copy that any thread may read."""
        return self.admission.standing(self._levels(), self._now())

    def wait_s(self) -> float | None:
        """How long until a place ends by itself, whose room others may wait for."""
        at_s = self.admission.next_expiry_s()
        return None if at_s is None else max(0.0, at_s - self._now())

    # ---- turns that are here

    def let_in(self, request: EngineRequest) -> LetIn | RequestRejected:
        """Judge a request before any work is done for it, and use up its place.

        One that names no open place is refused: whoever reserved it has been told that it is gone,
        and may have gone elsewhere. So is one that is longer than its place and than what is left.
        """
        tokens = len(request.prompt) + request.stopping.max_tokens - 1
        if request.reservation is None:
            refusal = self.standing().judge_append(tokens) if request.is_judged else None
            if refusal is not None:
                return RequestRejected(
                    refusal, f"{tokens} tokens do not fit beside those that wait"
                )
            return LetIn(next(self._orders), is_promised=False)
        place = self.admission.arrived(request.reservation, self._now())
        if not isinstance(place, PlaceTaken):
            number = request.reservation
            message = f"reservation {number} is not open here: it was used, released or has expired"
            return RequestRejected(place.reason, message)
        whole = -(-tokens // self._block) * self._block
        if tokens > place.tokens and whole > self.standing().spare_tokens:
            message = f"{tokens} tokens are more than the {place.tokens} that were promised room"
            return RequestRejected(WorkerRefusal.NO_ROOM, message)
        return LetIn(place.order, is_promised=True)

    # ---- step.Promises

    def withholds(self, blocks: int, order: int) -> bool:
        kept = self.admission.withheld_tokens(order, self._block) // self._block
        return kept > 0 and self._cache.occupancy.obtainable_blocks() - kept < blocks

    def revoke(self) -> bool:
        return self.admission.revoke()

    # ---- parts

    def _levels(self) -> Levels:
        load, limits = self._scheduler.load(), self._scheduler.limits
        blocks = self._cache.occupancy.obtainable_blocks() - load.growth_blocks - load.queued_blocks
        return Levels(
            waiting=load.waiting,
            max_waiting=limits.max_waiting,
            pending_prefill_tokens=load.pending_prefill_tokens,
            room_tokens=blocks * self._block,
            sequence_tokens=limits.sequence_tokens,
            queued_tokens=load.queued_blocks * self._block,
            capacity_tokens=self._cache.occupancy.blocks.capacity * self._block,
            block_tokens=self._block,
        )

    def _load(self) -> WorkerLoad:
        return worker_load(
            self._identity, self._cache, load=self._scheduler.load(), as_of_s=time.time()
        )
