"""What a mover is, on the side that reads, and what it needs on the side that lends.

    reads   start(read) -> ReadLanded | ReadFailed, or ReadUnproven -> ReadQuiet
    lends   Lender.runs, Lender.stands: asked from a mover's threads
    both    OpenEngine: one of another maker's, by which this process is read too

A mover writes into goals on its own threads (or has a device write into an arena), never after
`ReadLanded` or `ReadFailed`. One that can't know when its writer stops says `is_fenced` False,
gets goals in an arena only, and ends a read that went wrong with `ReadUnproven`.
"""

from __future__ import annotations

from typing import Protocol

from ownerserve.transfer.movers.arena import StagingMemory
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.vocabulary import Ended, FramePiece, Read, Runs


class Mover(Protocol):
    """A `Mover` is one road from one peer. Its calls never block and never raise for what a peer
    does; all are made by one thread."""

    @property
    def name(self) -> str:
        """Return the road's name, a label of metrics: `readv`, `shm`, `tcp`, `mooncake`, `nixl`."""
        ...

    @property
    def is_fenced(self) -> bool:
        """Tell whether no byte is written after a read's end."""
        ...

    @property
    def is_signed(self) -> bool:
        """Tell whether a ReadLanded says that the ticket stood after the last byte was read. If
        not, it counts only once the asker's `More`, asked after it, was told that it stands."""
        ...

    def start(self, read: Read) -> None:
        """Begin the read. Its end comes from `ended`, by its deadline."""
        ...

    def cancel(self, number: int) -> None:
        """Have the read end soon, as CANCELLED, or as it ends anyway; one that is over, or unknown,
        is no error."""
        ...

    def ended(self) -> list[Ended]:
        """Return the ends that came since the last call; each is told once."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable while `ended` has something to tell (an eventfd): at
        once, or within 1 ms where more reads are under way."""
        ...

    def close(self) -> None:
        """End all reads as CANCELLED, and every thread. Returns when no byte can be written any
        more, or (not fenced) when all that is unproven has been told. What `ended` has not told
        yet it still tells; the descriptor is closed, and what is started ends CANCELLED."""
        ...


class Lender(Protocol):
    """A `Lender` answers a mover's threads for what this process has lent. Any thread may call."""

    def runs(self, ticket: int, piece: FramePiece) -> Runs | None:
        """Return where the piece lies now; None: it is not lent under that ticket."""
        ...

    def stands(self, ticket: int) -> bool:
        """Tell whether the ticket stands: asked after a read, before its bytes are signed. False
        is said before any block of it is used again."""
        ...


class OpenEngine(Protocol):
    """An `OpenEngine` is a transfer engine of another maker, open in this process: peers read what
    is registered with it, and its movers read peers. It can't be fenced: into an arena only. What
    is registered stays so, and must stay mapped, until the process ends."""

    @property
    def address(self) -> str:
        """Return how peers' engines reach this one, once all is registered."""
        ...

    def register(self, address: int, size: int) -> None:
        """Let these bytes be read by peers, or be read into. Raises InvalidInput where the engine
        takes them not."""
        ...

    def mover(self, address: str, *, arena: StagingMemory, digests: Digests) -> Mover:
        """Return a mover that reads from the peer whose engine has that address."""
        ...

    def lends(self) -> None:
        """Answer readers from now on: something is lent. Any thread may call."""
        ...

    def rests(self) -> None:
        """Answer none: nothing is lent. Any thread may call."""
        ...

    def close(self) -> None:
        """Answer nobody any more, and end the threads that are ours."""
        ...
