"""A policy as it chooses, over engines that pull: what the chosen worker lacks of the prompt comes
from a peer that has it, where that is cheaper than what the worker would do by itself.

Some originals of our baselines run over engines that do this, below the router or named by it:

| original | how |
|---|---|
| llm_d_precise | llm-d's `p2p-source-producer`: once a worker is chosen, it names a peer with |
| | the most of the prefix, and the engine reads that over NIXL (experimental there). Its |
| | guide leaves placement as it is; another set of weights goes by load (`least_load`) |
| dynamo | KVBM (v2): the connector asks its hub who has the blocks, and pulls them over NIXL |
| kv_aware | production-stack over LMCache, whose engines pull from peers (`enable_p2p`) |

Preble, SMetric, and LMetric with its gate are rules for where a turn runs: nothing that we read of
them states a way between engines, so that what is not where they send a turn is computed anew. A
pool that all read (Mooncake's, HiCache's third level) is no peer: it is a store tier, which nodes
read by themselves.

Unlike there, a peer sends from its device too, where llm-d's and KVBM's send from host memory; the
prices of router.pricing decide, where llm-d pulls from a set count of tokens on; and state comes
before the turn enters its worker's queue, where vLLM's connectors load when it is scheduled.
"""

from __future__ import annotations

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.decision import Decision, Option, RoutingRequest, bring_to
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import RoutingPolicy
from ownerserve.router.pricing import PlacementPricer, peer_copy, stored_copy
from ownerserve.router.sessions import Copy
from ownerserve.router.settings import DEFAULTS
from ownerserve.router.worker import Worker


class Pulling:
    """The policy takes the choice of another one, and adds where state is brought from. It keeps no
    state of its own."""

    def __init__(self, base: RoutingPolicy) -> None:
        self._base = base
        self._pricer = PlacementPricer(DEFAULTS)  # its weights touch no term that is used here

    @property
    def needs(self) -> frozenset[PlacementAction]:
        """What the policy that chooses needs: where nobody fetches, nothing is pulled."""
        return self._base.needs

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose the worker that the other policy does, for its reason, and pull where that is
        cheaper."""
        decision = self._base.decide(request, fleet)
        worker = decision.worker
        if decision.action not in _ON_THE_SPOT or _FETCH not in worker.profile.actions:
            return decision
        peer = self._cheaper_peer(request, worker)
        if peer is None:
            return decision
        return bring_to(request, worker, decision.reason, action=_FETCH, source=peer)

    def _cheaper_peer(self, request: RoutingRequest, worker: Worker) -> Copy | None:
        """Return the copy to pull; None: no peer has more than `worker`, or what that has more is
        computed, or loaded from its own tiers, sooner than it comes."""
        peer = peer_copy(request, worker)
        if peer is None or request.spec_digest != worker.profile.spec_digest:
            return None
        if min(peer.tokens, request.known_tokens) <= request.reusable_on(worker):
            return None
        pricer = self._pricer
        alone_ms = _spent_ms(pricer.local(request, worker))
        stored = stored_copy(request, worker)
        if stored is not None and stored.tokens > request.cached_on(worker):
            loaded = pricer.bring(request, worker, action=_RESTORE, source=stored)
            alone_ms = min(alone_ms, _spent_ms(loaded))
        pulled = pricer.bring(request, worker, action=_FETCH, source=peer)
        return peer if _spent_ms(pulled) < alone_ms else None


def _spent_ms(option: Option) -> float:
    """Return what the state's way and the rest's computation take: all that differs between ways to
    run a turn at one worker, but for what memory is worth."""
    return option.compute_ms + option.network_ms + option.restore_ms


_FETCH = PlacementAction.ARTIFACT_FETCH
_RESTORE = PlacementAction.TAIL_RECOMPUTE
_ON_THE_SPOT = (PlacementAction.COLOCATED_PREFILL, PlacementAction.DECODE_CONTINUATION)
