"""This module puts a simulated fleet together from its SimSetup. Wiring only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.policies import EVICTION_POLICIES
from ownerserve.cache.policies.base import EvictionPolicy
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import Geometry
from ownerserve.kv.messages import Tier
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.kv.specs import ModelSpec
from ownerserve.plan.cost.prices import Medium
from ownerserve.router.admission import SessionAdmission
from ownerserve.router.entry.queue import AdmissionQueue
from ownerserve.router.entry.running import RunningLimit
from ownerserve.router.learning import Learning
from ownerserve.router.policies import RoutingPolicy, make_policy
from ownerserve.router.policies.apart import lacking, unmet
from ownerserve.router.policies.pulling import Pulling
from ownerserve.router.settings import PRIOR, Settings, WorkloadFacts, by_hand, derive
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Profile, Speed, WorkerRole
from ownerserve.sim.config.setup import PCIE_MS, Links, SimSetup
from ownerserve.sim.engine.batch import BatchLimits, NodeHooks
from ownerserve.sim.engine.engine import SimEngine
from ownerserve.sim.engine.pace import Pace, load_pace, load_pace_file
from ownerserve.sim.fleet.admission import SimAdmissionQueue
from ownerserve.sim.fleet.fleet import SimFleet
from ownerserve.sim.fleet.gap_moves import SimGapMoves
from ownerserve.sim.fleet.gateway import SimGateway
from ownerserve.sim.fleet.ownership import SimOwnership
from ownerserve.sim.fleet.told import ResidencyNews
from ownerserve.sim.injector import Injector
from ownerserve.sim.oracle.horizon import PARTS, Foresight, NextUse
from ownerserve.sim.oracle.infinite import FreeTransfer, FreeTransfers
from ownerserve.sim.storage.layout import slots_for, unit_model
from ownerserve.sim.storage.nodeport import SimNode
from ownerserve.sim.storage.nodes import NodeMaker
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.links import Link
from ownerserve.sim.transfer.network import PeerNetwork
from ownerserve.sim.transfer.transfers import Transfers
from ownerserve.sim.worker.host import hosts_of
from ownerserve.sim.worker.worker import Machine, SimWorker
from ownerserve.sim.workload import WorkloadDriver


class BaselineParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts are what a baseline of the evaluation has of its own, made where production's would
    be. None: what the SimSetup says.

    policy     where turns run
    spec       another state of the same model: every layer dense, say
    order      eviction on the device
    node       what brings and keeps a worker's state
    transfers  between workers
    prior      what sessions are taken to be like before any was seen
    learning   how constants follow them from then on
    """

    policy: Callable[[Settings], RoutingPolicy] | None = None
    spec: Callable[[ModelSpec], ModelSpec] | None = None
    order: Callable[[], EvictionPolicy] | None = None
    node: type[SimNode] = SimNode
    transfers: Callable[[Heap, float], Transfers] | None = None
    prior: WorkloadFacts = PRIOR
    learning: type[Learning] = Learning


PRODUCTION = BaselineParts()


class Built(msgspec.Struct, frozen=True):
    """A built fleet has not begun; beside it stands what is needed to read its result."""

    heap: Heap
    fleet: SimFleet
    pace: Pace
    nodes: NodeMaker


def pace_of(name: str) -> Pace:
    """Return the shipped pace `model@gpu`, or the one in the file of that path. Raises InvalidInput
    when there is none."""
    if name.endswith(".json"):
        return load_pace_file(Path(name))
    model, at, gpu = name.partition("@")
    if not at:
        raise InvalidInput("pace", f"{name!r}", "write MODEL@GPU, or a path that ends in .json")
    return load_pace(model, gpu)


def geometry_of(pace: Pace) -> Geometry:
    """Return the geometry of the state of the pace's model."""
    return Geometry.of(build_spec(read_config(find_config(pace.config))))


