"""The injector performs faults on a simulated fleet: it breaks at their time and mends at their
end.

What several workers of a host share breaks for all of them. Owns which faults are on. Faults may
overlap: a worker that is down can't die again, a disk is as slow as the slowest fault makes it, and
the directory is back when the last of its faults is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import isfinite

from ownerserve.sim.config.faults import Fault, FaultKind
from ownerserve.sim.fleet.fleet import SimFleet
from ownerserve.sim.storage.tier import SimTier
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.links import Link
from ownerserve.sim.timeline.media import Pipe


class Injector:
    """The injector has the faults of one run. `disks` holds drives by the index of their worker."""

    def __init__(self, heap: Heap, fleet: SimFleet, disks: Mapping[int, SimTier]) -> None:
        self.begun = 0
        self._heap = heap
        self._fleet = fleet
        self._disks = disks
        self._slow: dict[Pipe | Link, list[float]] = {}
        self._directory_losses = 0

    def plan(self, faults: Iterable[Fault]) -> None:
        """Schedule all of the faults."""
        for fault in faults:
            self._heap.at(fault.at_s, partial(self._begin, fault))

    def _begin(self, fault: Fault, now: float) -> None:
        if fault.kind is FaultKind.DEATH and not self._fleet.workers[fault.worker or 0].is_up:
            return
        self.begun += 1
        match fault.kind:
            case FaultKind.DEATH:
                self._fleet.down(self._fleet.workers[fault.worker or 0], now)
            case FaultKind.SLOW_DISK:
                drive = self._disks[fault.worker or 0].reads
                self._slow.setdefault(drive, []).append(fault.factor)
                self._set_speed(fault.worker or 0)
            case FaultKind.LINK:
                nic = self._fleet.workers[fault.worker or 0].host.nic
                nic.out.cut(now + fault.lasts_s)
                nic.back.cut(now + fault.lasts_s)
            case FaultKind.DIRECTORY:
                self._directory_losses += 1
                self._fleet.ownership.lose()
        if isfinite(fault.lasts_s):
            self._heap.at(now + fault.lasts_s, partial(self._end, fault))

    def _end(self, fault: Fault, now: float) -> None:
        match fault.kind:
            case FaultKind.DEATH:
                self._fleet.back(self._fleet.workers[fault.worker or 0], now)
            case FaultKind.SLOW_DISK:
                self._slow[self._disks[fault.worker or 0].reads].remove(fault.factor)
                self._set_speed(fault.worker or 0)
            case FaultKind.LINK:
                pass  # the pipes know until when they are cut
            case FaultKind.DIRECTORY:
                self._directory_losses -= 1
                if not self._directory_losses:
                    self._fleet.ownership.restore(now)

    def _set_speed(self, worker: int) -> None:
        disk = self._disks[worker]
        for way in (disk.reads, disk.writes):
            way.slow(max(self._slow[disk.reads], default=1.0))
