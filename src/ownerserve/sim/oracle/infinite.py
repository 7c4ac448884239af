"""This oracle has infinite cache and free transfer: what is left is compute and queueing.

    every turn -> the least loaded worker; what any worker holds of its prompt is brought there at
    once, and nothing is ever evicted

No policy can cache more or move cheaper; queueing is that of least load, so a smarter order could
still wait less: a bound on state handling, not on scheduling.
"""

from __future__ import annotations

from functools import partial

import msgspec

from ownerserve.cache.outcomes import SlotsReserved
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import PlacementAction
from ownerserve.kv.prefix import Packed
from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, start_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.pricing import peer_copy
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.transfer.lender import held_units
from ownerserve.sim.transfer.outcomes import Then, TransferOutcome, TransferResult
from ownerserve.sim.transfer.reader import landed_parts
from ownerserve.sim.transfer.transfers import Transfers, count_bytes, reserve
from ownerserve.sim.worker.worker import SimWorker
from ownerserve.transfer.control.messages import NO_TURN

KV_BYTES = 1 << 52
"""More than any trace fills."""
FREE_GB_S = 1e12


class FreeTransfer:
    """The policy takes the least loaded worker, with the longest copy of anybody's at hand."""

    needs = ANY_WORKER

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        worker = fleet.least_one()
        source = peer_copy(request, worker)
        held = request.cached_on(worker)
        if source is None or source.tokens <= held:
            return start_at(request, worker)
        tokens = min(source.tokens, request.known_tokens)
        return Decision(
            worker,
            PlacementAction.ARTIFACT_FETCH,
            DispatchReason.LEAST_LOAD,
            tokens,
            source=source,
            moved_tokens=tokens - held,
        )


class FreeTransfers(Transfers):
    """These transfers ask nobody and take no time: what the source has is at the target at once."""

    def bring(
        self,
        source: SimWorker,
        target: SimWorker,
        prompt: Packed,
        *,
        then: Then,
        now: float,
        for_turn: TurnId = NO_TURN,
    ) -> None:
        """Copy what `source` has of `prompt` and `target` lacks; `then` is called later."""
        self._heap.at(now, partial(self._copy, source, target, prompt, then))

    def _copy(
        self, source: SimWorker, target: SimWorker, prompt: Packed, then: Then, now: float
    ) -> None:
        then(self._copied(source, target, prompt, now), now)
        target.look(now)

    def _copied(
        self, source: SimWorker, target: SimWorker, prompt: Packed, now: float
    ) -> TransferResult:
        if not target.is_up:
            return TransferResult(TransferOutcome.LOST)
        if not source.is_up:
            return TransferResult(TransferOutcome.SOURCE_LOST)
        held = held_units(source, prompt)
        if held <= held_units(target, prompt):
            return TransferResult(TransferOutcome.NOTHING_TO_BRING)
        target.settle(now)
        room = reserve(target, prompt, held, now)
        if not isinstance(room, SlotsReserved):
            return TransferResult(TransferOutcome.NO_ROOM)
        target.cache.ingest.commit(room.ticket, landed_parts(target, room, held), now)
        count = count_bytes(target, room, held)
        self.count += 1
        self.bytes += count
        return TransferResult(TransferOutcome.LANDED, held, count)


def infinite(setup: SimSetup) -> SimSetup:
    """Return the same fleet with devices that hold everything and links that take no time."""
    links = msgspec.structs.replace(setup.links, nic_gb_s=FREE_GB_S, nic_ms=0.0)
    return msgspec.structs.replace(
        setup, oracle="infinite", kv_bytes=KV_BYTES, links=links, seats=None, prefill_workers=0
    )
