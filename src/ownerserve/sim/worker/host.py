"""Hosts are the machines that simulated workers stand on: what those of one machine share.

    w0 w1 | w2 w3    two a host: each pair has one link between devices and host memory, one NIC and
      h0  |   h1     one drive, which whatever moves shares max-min fairly (timeline/links.py)

A worker alone on its host queues for its own PCIe and drive, as media do. Owns the links of a host,
which outlive its workers' lives. Must never know what moves over them.
"""

from __future__ import annotations

import msgspec

from ownerserve.plan.cost.prices import Medium
from ownerserve.sim.config.setup import PCIE_MS, Links, SimSetup
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.links import Link, linked
from ownerserve.sim.timeline.media import Duplex


class Host(msgspec.Struct, frozen=True):
    """A host is one machine: `nic` to other machines, `memory_link` between its devices and its
    memory, `drive` for all its workers' disk tiers. The last two are None for a worker alone, whose
    own queue then."""

    nic: Duplex[Link]
    memory_link: Duplex[Link] | None = None
    drive: Duplex[Link] | None = None

    def way_to(self, other: Host, *, between: tuple[Link, ...]) -> tuple[Link, ...]:
        """Return what bytes cross from a device here to one of `other`; `between` stands between
        two hosts' NICs. On one host they go over its memory and reach no NIC."""
        if other is self and self.memory_link is not None:
            return self.memory_link.out, self.memory_link.back
        return (self.nic.out, *between, other.nic.back)


def hosts_of(setup: SimSetup, heap: Heap) -> list[Host]:
    """Return the host of each worker, by index; the last host may have fewer workers."""
    size = setup.workers_per_host
    made = [_host(first, size, setup.links, heap) for first in range(0, setup.workers, size)]
    return [made[index // size] for index in range(setup.workers)]


def _host(first: int, size: int, links: Links, heap: Heap) -> Host:
    nic = Medium(links.nic_ms, links.nic_gb_s * 1e6)
    if size == 1:
        return Host(linked(f"w{first} nic", nic, heap))
    name = f"h{first // size}"
    memory_link = Medium(PCIE_MS, links.pcie_gb_s * 1e6)
    drive = Medium(links.disk_ms, links.disk_gb_s * 1e6)
    return Host(
        linked(f"{name} nic", nic, heap),
        linked(f"{name} memory", memory_link, heap),
        linked(f"{name} drive", drive, heap),
    )
