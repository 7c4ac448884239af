"""Who is compared: by name, with the setup that the name means.

    ours                      what ships: the defaults of SimSetup and SeatSettings, seats on
    ours, no heat moves       the same, but an owner is never too hot for its session
    ours, POLICY              the same door, and another policy behind it
    POLICY                    a router policy (router.policies) without seats; all get the same news
    POLICY, pulls             the same, and what the worker that it chooses lacks comes from a peer
                              where that is cheaper than computing it, as some originals do
                              (router.policies.pulling says which)
    POLICY + seats SHARE      either, sessions inside bounded to that share of memory: each until
                              300 s after its last turn, and let in at once when it is back
    CONTENDER, belady         the same, its evictors told when each conversation goes on
    pool GB/S                 all workers' host memory as one store behind least_load (Mooncake):
                              each reads it at so many GB/s; only where there is host memory
    bound                     memory without end, links that take no time

The *reference* is the best of some contenders that are told the future (REFERENCE): who does more
work than it by over 1 % shows that it is no reference.
"""

from __future__ import annotations

import random
from math import exp

import msgspec

from goal.families import Case
from ownerserve.router.admission import SeatSettings
from ownerserve.sim.config.setup import PD, Links, SimSetup, Tiers
from ownerserve.sim.oracle.infinite import infinite
from ownerserve.sim.suites.fleet import PACE, WORKERS
from ownerserve.sim.workload import Capped, Sample, WorkloadShape

OURS, BOUND = "ours", "bound"
SHARES = (0.45, 0.8, 1.0, 1.5)
"""The smallest wins where engines are busy and a context takes a third of a worker (mini-swe)."""
NEVER_MS = 1e12
DAY_S = 86_400.0
"""Nobody's client hangs up here."""
SEATS, BELADY, PULLS = " + seats ", ", belady", ", pulls"
UNMOVED = "ours, no heat moves"
GATED = "ours, lmetric_gate"

BARE = (
    "ownerserve",
    "ear",
    "sticky",
    "ttft_gate",
    "lmetric_gate",
    "lmetric",
    "kv_aware",
    "dynamo",
    "smetric",
    "preble",
    "llm_d_precise",
    f"kv_aware{PULLS}",
    f"dynamo{PULLS}",
    f"llm_d_precise{PULLS}",
    f"least_load{PULLS}",
)
MAIN = ("ownerserve", "ear", "lmetric_gate")
"""Rivals of the short table: the others lie behind one of these in every table so far."""
REFERENCE = tuple(
    f"{name}{BELADY}"
    for name in (
        OURS,
        "sticky + seats 1.0",
        "lmetric_gate + seats 1.0",
        "lmetric_gate + seats 1.5",
        *(f"ownerserve{SEATS}{share}" for share in SHARES),
        "ownerserve",
    )
)

POOL = "pool "
POOLS = ("pool 25", "pool 50")
POOL_MS = 0.5

GROWTH_TOKENS = 40_000
"""By how much a new session is expected to grow, by hand: fitted on the shared recording."""

PACE_SIGMA = 0.05
"""How far, in ln, a fleet is from the pace that all are told: drawn for each draw and perturbation
but the first, the same for everybody."""
WORKER_SIGMA = 0.01
"""How far, in ln, each of its workers is from the fleet's pace, drawn alike."""
PERTURBATIONS: tuple[dict[str, object], ...] = (
    {},
    {"step_tokens": 8_356},
    {"worker_order": (2, 0, 3, 1)},
    {"step_tokens": 8_028},
    {"transfer_s": 30.6},
    {"transfer_s": 29.4},
)
"""Each changes a limit by 2 %, or who is taken of workers that are as good, which nobody would call
another fleet; how fast it truly is is drawn beside. Of workers that are equal to the digit an order
changes but the names (tests/sim/test_worker_order.py): so each has a pace of its own, as machines
have."""


def rivals(which: str) -> tuple[str, ...]:
    """Return the rivals of a table: "main" or "all", with every share of seats and without."""
    policies = MAIN if which == "main" else BARE
    seated = (f"{policy}{SEATS}{share}" for policy in policies for share in SHARES)
    return (*policies, *seated)


def setup_of(contender: str, case: Case, perturbation: int) -> SimSetup:
    """Return the fleet of a contender in a case. Raises InvalidInput for a name that is none."""
    name = contender.removesuffix(BELADY)
    policy, _, share = name.partition(SEATS)
    seats = fixed_seats(float(share)) if share else None
    links, tiers = Links(), Tiers(host_bytes=case.host_bytes)
    if name in (OURS, BOUND, UNMOVED):
        policy, seats = "ownerserve", SeatSettings()
    elif name.startswith(f"{OURS}, "):
        policy, seats = name.removeprefix(f"{OURS}, "), SeatSettings()
    elif name.startswith(POOL):
        policy, gb_s = "least_load", float(name.removeprefix(POOL))
        tiers = Tiers(remote_bytes=WORKERS * case.host_bytes)
        links = Links(nic_gb_s=gb_s, remote_gb_s=WORKERS * gb_s, remote_ms=POOL_MS)
    pulls, policy = policy.endswith(PULLS), policy.removesuffix(PULLS)
    setup = SimSetup(
        policy=policy,
        pulls="cheaper" if pulls else "never",
        workers=WORKERS,
        prefill_workers=WORKERS // 2 if policy in PD else 0,
        pace=PACE,
        kv_bytes=case.kv_bytes,
        step_factors=_pace_factors(case, perturbation),
        seats=seats,
        hot_ms=NEVER_MS if name == UNMOVED else None,
        links=links,
        tiers=tiers,
        shape=WorkloadShape(
            mode=Capped(case.lanes), sessions=Sample(case.sessions), seed=case.draw
        ),
        oracle="horizon" if contender.endswith(BELADY) else "",
    )
    setup = msgspec.structs.replace(setup, **PERTURBATIONS[perturbation])
    return infinite(setup) if contender == BOUND else setup


def fixed_seats(share: float) -> SeatSettings:
    """Return seats as a share by hand: no law sets how long they are kept, nobody waits twice."""
    kept_s = SeatSettings().idle_s
    return SeatSettings(
        share=share,
        overbooked=1.0,
        growth_tokens=GROWTH_TOKENS,
        idle_least_s=kept_s,
        return_s=0.001,
        patience_s=DAY_S,
    )


def _pace_factors(case: Case, perturbation: int) -> tuple[float, ...]:
    """Return how much longer than told each worker's steps take."""
    if not perturbation:
        return (1.0,)
    chance = random.Random(f"pace {case.family} {case.draw} {perturbation}")
    fleets = chance.gauss(0.0, PACE_SIGMA)
    own = [chance.gauss(0.0, WORKER_SIGMA) for _ in range(WORKERS)]
    return tuple(round(exp(fleets + one), 4) for one in own)
