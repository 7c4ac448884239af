"""This module has the fleet that most experiments share, and the policies by name.

Owns the sizes: every experiment that keeps to `agents` runs on equal hardware and equal turns, and
equal runs are simulated once for all of them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ownerserve.router.admission import SeatSettings
from ownerserve.sim.config.setup import PD, SimSetup, Tiers
from ownerserve.sim.suites.base import Scale, Simulation
from ownerserve.sim.workload import Capped, Sample, WorkloadShape

WORKERS = 4
PACE = "qwen3-30b-a3b@h200"
SESSIONS = 96
"""Drawn by the seed from the trace: about 6,000 turns of the Claude-Code trace."""
GOAL_LANES = (8, 24, 32, 48)
"""Sessions at once, from far below what this fleet's device memory holds to far above it."""
LANES = 32
"""The load at which single comparisons are made: somewhat above the knee."""

SEED_002 = ("round_robin", "lmetric", "kv_aware", "sticky", "static_pd", "ear")
"""Seed 002 §5.1, in its order: load balance, LMetric, KV-aware, sticky, static PD, EAR."""
STRONGER = ("lmetric_gate", "dynamo", "ttft_gate", "program_ttl", "static_pd_delta")
"""The baselines of this project's own, each stronger than the seed's of its kind."""
OURS = "ownerserve"
SEATED = "ownerserve + seats"
EVERY = (*SEED_002, *STRONGER, OURS, SEATED)
"""What `agents` knows by name: router policies, and any of them with seats."""

SEATS = SeatSettings(share=1.0, patience_s=86_400.0)
"""A lane's next session waits for as long as it takes: nobody hangs up in these runs."""


def agents(
    policy: str,
    scale: Scale,
    *,
    lanes: int = LANES,
    sessions: int = SESSIONS,
    workers: int = WORKERS,
    tiers: Tiers | None = None,
    **changes: Any,
) -> SimSetup:
    """Return the setup of Claude-Code sessions on WORKERS GPUs; the next begins when one of `lanes`
    ends.

    `policy` may end with " + seats": new sessions wait until their context fits (router.admission).
    `changes`: fields of Shape where it has them, else of Setup. Half of the workers prefill for
    policies that split.
    """
    name, _, seats = policy.partition(" + ")
    shape = WorkloadShape(mode=Capped(scale.of(lanes, 4)), sessions=Sample(scale.of(sessions, 8)))
    of_shape = {
        field: value for field, value in changes.items() if field in WorkloadShape.__struct_fields__
    }
    of_setup = {field: value for field, value in changes.items() if field not in of_shape}
    count = min(workers, scale.of(workers, 2))
    return SimSetup(
        **{
            "policy": name,
            "seats": SEATS if seats else None,
            "workers": count,
            "prefill_workers": count // 2 if name in PD else 0,
            "pace": PACE,
            "tiers": tiers or Tiers(),
            "shape": msgspec.structs.replace(shape, **of_shape),
            **of_setup,
        }
    )


def simulate(policy: str, scale: Scale, **changes: Any) -> Simulation:
    """Return the job that runs `agents` on the Claude-Code trace, its plain metrics kept."""
    return Simulation("claude_code", agents(policy, scale, **changes))
