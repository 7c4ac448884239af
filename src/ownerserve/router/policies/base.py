"""This module defines the policy interface.

A policy is asked once for each request that arrives (and once for each retry), chooses among
`fleet` (never empty: all up, all serving the model, indexed by load) and says why. It reads: it
never counts load and never binds a session. The state does both, in the same way for every policy.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.decision import Decision, RoutingRequest
from ownerserve.router.fleet import Candidates
from ownerserve.router.settings import Settings

ANY_WORKER: frozenset[PlacementAction] = frozenset()
"""What a policy needs that makes do with what any engine can."""


class RoutingPolicy(Protocol):
    """A routing policy chooses where a turn runs. It may keep state of its own, fed by its own
    choices only."""

    @property
    def needs(self) -> frozenset[PlacementAction]:
        """The placement actions without which it is another policy (apart.py)."""
        ...

    def decide(self, request: RoutingRequest, fleet: Candidates) -> Decision:
        """Choose a worker of `fleet` for the request, and say why."""
        ...


@runtime_checkable
class TunedPolicy(RoutingPolicy, Protocol):
    """A tuned policy decides by numbers that follow the fleet."""

    def tune(self, settings: Settings) -> None:
        """Decide from now on by the derived numbers of `settings`, but where one is by hand."""
        ...
