"""What a policy needs and what a fleet offers: whether its turns can run as it means them to.

A policy names the placement actions without which it is another policy (`needs`). Where nobody
offers one, the gateway and the simulator refuse to start; a fleet that loses the last worker that
offers it falls back to running turns on the spot, turn by turn, for the reason `not_offered`.
"""

from __future__ import annotations

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import PlacementAction
from ownerserve.router.candidates import Candidates
from ownerserve.router.policies.apart import prefillers
from ownerserve.router.policies.base import Policy
from ownerserve.router.worker import Worker


def unmet(policy: Policy, fleet: Candidates) -> PlacementAction | None:
    """An action that `policy` needs and that no worker of `fleet` can carry out."""
    for action in sorted(policy.needs):
        if not any(_offers(worker, action, fleet) for worker in fleet):
            return action
    return None


def lacking(name: str, action: PlacementAction, workers: int) -> InvalidInput:
    """The error for an operator who asks for the policy `name` over so many workers."""
    return InvalidInput(
        "policy",
        f"{name} needs {action.value}, which none of {workers} workers offers",
        f"start workers that offer {action.value}, or use another policy (ownerserve)",
    )


def _offers(worker: Worker, action: PlacementAction, fleet: Candidates) -> bool:
    """What is computed apart needs somebody else who computes it."""
    if action is PlacementAction.REMOTE_PREFILL:
        return bool(prefillers(worker, fleet.prefilling()))
    return action in worker.profile.actions