def settings_of(setup: SimSetup, speed: Speed, prior: WorkloadFacts = PRIOR) -> Settings:
    """Return what the router begins with: T_hot, T_cool and the prices by the procedure of
    router.settings, before any session was seen, where not set by hand."""
    settings = derive(speed, prior, spilled_to=_spilled_to(setup))
    return by_hand(settings, hot_ms=setup.hot_ms, cool_s=setup.cool_s)


def _spilled_to(setup: SimSetup) -> Tier:
    return Tier.HOST if setup.tiers.host_bytes else Tier.DISK


def build(workload: WorkloadDriver, setup: SimSetup, parts: BaselineParts = PRODUCTION) -> Built:
    """Build the fleet with everything in place at time 0; nothing has happened. Raises InvalidInput
    when no worker offers what the policy needs."""
    heap, pace = Heap(), pace_of(setup.pace)
    geometry = geometry_of(pace)
    if parts.spec is not None:
        geometry = Geometry.of(parts.spec(geometry.spec))
    model = unit_model(geometry, workload.block_tokens)
    _check_abilities(setup, geometry.spec, workload.block_tokens)
    speed = speed_of(pace, geometry, setup.links)
    settings = settings_of(setup, speed, parts.prior)
    policies = [_policy(setup, settings, parts) for _ in range(setup.gateways)]
    routers = [
        RouterState(
            policy, settings=settings, learning=parts.learning(spilled_to=_spilled_to(setup))
        )
        for policy in policies
    ]
    make_transfers = parts.transfers or partial(_transfers, setup)
    transfers = make_transfers(heap, setup.transfer_s)
    ownership = SimOwnership(heap, delay_s=setup.directory_ms / 1000.0)
    fleet = SimFleet(
        heap, workload, routers, ownership=ownership, transfers=transfers, clients=setup.clients
    )
    for number, gateway in enumerate(fleet.gateways):
        _wire(gateway, setup, heap, number)
    if setup.oracle in PARTS:
        knows = PARTS[setup.oracle]
        fleet.foresight = Foresight(
            workload, fleet.workers, lambda turn: fleet.gateway_of(turn).router, knows=knows
        )
        if knows.next_use:
            order = partial(NextUse, fleet.foresight.next_s)
            parts = msgspec.structs.replace(parts, order=order)
    nodes = NodeMaker(setup, pace, model, heap=heap)
    make = _machines(setup, pace, nodes, parts)
    for index, host in enumerate(hosts_of(setup, heap)):
        worker = SimWorker(
            index, heap, make, host=host, unit_tokens=workload.block_tokens, listener=fleet
        )
        fleet.workers.append(worker)
    for index in setup.worker_order or range(setup.workers):
        worker = fleet.workers[index]
        fleet.join(worker, _profile(setup, worker, pace, speed), heap.now)
    if setup.gap_moves == "granted":
        for gateway in fleet.gateways:
            gateway.gaps = SimGapMoves(
                heap,
                gateway.router,
                fleet.takes,
                named=fleet.named,
                accounts=fleet.accounts,
                delay_s=ownership.delay_s,
            )
    action = unmet(policies[0], routers[0].fleet.candidates(None))
    if action is not None:
        raise lacking(setup.policy, action, setup.workers)
    Injector(heap, fleet, nodes.disks).plan(setup.faults)
    return Built(heap, fleet, pace, nodes)


def _wire(gateway: SimGateway, setup: SimSetup, heap: Heap, number: int) -> None:
    """Give the gateway its lines to the workers and its queue; of several each probes at other
    instants, as they have begun."""
    router = gateway.router
    if setup.news_ms is not None:
        gateway.news = ResidencyNews(heap, router.handle, delay_s=setup.news_ms / 1000.0)
    if setup.seats is not None or setup.queue.running_max is not None:
        gateway.admission = SimAdmissionQueue(heap, _queue(setup, router), router.sessions)
    if setup.gateways > 1:
        gateway.probe(setup.probe_s * (number + 1) / setup.gateways, setup.probe_s)


