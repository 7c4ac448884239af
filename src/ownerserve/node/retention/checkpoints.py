"""Which boundaries' point state a node keeps: the policy, what it learns, what it wears. Pure.

The device takes snapshots where the engine can (the prompt's last boundaries, prefill chunk ends
that the policy names, the output's last boundary); a turn's end says which of them are stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import RestoreAction, Tier
from ownerserve.node.vocabulary.events import RestoreOutcome, RestoreReport
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.inputs import ModelState
from ownerserve.plan.swa.accounting import WriteAccount
from ownerserve.plan.swa.adaptive import Adaptive, Economics
from ownerserve.plan.swa.base import Branched, CheckpointPolicy, Produced, Resumed, TurnSpan
from ownerserve.plan.swa.full import Full
from ownerserve.plan.swa.periodic import Periodic
from ownerserve.plan.swa.turn_end import TurnEnd
from ownerserve.plan.swa.zero import Zero
from ownerserve.store.format.model import ArtifactKind, Meta

SIMPLE: dict[str, Callable[[], CheckpointPolicy]] = {
    "full": Full,
    "zero": Zero,
    "turn-end": TurnEnd,
}


def policy_of(text: str, model: ModelState, costs: CostModel) -> CheckpointPolicy:
    """The policy that `text` names: full, periodic:N (tokens), zero, turn-end or adaptive."""
    name, _, period = text.partition(":")
    if name in SIMPLE and not period:
        return SIMPLE[name]()
    if name == "adaptive" and not period:
        return Adaptive(economics(model, costs))
    if name == "periodic" and period.isdigit() and int(period):
        return Periodic(int(period))
    mend = "use full, periodic:N (tokens), zero, turn-end or adaptive"
    raise InvalidInput("checkpoints", repr(text), mend)


def economics(model: ModelState, costs: CostModel) -> Economics:
    """What a checkpoint costs and saves, by the present prices."""
    return Economics(
        point_bytes=model.point_bytes,
        ms_per_token=max(costs.prices().prefill.b_ms, 1e-6),
        load_ms=costs.load(Tier.DISK, model.point_bytes).ms,
        replay_tokens=model.exact_replay_tokens,
    )


class Checkpoints:
    """One node's policy and its account."""

    def __init__(self, policy: CheckpointPolicy, model: ModelState, costs: CostModel) -> None:
        self.policy = policy
        self.account = WriteAccount()
        self.spilled_slots: Counter[str] = Counter()
        self._model = model
        self._costs = costs

    def during(self, start: int, prompt_end: int) -> frozenset[int]:
        """Positions of a prompt at which the engine should take a snapshot when it passes them."""
        span = TurnSpan(start, prompt_end, prompt_end, self._model.block_tokens)
        return frozenset(self.policy.checkpoints(span))

    def ended(self, span: TurnSpan) -> set[int]:
        """Depths whose point state is to be stored, now that the turn is over."""
        self.policy.observe(Produced(span))
        return {at // span.block_tokens for at in self.policy.checkpoints(span)}

    def restored(self, report: RestoreReport, turn_ends: frozenset[int]) -> None:
        """Learn from a restore: the session's own turn end, or a branch from inside."""
        if report.outcome is not RestoreOutcome.LOADED or report.plan is None:
            return
        way = report.plan.chosen
        is_loaded = any(step.action is RestoreAction.LOAD_POINT for step in way.steps)
        if is_loaded or way.position // self._model.block_tokens in turn_ends:
            self.policy.observe(Resumed(way.position))
        else:
            self.policy.observe(Branched(way.position))
        self.account.read_point(report.loaded_point_bytes)

    def kept(self, meta: Meta, payload_bytes: int) -> None:
        """A record was written."""
        self.spilled_slots[meta.component] += meta.units
        if meta.kind is ArtifactKind.RANGE:
            self.account.wrote_range(payload_bytes)
        else:
            self.account.wrote_points(payload_bytes, records=1)

    def reprice(self) -> None:
        """Give the policy the present prices."""
        if isinstance(self.policy, Adaptive):
            self.policy.reprice(economics(self._model, self._costs))
