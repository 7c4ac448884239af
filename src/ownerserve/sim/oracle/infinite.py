"""This oracle has infinite cache and free transfer: what is left is compute and queueing.

    every turn -> the least loaded worker; what any worker holds of its prompt is brought there at
    once, and nothing is ever evicted

No policy can cache more or move cheaper; queueing is that of least load, so a smarter order could
still wait less: a bound on state handling, not on scheduling.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, start_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import ANY_WORKER
from ownerserve.router.pricing import peer_copy
from ownerserve.sim.config.setup import SimSetup

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


def infinite(setup: SimSetup) -> SimSetup:
    """Return the same fleet with devices that hold everything and links that take no time."""
    links = msgspec.structs.replace(setup.links, nic_gb_s=FREE_GB_S, nic_ms=0.0)
    return msgspec.structs.replace(
        setup, oracle="infinite", kv_bytes=KV_BYTES, links=links, seats=None, prefill_workers=0
    )
