"""A choice says who decides in a gateway, as its operator wants it; `Rollout` makes it so.

Owns the policies of one gateway: one that goes on under a new choice keeps what it remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ownerserve.gateway.rollout.arm_books import ArmBook
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.messages import Arm, Dispatch
from ownerserve.router.policies import ROUTING_POLICIES, make_policy
from ownerserve.router.policies.base import RoutingPolicy
from ownerserve.router.rollout.shadow import Shadow, ShadowCounts
from ownerserve.router.rollout.steering import Mode, Steering, arm_of
from ownerserve.router.settings import DEFAULTS, Settings

PLAIN = "least_load"
"""The policy that decides in shadow and bypass mode."""


class RolloutChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice is what an operator says of who decides (config.Config has each field)."""

    policy: str
    mode: Mode = Mode.NORMAL
    shadow: str | None = None
    canary_policy: str | None = None
    canary_share: float = 0.0
    settings: Settings = DEFAULTS

    def check(self) -> None:
        """Raise InvalidInput that names the field at fault."""
        named = {
            "policy": self.policy,
            "shadow": self.shadow,
            "canary-policy": self.canary_policy,
        }
        for field, name in named.items():
            if name is not None and name not in ROUTING_POLICIES:
                mend = f"use one of {', '.join(ROUTING_POLICIES)}"
                raise InvalidInput(field, f"{name!r} is unknown", mend)
        if not 0.0 <= self.canary_share <= 1.0:
            raise InvalidInput("canary-share", f"is {self.canary_share}", "write 0 to 1")

    @property
    def live_policy(self) -> str:
        """The policy whose decisions are carried out, but for the canary's."""
        return self.policy if self.mode is Mode.NORMAL else PLAIN

    @property
    def shadowed_by(self) -> str | None:
        """The policy that decides beside it and does nothing; None: nobody does."""
        match self.mode:
            case Mode.NORMAL:
                return self.shadow
            case Mode.SHADOW:
                return self.policy
            case Mode.BYPASS:
                return None


class Rollout:
    """The rollout is who decides now. `steering` is what the router's state is to be told."""

    def __init__(self, choice: RolloutChoice) -> None:
        choice.check()
        self.books = {arm: ArmBook() for arm in Arm}
        self.shadows: dict[str, ShadowCounts] = {}
        """What came of each policy that decided beside the live one."""
        self._shadow: Shadow | None = None
        self.canary_workers: frozenset[WorkerId] = frozenset()
        self._policies: dict[str, RoutingPolicy] = {}
        self.choice = choice
        self.steering = self._steered()
        self._tell: Callable[[Steering, Settings], None] = _nobody

    def steer_by(self, tell: Callable[[Steering, Settings], None]) -> None:
        """Tell who decides now, and at each change, by `tell` (RouterState.steer)."""
        self._tell = tell
        tell(self.steering, self.choice.settings)

    def choose(self, choice: RolloutChoice) -> None:
        """Have turns decided so from now on. Raises InvalidInput for a choice that can't be."""
        choice.check()
        if choice.settings != self.choice.settings:
            self._policies.clear()
            self._shadow = None
        self.choice = choice
        self._steer()

    def have_canary_workers(self, workers: Iterable[WorkerId]) -> None:
        """Have the canary's sessions run at these workers alone, and no others there."""
        self.canary_workers = frozenset(workers)
        self._steer()

    @property
    def is_normal(self) -> bool:
        """Whether more than plain least load is at work: places, hand-overs, the directory."""
        return self.choice.mode is Mode.NORMAL

    def arm_of(self, session: SessionId | None, share: float | None) -> Arm:
        """Return the arm of a session, of whose tenant's sessions `share` are the canary's (None:
        the gateway's share)."""
        if session is None:
            return Arm.MAIN
        return arm_of(session, self.choice.canary_share if share is None else share)

    def sent(self, dispatch: Dispatch) -> None:
        """Count a dispatch that went to the other arm's workers."""
        is_canary = dispatch.arm is Arm.CANARY
        if self.canary_workers and (dispatch.worker in self.canary_workers) is not is_canary:
            self.books[dispatch.arm].displaced += 1

    def _steer(self) -> None:
        self.steering = self._steered()
        self._tell(self.steering, self.choice.settings)

    def _steered(self) -> Steering:
        choice, beside = self.choice, self.choice.shadowed_by
        canary = choice.canary_policy if self.is_normal else None
        self._forget_all_but({choice.live_policy, canary, choice.policy})
        if beside is None:
            self._shadow = None
        elif self._shadow is None or self._shadow.name != beside:
            # Its policy is its own: one that remembers what it chose must not choose for two.
            self._shadow = Shadow(
                beside,
                make_policy(beside, choice.settings),
                settings=choice.settings,
                counts=self.shadows.setdefault(beside, ShadowCounts()),
            )
        return Steering(
            policy=self._policy(choice.live_policy),
            canary=None if canary is None else self._policy(canary),
            canary_workers=self.canary_workers,
            shadow=self._shadow,
        )

    def _forget_all_but(self, names: set[str | None]) -> None:
        for name in self._policies.keys() - names:
            del self._policies[name]

    def _policy(self, name: str) -> RoutingPolicy:
        if name not in self._policies:
            self._policies[name] = make_policy(name, self.choice.settings)
        return self._policies[name]


def _nobody(steering: Steering, settings: Settings) -> None:
    """Tell nobody, as long as there is no router."""
