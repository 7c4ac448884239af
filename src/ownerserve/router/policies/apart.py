"""This module matches what policies need with what fleets offer: above all, prefill apart from
decode.

A policy names the placement actions without which it is another policy (`needs`). Where nobody
offers one, the gateway and the simulator refuse to start; a fleet that loses the last worker that
offers it falls back to running turns on the spot, turn by turn, for the reason `not_offered`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import PlacementAction
from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest, run_at
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import RoutingPolicy
from ownerserve.router.pricing import prefills_for
from ownerserve.router.worker import Worker

NEEDS = frozenset({PlacementAction.REMOTE_PREFILL})


def prefillers(worker: Worker, offered: Iterable[Worker]) -> list[Worker]:
    """Return the workers of `offered` that can prefill for `worker`; none when it can't be sent
    state."""
    return [other for other in offered if prefills_for(other, worker)]


def pair(workers: Iterable[Worker], fleet: Candidates) -> tuple[Worker, Worker] | None:
    """Return the first of `workers` that can be sent state, and the least loaded worker that can
    send it some; None when there is no such pair."""
    for worker in workers:
        able = prefillers(worker, fleet.least_prefill(2)) or prefillers(worker, fleet.prefilling())
        if able:
            return worker, able[0]
    return None


def on_the_spot(request: RoutingRequest, worker: Worker) -> Decision:
    """Decide to run the turn at `worker` itself, for the reason NOT_OFFERED: nobody can be sent
    state."""
    return run_at(request, worker, DispatchReason.NOT_OFFERED)


def unmet(policy: RoutingPolicy, fleet: Candidates) -> PlacementAction | None:
    """Return an action that `policy` needs and that no worker of `fleet` can carry out; None when
    all can be."""
    for action in sorted(policy.needs):
        if not any(_offers(worker, action, fleet) for worker in fleet):
            return action
    return None


def lacking(name: str, action: PlacementAction, workers: int) -> InvalidInput:
    """Make the error for an operator who asks for the policy `name` over workers of which none
    offers `action`."""
    return InvalidInput(
        "policy",
        f"{name} needs {action.value}, which none of {workers} workers offers",
        f"start workers that offer {action.value}, or use another policy (ownerserve)",
    )


def _offers(worker: Worker, action: PlacementAction, fleet: Candidates) -> bool:
    """Return whether the worker offers the action in this fleet; a remote prefill needs another
    worker that computes it."""
    if action is PlacementAction.REMOTE_PREFILL:
        return bool(prefillers(worker, fleet.prefilling()))
    return action in worker.profile.actions
