"""A node states its own figures in the words of kv.wire.status: its speed, its tiers, what it can
do.

Translates; measures and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.kv.wire.status import SpeedStatement, TierStatement
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.cost.prices import PREFILL, STEP


def actions_of(tiers: Collection[Tier]) -> tuple[str, ...]:
    """Return what a worker with these tiers can do as the one that runs the turn, sorted.

    Who brings from peers offers a move too: the state comes with the turn, and its owner lets the
    session go behind it. So does it offer `remote_prefill`: it asks a peer to compute a prompt, and
    reads what that has, while it computes.
    """
    actions = {PlacementAction.COLOCATED_PREFILL, PlacementAction.DECODE_CONTINUATION}
    if Tier.PEER in tiers:
        actions |= _OF_PEERS
    if set(tiers) - {Tier.PEER}:
        actions.add(PlacementAction.TAIL_RECOMPUTE)
    return tuple(sorted(actions))


_OF_PEERS = {
    PlacementAction.ARTIFACT_FETCH,
    PlacementAction.STATE_MIGRATION,
    PlacementAction.REMOTE_PREFILL,
}


def speed_statement(costs: CostModel, *, replay_tokens: int) -> SpeedStatement:
    """Return prefill and decode as `costs` has them now, with the dates of their measurement."""
    prices, steps = costs.prices(), costs.steps()
    prefill = prices.prefill
    return SpeedStatement(
        prefill_pass_ms=prefill.a_ms,
        prefill_token_ms=prefill.b_ms,
        prefill_attention_ms=prefill.c_ms,
        step_ms=steps.step_ms,
        step_ms_per_sequence=steps.sequence_ms,
        replay_tokens=replay_tokens,
        prefill_measured_s=prices.measured_s.get(PREFILL),
        step_measured_s=prices.measured_s.get(STEP),
    )


def tier_statements(costs: CostModel, sizes: Mapping[Tier, int | None]) -> list[TierStatement]:
    """Return a statement for each tier of `sizes` (bytes; None: not known) with the times that
    loads from it took. A tier that the costs do not know is left out."""
    prices = costs.prices()
    return [
        TierStatement(
            name=str(tier),
            bytes_total=count,
            latency_ms=(line := prices.tiers[tier].line()).latency_ms,
            bytes_per_ms=line.bytes_per_ms,
            measured_s=prices.measured_s.get(str(tier)),
        )
        for tier, count in sizes.items()
        if tier in prices.tiers
    ]
