"""This module makes the node of each simulated worker, and the tiers below it. Wiring only.

Owns what outlives a worker's process: its disk, and the remote tier that all share.
"""

from __future__ import annotations

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.node.vocabulary.records import Tip
from ownerserve.plan.cost.prices import Medium
from ownerserve.sim.config.setup import PCIE_MS, SimSetup
from ownerserve.sim.engine.pace import Pace
from ownerserve.sim.metrics.counters import FleetCounters
from ownerserve.sim.storage.layout import UnitModel
from ownerserve.sim.storage.nodeport import SimNode, make_node
from ownerserve.sim.storage.store import SimStore
from ownerserve.sim.storage.tier import SimTier, TierPlan
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.links import linked
from ownerserve.sim.timeline.media import duplex
from ownerserve.sim.worker.worker import SimWorker
from ownerserve.store.tiers.policy import split

BURST_S = 3600.0
"""An SSD's write budget may be spent up to an hour ahead."""


class NodeMaker:
    """The maker makes the nodes for the workers of one fleet."""

    def __init__(self, setup: SimSetup, pace: Pace, model: UnitModel, *, heap: Heap) -> None:
        self.disks: dict[int, SimTier] = {}
        self._files: dict[int, dict[SessionId, Tip]] = {}
        self._setup = setup
        self._pace = pace
        self.model = model
        links, tiers = setup.links, setup.tiers
        self._remote: SimTier | None = None
        if tiers.remote_bytes:
            medium = Medium(links.remote_ms, links.remote_gb_s * 1e6)
            plan = TierPlan(
                tier=Tier.REMOTE, limits=split(tiers.remote_bytes), read=medium, write=medium
            )
            self._remote = SimTier(plan, shared=linked("remote", medium, heap))

    def node(
        self, worker: SimWorker, cache: HeteroCache, *, kind: type[SimNode] = SimNode
    ) -> SimNode:
        """Make the node of a worker's new life: an empty host cache over the disk as it was left.

        In a fleet without tiers the node stands over a store that is always empty.
        """
        store = SimStore(self._tiers(worker), nic=worker.host.nic)
        pcie = worker.host.memory_link or duplex(
            f"{worker.name} pcie", Medium(PCIE_MS, self._setup.links.pcie_gb_s * 1e6)
        )
        state = make_node(
            cache,
            self.model,
            self._pace.prefill(self._setup.step_tokens),
            store=store,
            pcie=pcie,
            policy=self._setup.tiers.checkpoints,
            abilities=self._setup.granted.planner,
        )
        node = kind(
            state,
            store,
            pcie,
            at=worker.later,
            started=worker.started,
            checkpoint=lambda turns: worker.machine.engine.checkpoint(turns),
        )
        if worker.index in self.disks:
            node.goes_on(self._files.setdefault(worker.index, {}), worker.heap.now)
        return node

    def tally(self, counters: FleetCounters) -> None:
        """Add to `counters` what was written to drives, and read from them."""
        for reads in {disk.reads for disk in self.disks.values()}:  # one for all of a host
            counters.ssd_read_bytes += reads.moved_bytes
        for disk in self.disks.values():
            if disk.segments is not None:
                counters.ssd_new_bytes += disk.segments.appended_bytes
                counters.ssd_written_bytes += disk.segments.written_bytes

    def _tiers(self, worker: SimWorker) -> list[SimTier]:
        setup, links = self._setup.tiers, self._setup.links
        found: list[SimTier] = []
        if setup.host_bytes:
            # A copy in host memory is limited by memory, not by a link: PCIe is paid apart.
            fast = Medium(0.0, 2.0 * links.pcie_gb_s * 1e6)
            plan = TierPlan(tier=Tier.HOST, limits=split(setup.host_bytes), read=fast, write=fast)
            found.append(SimTier(plan, f"{worker.name} host"))
        if setup.disk_bytes:
            if worker.index not in self.disks:
                self.disks[worker.index] = self._disk(worker)
            found.append(self.disks[worker.index])
        if self._remote is not None:
            found.append(self._remote)
        return found

    def _disk(self, worker: SimWorker) -> SimTier:
        setup, links = self._setup.tiers, self._setup.links
        budget = None
        if setup.disk_bytes_per_day is not None:
            if setup.disk_bytes_per_day <= 0:
                raise InvalidInput(
                    "disk_bytes_per_day", f"{setup.disk_bytes_per_day}", "leave it out for no limit"
                )
            budget = (setup.disk_bytes_per_day, setup.disk_bytes_per_day * BURST_S / 86400.0)
        medium = Medium(links.disk_ms, links.disk_gb_s * 1e6)
        plan = TierPlan(
            tier=Tier.DISK, limits=split(setup.disk_bytes), read=medium, write=medium, budget=budget
        )
        return SimTier(plan, f"{worker.name} disk", shared=worker.host.drive)
