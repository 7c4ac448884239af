"""What a policy answers: where a turn runs, by which action, why, and what else it would have cost.

Plain data. The state counts load by it, the gateway carries it out, receipts and metrics show it.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.extents import Copy
from ownerserve.router.messages import Reason
from ownerserve.router.worker import Worker


class Option(msgspec.Struct, frozen=True, gc=False):
    """One way to place a turn, priced (costs.py). All `_ms` terms add up to `total_ms`.

    `cached_tokens` of the prompt need no prefill this way; the state of `moved_tokens` is brought.
    """

    action: PlacementAction
    worker: Worker
    cached_tokens: int
    queue_ms: float
    compute_ms: float
    network_ms: float
    restore_ms: float
    memory_ms: float
    duplicate_ms: float
    interference_ms: float
    total_ms: float
    moved_tokens: int = 0
    source: Copy | None = None
    prefill: Worker | None = None

    def terms(self) -> dict[str, float]:
        """The terms of the cost by name, in ms."""
        return {name: getattr(self, f"{name}_ms") for name in TERMS}


TERMS = ("queue", "compute", "network", "restore", "memory", "duplicate", "interference")


class Move(msgspec.Struct, frozen=True, gc=False):
    """A session's state should go from `source` to `target`, and its ownership with it."""

    source: Worker
    target: Worker
    tokens: int


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Run the turn on `worker`.

    `cached_tokens`: how much of the prompt it is expected not to compute (compared later with what
    the engine reports). `prefill`: the worker that computes the prompt (remote_prefill). `source`:
    where to bring the state of `moved_tokens` from (artifact_fetch, state_migration,
    tail_recompute); with remote_prefill they come from `prefill`. `wanted`: a
    migration that would be right but that the worker can't perform; the action is the next best.
    `alternatives`: the ways that were priced, cheapest first; empty for policies that do not price.
    """

    worker: Worker
    action: PlacementAction
    reason: Reason
    cached_tokens: int = 0
    prefill: Worker | None = None
    source: Copy | None = None
    moved_tokens: int = 0
    wanted: Move | None = None
    alternatives: tuple[Option, ...] = ()
