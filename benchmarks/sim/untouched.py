"""A worker that makes no room ahead of need: blocks go when a turn wants theirs.

As vLLM, whose watermark is 0 by default, and Dynamo's mocker. Production relieves pressure earlier:
it keeps 2 to 5 % of a pool free.
"""

from __future__ import annotations

from ownerserve.sim.storage.nodeport import SimNode


class Untouched(SimNode):
    """A node that never looks at the watermarks."""

    def look(self, now: float) -> None:
        """Nothing is due."""
