"""The network between workers carries what their transfers say and send.

    say     a message: the latency of its way, which has room for all of them
    carry   a piece of state: a stream over both NICs, or over their host's memory (timeline.links)

Who is cut off says nothing and hears nothing until the cut ends. Owns no state of what is under
way. Must never know what is said.
"""

from __future__ import annotations

from ownerserve.sim.timeline.heap import Call, Heap
from ownerserve.sim.timeline.links import Link, Stream, stream
from ownerserve.sim.worker.host import Host

PIECE_BYTES = 1 << 30
"""A real lend is read in pieces of 1 MiB (transfer.control.pieces): 10,000 for a long prompt. Here
as many bytes are one read, which is all that differs: a ticket that ends is noticed so much later,
86 ms at 12.5 GB/s."""
CREDIT_BYTES = 16 << 20
"""The 1 MiB pieces that are under way at once, each of which has a read's time (transfer.control):
a read here goes on while in such a time so much of it moves."""


class PeerNetwork:
    """The peer network is what stands between the workers of one fleet. `piece_bytes`: what one
    read brings at most."""

    def __init__(
        self, heap: Heap, *, switch: Link | None = None, piece_bytes: int = PIECE_BYTES
    ) -> None:
        """`switch`: what all go over between two hosts' NICs; None where it never blocks."""
        self.heap = heap
        self.piece_bytes = piece_bytes
        self._switch = () if switch is None else (switch,)

    def say(self, source: Host, target: Host, call: Call, now: float) -> None:
        """Have `call` made where a message arrives that is said now."""
        way = source.way_to(target, between=self._switch)
        begins_s, latency_ms = now, 0.0
        for link in way:
            begins_s = max(begins_s, link.cut_until_s)
            latency_ms = max(latency_ms, link.factor * link.medium.latency_ms)
        self.heap.at(begins_s + latency_ms / 1e3, call)

    def carry(self, source: Host, target: Host, count: int, now: float) -> Stream:
        """Begin to move `count` bytes, 1 or more, from one worker's device to another's."""
        return stream(source.way_to(target, between=self._switch), count, now)
