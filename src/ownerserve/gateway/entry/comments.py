"""Comments tell the client of a streamed turn that waits before the fleet that it is not forgotten:
proxies and load balancers give up on a server that is silent for 60 s.

    : waiting for a seat, place 3 of 12, 20 s
"""

from __future__ import annotations

from ownerserve.gateway.http.events import comment
from ownerserve.router.entry.queue import AdmissionQueue, HeldTurn
from ownerserve.router.entry.terms import WaitReason

_FOR = {
    WaitReason.SEAT: "a seat",
    WaitReason.RUNNING: "a running turn's place",
    WaitReason.STATE: "memory for its session's state",
}


class WaitComments:
    """The comments of one gateway. `every_s`: after so long a client hears the first, and as often
    one more; 0: none is said."""

    def __init__(self, queue: AdmissionQueue, every_s: float) -> None:
        self.every_s = every_s
        self._queue = queue

    def waiting(self, held: HeldTurn, waited_s: float) -> bytes:
        """Return what is said of a turn that waits."""
        at = self._queue.place(held)
        said = f"waiting for {_FOR[held.reason]}, place {at.place} of {at.of}, {waited_s:.0f} s"
        return comment(said)

    def let_in(self, waited_s: float) -> bytes:
        """Return what is said of a turn of whose answer nothing has come, `waited_s` after it
        came."""
        return comment(f"let in, awaiting the answer's first token, {waited_s:.0f} s")
