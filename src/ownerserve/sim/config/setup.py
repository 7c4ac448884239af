"""The setup says what is simulated: a fleet's hardware, its policy and its rules. Plain data with
defaults.

Owns every setting of a simulated fleet and its unit, once. `run` builds from it; a sweep varies it.
"""

from __future__ import annotations

from math import inf
from typing import Literal

import msgspec

from ownerserve.cache.policies import DEFAULT_EVICTION
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import PlacementAction
from ownerserve.router.admission import SeatSettings
from ownerserve.router.entry.queue import QueueSettings
from ownerserve.router.policies import ROUTING_POLICIES, TUNED
from ownerserve.sim.config import faults
from ownerserve.sim.config.clients import ClientSettings
from ownerserve.sim.config.faults import Fault
from ownerserve.sim.config.granted import FROM_TIERS, EngineAbilities, Granted, granted
from ownerserve.sim.engine.batch import FOLD_MAX
from ownerserve.sim.workload import WorkloadShape

Oracle = Literal["", "infinite", "horizon", "next-use", "places", "residents", "places-residents"]
AT_LEAST_ONE = (
    "workers",
    "workers_per_host",
    "gateways",
    "step_tokens",
    "running",
    "longest_fold",
)
PD = ("static_pd", "static_pd_delta", "round_robin_pd")
"""Policies that want workers of two kinds."""


PCIE_MS = 0.05
"""Latency of a copy between a device and host memory."""


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """The links are the media around a host, which its workers share: GB/s of each direction, ms of
    latency."""

    nic_gb_s: float = 12.5
    nic_ms: float = 0.5
    switch_gb_s: float = 0.0
    """All that goes from worker to worker shares this bandwidth; 0: the switch never blocks."""
    pcie_gb_s: float = 51.2
    disk_gb_s: float = 3.0
    disk_ms: float = 0.3
    remote_gb_s: float = 1.0
    remote_ms: float = 8.0


