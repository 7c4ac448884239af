"""This module says what fleet each of the demo's policies runs on: the workers' roles, and what its
gateway is told. Pure.

| name | policy | workers |
|---|---|---|
| static_pd, static_pd_delta, round_robin_pd | the same | half of them prefill, the others decode |
| pd_hybrid | ownerserve | the same; long prompts may be computed at a prefill worker, by price |
| all others | the same | all hybrid |
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.router.policies import ROUTING_POLICIES, make_policy
from ownerserve.router.policies.apart import NEEDS

PD_HYBRID = "pd_hybrid"
SPLITTING = tuple(name for name in ROUTING_POLICIES if make_policy(name).needs & NEEDS)
ALL_POLICIES = (*ROUTING_POLICIES, PD_HYBRID)
LONG_TOKENS = 256
"""From so many new tokens on a turn is long there: the demo scales prompts down to a few thousand
tokens at most, and the default is for contexts of a hundred thousand."""


class DemoRun(msgspec.Struct, frozen=True):
    """A run is a policy on a fleet: the router's name of it, each worker's role, and what its
    gateway is told besides."""

    policy: str
    roles: tuple[str, ...]
    gateway_arguments: tuple[str, ...] = ()


def can_run(names: Sequence[str], workers: int) -> tuple[str, ...]:
    """Return those of the names that so many workers are enough for."""
    return tuple(name for name in names if workers > 1 or not _splits(name))


def run_of(name: str, workers: int) -> DemoRun:
    """Return the run called `name` on so many workers. Raises InvalidInput where they are too few
    to compute prompts apart."""
    if not _splits(name):
        return DemoRun(name, ("hybrid",) * workers)
    if workers < 2:
        raise InvalidInput(
            "--workers", f"{name} has prompts computed at another worker", "give it 2 or more"
        )
    prefill = workers // 2
    roles = ("prefill",) * prefill + ("decode",) * (workers - prefill)
    if name == PD_HYBRID:
        return DemoRun("ownerserve", roles, ("--long-tokens", str(LONG_TOKENS)))
    return DemoRun(name, roles)


def _splits(name: str) -> bool:
    """Return whether the policy is run on workers of two roles."""
    return name in SPLITTING or name == PD_HYBRID
