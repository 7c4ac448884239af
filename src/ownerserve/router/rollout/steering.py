"""The steering says who decides about a turn: which policy for which arm, over which workers, and
who decides beside it.

| mode | decides | beside it |
|---|---|---|
| normal | the policy; for the canary's sessions the canary's, if it has one | the shadow, if any |
| shadow | plain least load | the policy, which does nothing |
| bypass | plain least load | nobody |

An arm is a part of all sessions: the same for each turn of one. Where some workers are the
canary's, its sessions run there and nobody else's does, in every mode; while none of an arm's
workers is up, its turns run at the others'. Pure: a steering is made anew when something changes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from xxhash import xxh3_64_intdigest

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.decision import Decision, Label, RoutingRequest
from ownerserve.router.fleet import Candidates
from ownerserve.router.messages import Arm
from ownerserve.router.policies.base import RoutingPolicy, TunedPolicy
from ownerserve.router.rollout.shadow import Shadow
from ownerserve.router.settings import Settings
from ownerserve.router.worker import Worker


class Mode(Label):
    """A mode says how much of OwnerServe decides where turns run."""

    NORMAL = "normal"
    SHADOW = "shadow"
    BYPASS = "bypass"


_CANARY = Arm.CANARY
_SPACE = 1 << 64


def arm_of(session: SessionId, share: float) -> Arm:
    """Return the arm of a session, of whose like `share` (0 to 1) are the canary's. A share that
    grows takes sessions in and lets none out."""
    if share <= 0.0:
        return Arm.MAIN
    is_canary = xxh3_64_intdigest(f"canary/{session}".encode()) < share * _SPACE
    return Arm.CANARY if is_canary else Arm.MAIN


class Steering(msgspec.Struct, frozen=True, kw_only=True):
    """A steering is who decides now. `canary` None: the policy, for the canary's sessions too."""

    policy: RoutingPolicy
    canary: RoutingPolicy | None = None
    canary_workers: frozenset[WorkerId] = frozenset()
    shadow: Shadow | None = None

    def tune(self, settings: Settings) -> None:
        """Have everybody who decides do so by `settings` from now on."""
        for policy in (self.policy, self.canary):
            if isinstance(policy, TunedPolicy):
                policy.tune(settings)
        if self.shadow is not None:
            self.shadow.tune(settings)

    def eligible(self, everyone: Candidates, arm: Arm) -> Candidates:
        """Return those of `everyone` where turns of the arm run."""
        if not self.canary_workers or not everyone:
            return everyone
        own = everyone.without(self._others(everyone.everyone(), arm))
        return own or everyone

    def _others(self, workers: Iterable[Worker], arm: Arm) -> set[Worker]:
        """Return those of `workers` that are the other arm's."""
        return {one for one in workers if (one.id in self.canary_workers) is not (arm is _CANARY)}

    def decide(self, request: RoutingRequest, candidates: Candidates, arm: Arm) -> Decision:
        """Choose a worker of `candidates` for the request, and say why."""
        return self._decider(arm).decide(request, candidates)

    def moves(self, arm: Arm) -> bool:
        """Return whether who decides for the arm ever moves a session for load's sake, by T_hot and
        T_cool."""
        return isinstance(self._decider(arm), TunedPolicy)

    def _decider(self, arm: Arm) -> RoutingPolicy:
        return self.canary if self.canary is not None and arm is _CANARY else self.policy

    def watched(
        self, decision: Decision, request: RoutingRequest, candidates: Candidates
    ) -> Decision:
        """Return the decision with what the shadow would have done, which changes nothing of
        it."""
        if self.shadow is None:
            return decision
        beside = self.shadow.judge(decision, request, candidates)
        return msgspec.structs.replace(decision, beside=beside)