class Tiers(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers are the room below the device, for each worker; remote is one for all. Without any
    there is no node, and what leaves the device is gone."""

    host_bytes: int = 0
    disk_bytes: int = 0
    remote_bytes: int = 0
    checkpoints: str = "turn-end"
    """node.retention.checkpoints: full, periodic:N, zero, turn-end, branches or adaptive."""
    disk_bytes_per_day: float | None = None

    @property
    def any(self) -> bool:
        """`any` tells whether there is a tier below the device."""
        return bool(self.host_bytes or self.disk_bytes or self.remote_bytes)


class SimSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A setup is one fleet and how it is driven.

    policy            where turns run: a router policy (POLICIES)
    workers           routing units; of these `prefill_workers` only prefill (PD)
    worker_order      all, as gateways come to know them: of those that are as good the first
                      is taken; (): as numbered
    workers_per_host  so many share a host's link to its memory, its NIC and its drive
                      (sim.worker.host); 1: each has a host of its own
    gateways          among which sessions are shared out, each with a router, a queue and seats of
                      its own; of the others' turns they know what workers say
    probe_s           how often each of several asks every worker for its load
    clients           how often they ask again for a turn, and how long they wait
    pace              model@gpu of a shipped pace (sim.engine.pace), or a file of one's own
    kv_bytes          device memory for state of a worker; 0: what the pace's GPUs have
    step_factors      by how much longer than the pace says a worker's steps take, by worker in
                      turn; nobody is told: stragglers, or a pace that is wrong
    step_tokens       tokens of prefill and decode in one engine step
    running           sequences that an engine runs at once
    longest_fold      decode steps in one event at most; 1 simulates every step
    gap_moves         whether gateways have idle sessions moved, and hot prefixes copied, between
                      turns where a decision wanted it: granted, or never
    pulls             whether a policy that brings nothing has what a peer holds brought where it
                      sends a turn: never, or where that is cheaper (router.policies.pulling)
    transfer_s        after so long without room a transfer is given up
    cache_policy      eviction order on the device (cache.policies)
    abilities         what engines may do: ideal, or what hf, vllm or vllm-replay workers state
                      (config.granted)
    oracle            "": none; "infinite", "horizon" or a part of that: see sim.oracle
    seats             how many sessions may run at once (router.admission); None: all that come
    queue             how many turns may run at once, and how many wait (router.entry); no limit
    hot_ms, cool_s    T_hot and T_cool; None: learnt from the sessions (router.learning)
    sample_s          how often load is sampled for heat maps and indices
    directory_ms      to the ownership directory and back
    news_ms           after so long the router hears what came to or went from any tier of a worker;
                      None: never (routing.md, residency news)
    faults            what breaks, and when
    """

    policy: str = "ownerserve"
    workers: int = 8
    prefill_workers: int = 0
    worker_order: tuple[int, ...] = ()
    workers_per_host: int = 1
    gateways: int = 1
    probe_s: float = 1.0
    clients: ClientSettings = ClientSettings()
    pace: str = "qwen3-30b-a3b@h200"
    kv_bytes: int = 0
    step_factors: tuple[float, ...] = (1.0,)
    step_tokens: int = 8192
    running: int = 256
    longest_fold: int = FOLD_MAX
    gap_moves: Literal["granted", "never"] = "granted"
    pulls: Literal["never", "cheaper"] = "never"
    transfer_s: float = 30.0
    cache_policy: str = DEFAULT_EVICTION
    abilities: EngineAbilities = "ideal"
    oracle: Oracle = ""
    seats: SeatSettings | None = None
    queue: QueueSettings = QueueSettings(waiting_max=None)
    hot_ms: float | None = None
    cool_s: float | None = None
    sample_s: float = 10.0
    directory_ms: float = 1.0
    news_ms: float | None = 50.0
    links: Links = Links()
    tiers: Tiers = Tiers()
    shape: WorkloadShape = WorkloadShape()
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in ROUTING_POLICIES:
            raise InvalidInput(
                "policy", f"{self.policy!r}", f"use one of {', '.join(ROUTING_POLICIES)}"
            )
        if self.pulls != "never" and self.policy in TUNED:
            problem = f"{self.policy} brings state by its own prices"
            raise InvalidInput("pulls", problem, "leave it, or use another policy")
        if self.policy in PD and PlacementAction.REMOTE_PREFILL not in self.granted.actions:
            raise InvalidInput(
                "policy",
                f"{self.policy} needs remote_prefill, which {self.abilities} workers do not offer",
                "use --engine-abilities ideal, or hf with a tier (--host), or another policy",
            )
        if not 0 <= self.prefill_workers < max(self.workers, 1):
            raise InvalidInput(
                "prefill_workers",
                f"{self.prefill_workers} of {self.workers} workers",
                "leave one that decodes",
            )
        if self.worker_order and sorted(self.worker_order) != list(range(self.workers)):
            problem = f"{self.worker_order} of {self.workers} workers"
            raise InvalidInput("worker_order", problem, "name each from 0 on once, or none")
        for field in AT_LEAST_ONE:
            if getattr(self, field) < 1:
                raise InvalidInput(field, f"{getattr(self, field)}", "use 1 or more")
        if not self.step_factors or not all(0.0 < one < inf for one in self.step_factors):
            raise InvalidInput("step_factors", f"{self.step_factors}", "use one or more above 0")
        if not 0.0 <= self.links.switch_gb_s < inf:
            raise InvalidInput("switch_gb_s", f"{self.links.switch_gb_s}", "use 0 or more")
        for field in ("transfer_s", "sample_s", "probe_s"):
            if getattr(self, field) <= 0:
                raise InvalidInput(field, f"{getattr(self, field)}", "use more than 0")
        if self.news_ms is not None and not 0 <= self.news_ms < inf:
            raise InvalidInput("news_ms", f"{self.news_ms}", "use 0 or more, or None for no news")
        disks = self.workers if self.tiers.disk_bytes else 0
        faults.check(self.faults, workers=self.workers, disks=disks)

    @property
    def granted(self) -> Granted:
        """What this fleet's engines may do."""
        return granted(self.abilities, tiers=FROM_TIERS if self.tiers.any else frozenset())
