"""This module says what a simulated engine may do, and which of it no real worker does yet.

Owns the four sets by name. What the node may plan are the records that the engines state
(plan.inputs); what the router may place is what their workers offer (router.worker). `ideal`
grants all that is designed: what of that is modelled and not yet built is said wherever a result
is shown.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from ownerserve.kv.messages import PlacementAction
from ownerserve.kv.specs import ModelSpec
from ownerserve.plan.inputs import ENGINES, Abilities
from ownerserve.plan.window_replay import why_no_window_replay
from ownerserve.router.worker import EVERY_ACTION, EVERY_ENGINE

EngineAbilities: TypeAlias = Literal["ideal", "hf", "vllm", "vllm-replay"]
REPLAYING: EngineAbilities = "vllm-replay"
"""Replays windows of paged state alone, as plan.window_replay says."""
FROM_TIERS = frozenset({PlacementAction.TAIL_RECOMPUTE})
"""Needs a tier below the device, whoever the engine is."""


class Granted(msgspec.Struct, frozen=True):
    """A granted set is what one kind of engine may do.

    `planner`: what the node plans with; `actions`: what the router may decide; `not_built`: of
    these, what is modelled here and no real worker does.
    """

    name: EngineAbilities
    planner: Abilities
    actions: frozenset[PlacementAction]
    not_built: tuple[str, ...] = ()

    def why_not(self, spec: ModelSpec, *, block_tokens: int, step_tokens: int) -> str | None:
        """Return why no engine of this set does for such a model what the set grants; None when
        one does."""
        if self.name != REPLAYING:
            return None
        return why_no_window_replay(spec, block_tokens=block_tokens, step_tokens=step_tokens)

    def told(self) -> dict[str, Any]:
        """Return the set as plain data, for a report."""
        return {
            "name": self.name,
            "planner": msgspec.to_builtins(self.planner),
            "actions": sorted(action.value for action in self.actions),
            "modelled_not_built": list(self.not_built),
        }

    def words(self) -> str:
        """Return the set in one line, for people."""
        able = [name for name, value in self.told()["planner"].items() if value is True]
        line = (
            f"engine abilities: {self.name} ({', '.join(able) or 'none of the optional ones'}; "
            f"lands in {self.planner.landing_tier}); placements: "
            f"{', '.join(self.told()['actions'])}"
        )
        if self.not_built:
            line += f"; modelled, not yet built: {', '.join(self.not_built)}"
        return line


OF_PEERS = frozenset({
    PlacementAction.ARTIFACT_FETCH,
    PlacementAction.STATE_MIGRATION,
    PlacementAction.REMOTE_PREFILL,
})  # fmt: skip
"""What a worker of ours offers that has a tier, and so a node, which reads from others' nodes
(node.runtime.stating)."""
FETCHES = frozenset({PlacementAction.ARTIFACT_FETCH})
"""What a vLLM worker with a store and transfers offers of these: it brings with a turn what a peer
holds (engines.vllm.scheduler_side.node_rpc)."""


def granted(name: EngineAbilities, *, tiers: frozenset[PlacementAction] = FROM_TIERS) -> Granted:
    """Return the set called `name`. `tiers`: FROM_TIERS, or nothing for a worker without any
    tier."""
    if name != "ideal":
        below = tiers | (OF_PEERS if name == "hf" else FETCHES) if tiers else tiers
        return Granted(name, ENGINES[name], EVERY_ENGINE | below)
    ideal = ENGINES[name]
    actions = EVERY_ACTION - FROM_TIERS | tiers
    return Granted(name, ideal, actions, tuple(_unlike_any_engine(ideal)))


def _unlike_any_engine(planner: Abilities) -> list[str]:
    """Return the fields of `planner` that no engine states of itself: with these a restore is
    priced, not carried out."""
    stated = [one for name, one in ENGINES.items() if name != "ideal"]
    return [
        f"{field}={getattr(planner, field)}"
        for field in planner.__struct_fields__
        if getattr(planner, field) not in {getattr(one, field) for one in stated}
    ]
