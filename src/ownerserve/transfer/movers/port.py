"""What a mover is, on the side that reads, and what it needs on the side that lends.

    reads   start(read) -> ReadLanded | ReadFailed, or ReadUnproven -> ReadQuiet
    lends   Lender.runs, Lender.stands: asked from a mover's threads

A mover writes into goals on its own threads (or has a device write into an arena), never after
`ReadLanded` or `ReadFailed`. One that can't know when its writer stops says `is_fenced` False,
gets goals in an arena only, and ends a read that went wrong with `ReadUnproven`.
"""

from __future__ import annotations

from typing import Protocol

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