def _queue(setup: SimSetup, router: RouterState) -> AdmissionQueue:
    """Return the queue before the fleet, as a gateway makes it."""
    running_max = setup.queue.running_max
    return AdmissionQueue(
        None if setup.seats is None else SessionAdmission(router.fleet, setup.seats),
        None if running_max is None else RunningLimit(router.fleet, running_max),
        settings=setup.queue,
        running=lambda: router.live,
    )


def _check_abilities(setup: SimSetup, spec: ModelSpec, block_tokens: int) -> None:
    why = setup.granted.why_not(spec, block_tokens=block_tokens, step_tokens=setup.step_tokens)
    if why is not None:
        problem = f"{setup.abilities} replays nothing of {spec.family}: {why}"
        raise InvalidInput("abilities", problem, "use --engine-abilities vllm, which is the same")


def _policy(setup: SimSetup, settings: Settings, parts: BaselineParts) -> RoutingPolicy:
    if setup.oracle == "infinite":
        return FreeTransfer()
    if parts.policy:
        return parts.policy(settings)
    policy = make_policy(setup.policy, settings)
    return Pulling(policy) if setup.pulls == "cheaper" else policy


def _transfers(setup: SimSetup, heap: Heap, timeout_s: float) -> Transfers:
    gb_s = setup.links.switch_gb_s
    switch = Link("switch", _medium(gb_s, 0.0), heap) if gb_s else None
    kind = FreeTransfers if setup.oracle == "infinite" else Transfers
    return kind(PeerNetwork(heap, switch=switch), timeout_s=timeout_s)


def _medium(gb_s: float, latency_ms: float) -> Medium:
    return Medium(latency_ms, gb_s * 1e6)


def speed_of(pace: Pace, geometry: Geometry, links: Links) -> Speed:
    """Return the speed that the router is told of such a worker."""
    media = {
        Tier.HOST: _medium(links.pcie_gb_s, PCIE_MS),
        Tier.DISK: _medium(links.disk_gb_s, links.disk_ms),
        Tier.PEER: _medium(links.nic_gb_s, links.nic_ms),
        Tier.REMOTE: _medium(links.remote_gb_s, links.remote_ms),
    }
    return msgspec.structs.replace(pace.speed(geometry), media=media)


def _profile(setup: SimSetup, worker: SimWorker, pace: Pace, speed: Speed) -> Profile:
    role = WorkerRole.HYBRID
    if setup.prefill_workers:
        role = WorkerRole.PREFILL if worker.index < setup.prefill_workers else WorkerRole.DECODE
    own = {Tier.HOST: setup.tiers.host_bytes, Tier.DISK: setup.tiers.disk_bytes}
    return Profile(
        model=pace.model,
        spec_digest=pace.name,
        role=role,
        speed=speed,
        actions=setup.granted.actions,
        kv_bytes_total=worker.kv_bytes_total,
        tier_bytes={tier: count for tier, count in own.items() if count},
    )


def _machines(
    setup: SimSetup, pace: Pace, nodes: NodeMaker, parts: BaselineParts
) -> Callable[[SimWorker], Machine]:
    """Return the maker of each life of a worker."""
    order = parts.order or EVICTION_POLICIES.get(setup.cache_policy)
    if order is None:
        known = ", ".join(sorted(EVICTION_POLICIES))
        raise InvalidInput("cache_policy", f"{setup.cache_policy!r}", f"use one of {known}")
    limits, model = BatchLimits(setup.step_tokens, setup.running), nodes.model
    sizes = slots_for(model.layout, setup.kv_bytes or pace.kv_bytes_total, setup.running)
    truly = [pace.slowed(factor) for factor in setup.step_factors]

    def make(worker: SimWorker) -> Machine:
        cache = HeteroCache(
            model.layout, sizes.slots, sizes.state_slots, order(), least_points=sizes.least_points
        )
        node = nodes.node(worker, cache, kind=parts.node)
        engine = SimEngine(
            cache,
            truly[worker.index % len(truly)],
            limits,
            unit_tokens=model.unit_tokens,
            longest_fold=setup.longest_fold,
            hooks=NodeHooks(node.resume, node.checkpoints),
        )
        return Machine(cache, engine, node)

    return make
