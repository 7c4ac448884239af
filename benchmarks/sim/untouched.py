"""A worker that makes no room ahead of need: blocks go when a turn wants theirs.

As vLLM, whose watermark is 0 by default, and Dynamo's mocker. Production relieves pressure earlier:
it keeps 2 to 5 % of a pool free.
"""

from __future__ import annotations

from ownerserve.cache.hetero import HeteroCache
from ownerserve.sim.nodeport import DeviceOnly
from ownerserve.sim.worker import Node, Worker


class Untouched(DeviceOnly):
    """A node that never looks at the watermarks."""

    def look(self, now: float) -> None:
        """Nothing is due."""


def untouched(worker: Worker, cache: HeteroCache) -> Node:
    """For sim.build.Parts."""
    return Untouched(cache, started=worker.started)
