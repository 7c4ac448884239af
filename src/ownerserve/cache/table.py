"""Where a running sequence's state is: what the engine's kernels read. No torch."""

from __future__ import annotations

import msgspec

from ownerserve.cache.tails import TailBook


class Table(msgspec.Struct):
    """Slots of one running sequence.

    `range` maps each range component to the slots of blocks 0, 1, ...: tokens [i*B, (i+1)*B) are in
    slot `range[component][i]`. `state` is the live state block, `tails` what waits in it.
    """

    range: dict[str, list[int]]
    state: int
    tails: TailBook = msgspec.field(default_factory=TailBook)
